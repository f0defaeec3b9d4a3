"""The fused kernels for TPUs (Pallas, compiled by Mosaic).

For each row of tiles a kernel sets its scratch memory to zero, adds tile after tile, and writes the
result.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.tpu import roll
from jaxtyping import Array, Float

from alibi.attention.accelerator.mosaic_grid import Pass, Step
from alibi.attention.accelerator.plan import Backward, KernelPlan, Operands
from alibi.attention.accelerator.tile_math import (
    COLUMNS_BY_COLUMNS,
    ROWS_BY_COLUMNS,
    LoadedTile,
    product,
)
from alibi.attention.online import Online


def _to_diagonals(tile: Float[Array, "block block"]) -> Float[Array, "1 two_blocks"]:
    """Returns the sum over each diagonal in a tile, in the order of `_from_diagonals`."""
    rows = jnp.concatenate([tile, jnp.zeros_like(tile)], axis=1)
    while len(rows) > 1:  # row r has still to move by len(rows) - 1 - r columns
        half = len(rows) // 2
        rows = roll(rows[:half], half, 1) + rows[half:]
    return rows


def forward(
    plan: KernelPlan, operands: Operands, needed: Array, dtype: Any
) -> tuple[Float[Array, "batch heads q value_dim"], Float[Array, "batch heads 1 q"]]:
    """See `plan`."""
    tiles, value_dim = Pass(plan, needed, by_keys=False), operands.value.shape[-1]
    shape = operands.query.shape[:3]
    return tiles.run(
        "attention_forward",
        _forward,
        operands,
        None,
        (
            jax.ShapeDtypeStruct((*shape, value_dim), dtype),
            jax.ShapeDtypeStruct((*shape[:2], 1, shape[2]), jnp.float32),
        ),
        (tiles.queries(value_dim), tiles.numbers("q")),
        [(plan.block, 1), (plan.block, 1), (plan.block, value_dim)],
    )


def _forward(
    tiles: Pass, step: Step, refs: Operands, _: None, out: Any, lse: Any, *softmax: Any
) -> None:
    at = step.at

    def put(state: Online) -> None:
        for ref, x in zip(softmax, state, strict=True):
            ref[...] = x

    @pl.when(step.begins_row)
    def begin() -> None:
        sink = None if refs.sink is None else refs.sink[at.head]
        block, value_dim = softmax[-1].shape
        put(Online.start((block,), value_dim, sink))

    def add(tile: LoadedTile, *, masked: bool) -> None:
        put(tile.add_to(Online(*(ref[...] for ref in softmax)), tiles.plan, masked=masked))

    tiles.add(refs, at, add)

    @pl.when(step.ends_row)
    def end() -> None:
        attended, of_rows = Online(*(ref[...] for ref in softmax)).result(tiles.plan.unit)
        out[0, 0], lse[0, 0] = attended.astype(out.dtype), of_rows.reshape(1, -1)


def backward_queries(
    plan: KernelPlan, operands: Operands, needed: Array, backward: Backward
) -> Float[Array, "batch heads q head_dim"]:
    """See `plan`."""
    tiles, query = Pass(plan, needed, by_keys=False), operands.query
    width = query.shape[-1]
    return tiles.run(
        "attention_backward_queries",
        _backward_queries,
        operands,
        backward,
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        tiles.queries(width),
        [(plan.block, width)],
    )


def _backward_queries(
    tiles: Pass, step: Step, refs: Operands, more: Backward, out: Any, of_query: Any
) -> None:
    at = step.at

    @pl.when(step.begins_row)
    def begin() -> None:
        of_query[...] = jnp.zeros_like(of_query)

    def add(tile: LoadedTile, *, masked: bool) -> None:
        *_, dproducts = tiles.gradients(tile, more, masked=masked)
        of_query[...] += product(
            tiles.plan, dproducts.astype(tile.key.dtype), tile.key, ROWS_BY_COLUMNS
        )

    tiles.add(refs, at, add)

    @pl.when(step.ends_row)
    def end() -> None:
        out[0, 0] = (of_query[...] * tiles.plan.scale).astype(out.dtype)


def backward_keys(
    plan: KernelPlan,
    operands: Operands,
    needed: Array,
    backward: Backward,
    learned: tuple[str, ...],
) -> tuple[Array, Array, dict[str, Array]]:
    """See `plan`."""
    tiles = Pass(plan, needed, by_keys=True)
    batch, heads, *_ = operands.query.shape
    block, length = plan.block, operands.key.shape[2]
    widths = operands.key.shape[-1], operands.value.shape[-1]
    dtype = operands.key.dtype if plan.shared_by == 1 else jnp.float32  # a group's are summed later
    shapes = {
        "slopes": (heads, 1, 1, block),  # by columns of tiles, which are summed later
        "diagonals": (heads, plan.q_blocks + plan.k_blocks, 1, block),
        "key_term": (batch, heads, 1, length),
    }
    out = [jax.ShapeDtypeStruct((batch, heads, length, width), dtype) for width in widths]
    out += [jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in learned]
    blocks = [tiles.keys(width, group=1) for width in widths]
    for name in learned:
        # A head's gradient stays in memory until all its tiles are done.
        whole = tiles.block((1, *shapes[name][1:]), lambda at: (at.head, 0, 0, 0))
        blocks.append(tiles.numbers("k") if name == "key_term" else whole)
    dkey, dvalue, *dbias = tiles.run(
        "attention_backward_keys",
        functools.partial(_backward_keys, learned),
        operands,
        backward,
        out,
        blocks,
        [(block, width) for width in widths],
    )
    by_name = dict(zip(learned, dbias, strict=True))
    if "slopes" in by_name:
        by_name["slopes"] = by_name["slopes"].sum(axis=(1, 2, 3))
    return dkey, dvalue, by_name


def _backward_keys(
    learned: tuple[str, ...],
    tiles: Pass,
    step: Step,
    refs: Operands,
    more: Backward,
    dkey: Any,
    dvalue: Any,
    *rest: Any,
) -> None:
    at = step.at
    *dbias, of_key, of_value = rest
    of_bias = dict(zip(learned, dbias, strict=True))

    @pl.when(step.begins_row)
    def begin() -> None:
        for ref in (of_key, of_value):
            ref[...] = jnp.zeros_like(ref)

    for name, ref in of_bias.items():

        @pl.when(step.begins_row if name == "key_term" else step.begins_head)
        def begin_bias(ref: Any = ref) -> None:
            ref[...] = jnp.zeros_like(ref)

    def add(tile: LoadedTile, *, masked: bool) -> None:
        plan, dout = tiles.plan, more.dout[0, 0]
        weights, dlogits, dproducts = tiles.gradients(tile, more, masked=masked)
        of_value[...] += product(plan, weights.astype(dout.dtype), dout, COLUMNS_BY_COLUMNS)
        of_key[...] += product(
            plan, dproducts.astype(tile.query.dtype), tile.query, COLUMNS_BY_COLUMNS
        )
        if "key_term" in of_bias:
            of_bias["key_term"][0, 0] += dlogits.sum(axis=0, keepdims=True)
        if "slopes" in of_bias:
            by_slope = dlogits * tile.distances(plan)
            of_bias["slopes"][0, 0] -= by_slope.sum(axis=0, keepdims=True)
        if "diagonals" in of_bias:
            sums, row = _to_diagonals(dlogits), plan.q_blocks - 1 - at.q + at.k
            of_bias["diagonals"][0, row] += sums[:, : plan.block]
            of_bias["diagonals"][0, row + 1] += sums[:, plan.block :]

    tiles.add(refs, at, add)

    @pl.when(step.ends_row)
    def end() -> None:
        dkey[0, 0] = (of_key[...] * tiles.plan.scale).astype(dkey.dtype)
        dvalue[0, 0] = of_value[...].astype(dvalue.dtype)
