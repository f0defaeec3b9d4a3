"""The fused kernels for GPUs (Pallas, compiled by Triton).

Each program computes a few rows, queries or keys, tile after tile of the range that they need, while
the next tiles are loaded. A distance bias has a kernel for its gradient: a program adds up
the tiles on one diagonal, and XLA sums the diagonals in the result. Where one parameter is the bias
of all far pairs, the kernel of keys sums the far tiles, and this one the rest.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, Shaped

from alibi.attention.accelerator.plan import Backward, KernelPlan, Operands
from alibi.attention.accelerator.tile_math import ROWS_BY_COLUMNS, product
from alibi.attention.accelerator.triton_grid import (
    DIAGONALS,
    FORWARD,
    KEYS,
    QUERIES,
    Program,
    Size,
    numbers_of,
    prepared,
    prepared_backward,
    rows_of,
    run,
    size_of,
)
from alibi.attention.online import Online
from alibi.attention.skipping import ranges_of


def forward(
    plan: KernelPlan, operands: Operands, needed: Array, dtype: Any
) -> tuple[Float[Array, "batch heads q value_dim"], Float[Array, "batch heads 1 q"]]:
    """See `plan`."""
    value_dim, operands = operands.value.shape[-1], prepared(plan, operands)
    size, width = size_of(plan, FORWARD, operands), operands.value.shape[-1]
    shape = operands.query.shape[:3]
    count = shape[1] // size.rows
    out, lse = run(
        FORWARD,
        plan,
        size,
        _forward,
        (plan.batch, plan.heads, count),
        (operands, ranges_of(needed)),
        (
            jax.ShapeDtypeStruct((*shape, width), dtype),
            jax.ShapeDtypeStruct((plan.batch, plan.heads, 1, shape[1]), jnp.float32),
        ),
        (rows_of(size, width, count - 1), numbers_of(size, count - 1)),
    )
    return out[..., :value_dim].transpose(0, 2, 1, 3), lse


def _forward(plan: KernelPlan, size: Size, refs: Operands, ranges: Any, out: Any, lse: Any) -> None:
    program = Program(plan, size, refs, by_keys=False)
    query = program.load_queries(refs.query, program.row)

    def add(k: Any, state: Online, values: Any, *, masked: bool) -> Online:
        tile = program.tile(
            program.row,
            k,
            query,
            program.load_keys(refs.key, k),
            program.load_keys(refs.value, k),
            values,
        )
        return tile.add_to(state, plan, masked=masked)

    sink = None if refs.sink is None else refs.sink[program.head]
    state = Online.start((size.rows,), refs.value.shape[-1], sink)
    attended, of_rows = program.loop(ranges, add, state).result(plan.unit)
    out[0, :, 0, :], lse[0, 0, 0] = attended.astype(out.dtype), of_rows.reshape(-1)


def backward_queries(
    plan: KernelPlan, operands: Operands, needed: Array, backward: Backward
) -> Float[Array, "batch heads q head_dim"]:
    """See `plan`."""
    head_dim, operands = operands.query.shape[-1], prepared(plan, operands)
    size, query = size_of(plan, QUERIES, operands), operands.query
    count = query.shape[1] // size.rows
    dquery = run(
        QUERIES,
        plan,
        size,
        _backward_queries,
        (plan.batch, plan.heads, count),
        (operands, prepared_backward(operands, backward), ranges_of(needed)),
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        rows_of(size, query.shape[-1], count - 1),
    )
    return dquery[..., :head_dim].transpose(0, 2, 1, 3)


def _backward_queries(
    plan: KernelPlan, size: Size, refs: Operands, more: Backward, ranges: Any, out: Any
) -> None:
    program = Program(plan, size, refs, by_keys=False)
    q = program.row
    query, dout = program.load_queries(refs.query, q), program.load_queries(more.dout, q)

    def add(k: Any, of_query: Array, values: Any, *, masked: bool) -> Array:
        key = program.load_keys(refs.key, k)
        tile = program.tile(q, k, query, key, program.load_keys(refs.value, k), values)
        *_, dproducts = program.gradients(q, tile, dout, more, masked=masked)
        return of_query + product(plan, dproducts.astype(key.dtype), key, ROWS_BY_COLUMNS)

    of_query = program.loop(ranges, add, jnp.zeros(query.shape, jnp.float32))
    out[0, :, 0, :] = (of_query * plan.scale).astype(out.dtype)


def backward_keys(
    plan: KernelPlan,
    operands: Operands,
    needed: Array,
    backward: Backward,
    learned: tuple[str, ...],
) -> tuple[Array, Array, dict[str, Array]]:
    """See `plan`."""
    dims, of_call = (operands.key.shape[-1], operands.value.shape[-1]), operands
    operands = prepared(plan, operands, by_keys=True)
    backward = prepared_backward(operands, backward)
    widths = operands.key.shape[-1], operands.value.shape[-1]
    shape = plan.batch, operands.key.shape[1], plan.heads
    dtype = operands.key.dtype if plan.shared_by == 1 else jnp.float32  # a group's are summed later
    size = size_of(plan, KEYS, operands)
    count = shape[1] // size.rows
    of_diagonals = size_of(plan, DIAGONALS, operands)
    near = near_diagonals(plan, of_diagonals.rows)
    level = plan.level_from is not None and plan.first is not None
    by_rows = tuple(name for name in learned if name != "diagonals" or level)
    numbers = jax.ShapeDtypeStruct((plan.batch, plan.heads, 1, shape[1]), jnp.float32)
    dkey, dvalue, *dbias = run(
        KEYS,
        plan,
        size,
        functools.partial(_backward_keys, by_rows, near.start, of_diagonals.rows),
        (plan.batch, plan.heads, count),
        (operands, backward, ranges_of(needed.swapaxes(2, 3))),
        [*(jax.ShapeDtypeStruct((*shape, width), dtype) for width in widths), *[numbers] * len(by_rows)],
        [*(rows_of(size, width) for width in widths), *[numbers_of(size)] * len(by_rows)],
    )  # fmt: skip
    by_name = dict(zip(by_rows, dbias, strict=True))
    if "slopes" in by_name:
        by_name["slopes"] = by_name["slopes"].sum(axis=(0, 2, 3))
    if "diagonals" in learned:
        sums = _diagonals(plan, prepared(plan, of_call), needed, backward, near)
        if level:  # any far number stands for their parameter
            sums = sums.at[:, 0, 0, 0].add(by_name["diagonals"].sum(axis=(0, 2, 3)))
        by_name["diagonals"] = sums
    dkey, dvalue = (x.transpose(0, 2, 1, 3) for x in (dkey[..., : dims[0]], dvalue[..., : dims[1]]))
    return dkey, dvalue, by_name


def _backward_keys(
    learned: tuple[str, ...],
    nearest: int,
    rows: int,
    plan: KernelPlan,
    size: Size,
    refs: Operands,
    more: Backward,
    ranges: Any,
    dkey: Any,
    dvalue: Any,
    *dbias: Any,
) -> None:
    program = Program(plan, size, refs, by_keys=True)
    k = program.row
    key, value = program.load_keys(refs.key, k), program.load_keys(refs.value, k)

    def add(q: Any, state: tuple[Array, ...], values: Any, *, masked: bool) -> tuple[Array, ...]:
        of_key, of_value, *of_bias = state
        query, dout = program.load_queries(refs.query, q), program.load_queries(more.dout, q)
        tile = program.tile(q, k, query, key, value, values)
        weights, dlogits, dproducts = program.gradients(q, tile, dout, more, masked=masked)
        if "slopes" in learned:
            dlogits = -dlogits * tile.distances(plan)
        of_rows = dlogits.sum(axis=1)
        if "diagonals" in learned:  # their own kernel sums the near tiles, which are larger
            starts = k * size.rows, q * size.columns
            of_keys, of_queries = (lax.div(start, jnp.int32(rows)) for start in starts)
            of_rows = jnp.where(of_keys - of_queries < nearest, of_rows, 0.0)
        return (
            of_key + product(plan, dproducts.astype(query.dtype), query, ROWS_BY_COLUMNS),
            of_value + product(plan, weights.astype(dout.dtype), dout, ROWS_BY_COLUMNS),
            *(x + of_rows for x in of_bias),
        )

    start = [jnp.zeros(x.shape, jnp.float32) for x in (key, value)]
    start += [jnp.zeros(size.rows, jnp.float32) for _ in dbias]
    of_key, of_value, *of_bias = program.loop(ranges, add, tuple(start))
    dkey[0, :, 0, :] = (of_key * plan.scale).astype(dkey.dtype)
    dvalue[0, :, 0, :] = of_value.astype(dvalue.dtype)
    for ref, x in zip(dbias, of_bias, strict=True):
        ref[0, 0, 0] = x


def near_diagonals(plan: KernelPlan, rows: int) -> range:
    """Returns the diagonals of tiles, each as key block minus query block, whose pairs are neither all
    hidden by a causal mask nor all at `KernelPlan.level_from` or farther, but at least one.
    """
    least, most = 1 - plan.q_blocks * plan.block // rows, plan.k_blocks * plan.block // rows - 1
    if plan.first is not None:
        ahead = plan.first[0] - plan.first[1]
        if plan.sight.causal:
            most = min(most, max((rows - 1 + ahead) // rows, least))
        if plan.level_from is not None:
            least = min(most, max(least, (ahead + 1 - plan.level_from) // rows))
    return range(least, most + 1)


def _diagonals(
    plan: KernelPlan, operands: Operands, needed: Array, backward: Backward, near: range
) -> Float[Array, "heads blocks 1 block"]:
    """Returns the gradient for `Operands.bias["diagonals"]` from the tiles of these diagonals."""
    size = size_of(plan, DIAGONALS, operands)
    rows, count = size.rows, len(near)
    q_rows, k_rows = (blocks * plan.block // rows for blocks in (plan.q_blocks, plan.k_blocks))
    before, hidden = near.start + q_rows - 1, k_rows - near.stop
    sums = run(
        DIAGONALS,
        plan,
        size,
        functools.partial(_sum_diagonal, near.start),
        (plan.heads, count),
        (operands, backward, _diagonal_ranges(needed, plan.block // rows)[:, :, before:]),
        jax.ShapeDtypeStruct((plan.heads, count, rows, rows), jnp.float32),
        pl.BlockSpec((1, 1, rows, rows), lambda head, diagonal: (head, count - 1 - diagonal, 0, 0)),
    )
    moved = _skewed(sums).sum(axis=2)
    halves = jnp.pad(moved, [(0, 0)] * 2 + [(0, 1)]).reshape(plan.heads, count, 2, rows)
    first, second = (
        jnp.pad(halves[:, :, at], ((0, 0), (before + at, 1 - at + hidden), (0, 0)))
        for at in range(2)
    )
    return (first + second).reshape(plan.heads, -1, 1, plan.block)


def _diagonal_ranges(
    needed: Bool[Array, "batch heads q k"], times: int
) -> Int[Array, "batch heads diagonals two"]:
    """Returns the first query block that each diagonal needs and the one after the last, with
    blocks cut into `times` smaller ones. Diagonals go from the least k - q to the largest.
    """
    needed = needed.repeat(times, axis=2).repeat(times, axis=3)
    return ranges_of(_skewed(needed)[:, :, ::-1].swapaxes(2, 3))


def _skewed(x: Shaped[Array, "batch heads rows columns"]) -> Shaped[Array, "batch heads rows _"]:
    """Returns the rows from the last to the first, each one column further to the right."""
    *batch, rows, columns = x.shape
    # Rows that are one number shorter than they were move by one each.
    flat = jnp.pad(x[:, :, ::-1], [(0, 0)] * 3 + [(0, rows)]).reshape(*batch, -1)
    return flat[..., : rows * (rows + columns - 1)].reshape(*batch, rows, -1)


def _sum_diagonal(
    least: int, plan: KernelPlan, size: Size, refs: Operands, more: Backward, ranges: Any, out: Any
) -> None:
    head = pl.program_id(0)
    # the longest under a causal mask come first
    diagonal = pl.num_programs(1) - 1 - pl.program_id(1)
    ahead = diagonal + least  # key blocks minus query blocks
    # All tiles have the same bias, and all hide the same pairs but for keys that fill up the last.
    first = jnp.maximum(-ahead, 0)
    values = Program(plan, size, refs, by_keys=False, at=(0, head, first)).values(first + ahead)

    def of_sequence(batch: Any, total: Array) -> Array:
        def add(q: Any, total: Array, masked: bool) -> Array:
            program = Program(plan, size, refs, by_keys=False, at=(batch, head, q))
            k, dout = q + ahead, program.load_queries(more.dout, q)
            tile = program.tile(
                q,
                k,
                program.load_queries(refs.query, q),
                program.load_keys(refs.key, k),
                program.load_keys(refs.value, k),
                values,
            )
            return total + program.gradients(q, tile, dout, more, masked=masked)[1]

        start, after = (ranges[batch, head, diagonal, end] for end in range(2))
        program = Program(plan, size, refs, by_keys=False, at=(batch, head, start))
        whole_first, whole_after = program.whole()
        is_whole = (whole_first <= start + ahead) & (start + ahead < whole_after)
        most = jnp.minimum(after, plan.k_length // size.columns - ahead)
        split = jnp.where(is_whole, jnp.clip(most, start, after), start)
        total = lax.fori_loop(start, split, functools.partial(add, masked=False), total)
        return lax.fori_loop(split, after, functools.partial(add, masked=True), total)

    total = jnp.zeros((size.rows, size.rows), jnp.float32)
    out[0, 0] = lax.fori_loop(0, plan.batch, of_sequence, total)
