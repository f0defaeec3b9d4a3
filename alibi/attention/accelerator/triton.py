"""The fused kernels for GPUs (Pallas, compiled by Triton).

Each program computes a block of queries, or of keys, against the range of blocks of the other side
that it needs. The gradient of a bias by distance has a kernel of its own: a program goes through
the tiles of one diagonal, whose sum it writes, and XLA sums the diagonals of that.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton
from jaxtyping import Array, Bool, Float, Int

from alibi.attention.accelerator.plan import Backward, Operands, Plan
from alibi.attention.accelerator.tile_math import (
    COLUMNS_BY_COLUMNS,
    ROWS_BY_COLUMNS,
    Online,
    Tile,
    product,
)

WARPS = 4  # not measured


def _ranges(needed: Bool[Array, "*rows columns"]) -> Int[Array, "*rows two"]:
    """Returns the first needed column of each row and the column after the last."""
    first, after = needed.argmax(axis=-1), needed.shape[-1] - needed[..., ::-1].argmax(axis=-1)
    some = needed.any(axis=-1, keepdims=True)
    return jnp.where(some, jnp.stack([first, after], axis=-1), 0).astype(jnp.int32)


def _run(
    name: str,
    plan: Plan,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    arrays: tuple[Any, ...],
    out: Any,
    out_blocks: Any,
) -> Any:
    """Runs a kernel whose programs read any part of the arrays."""
    query = arrays[0].query
    # Two stages load a block while the one before is computed, which takes twice the memory.
    stages = 2 if plan.block * query.shape[-1] * query.dtype.itemsize <= 2**13 else 1
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=grid,
        in_specs=jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim), arrays),
        out_specs=out_blocks,
        out_shape=out,
        compiler_params=pallas_triton.CompilerParams(num_warps=WARPS, num_stages=stages),
        interpret=plan.interpret,
        name=name,
    )(*arrays)


def _with_dims_of_powers(operands: Operands) -> Operands:
    """Returns the operands with features filled up to a power of two of at least 16, as products
    need.
    """
    query, key, value = (
        jnp.pad(x, [(0, 0)] * 3 + [(0, max(16, 1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1])])
        for x in operands[:3]
    )
    return operands._replace(query=query, key=key, value=value)


class _Reader:
    """Reads the tiles of one sequence and head.

    Args:
      refs: all arrays of the call.
    """

    def __init__(self, plan: Plan, refs: Operands, batch: Any, head: Any) -> None:
        self.plan, self.refs, self.batch, self.head = plan, refs, batch, head
        self.kv_head = lax.div(head, jnp.int32(plan.group))

    def span(self, number: Any) -> Any:
        return pl.ds(number * self.plan.block, self.plan.block)

    def query(self, number: Any) -> Float[Array, "block head_dim"]:
        return self.refs.query[self.batch, self.head, self.span(number), :]

    def key(self, number: Any) -> Float[Array, "block head_dim"]:
        return self.refs.key[self.batch, self.kv_head, self.span(number), :]

    def value(self, number: Any) -> Float[Array, "block value_dim"]:
        return self.refs.value[self.batch, self.kv_head, self.span(number), :]

    def side(self, name: str, number: Any) -> Int[Array, " block"]:
        array = self.refs.sides[name]
        return array[self.batch if len(array) > 1 else 0, 0, self.span(number)]

    def tile(self, q: Any, k: Any, query: Array, key: Array, value: Array) -> Tile:
        """Returns a tile, of the queries, keys and values that were read."""
        plan, bias, block = self.plan, self.refs.bias, self.plan.block
        index = lax.broadcasted_iota(jnp.int32, (block,), 0)
        numbers = index + k * block
        if plan.first is None:
            rows, columns = self.side("query_positions", q), self.side("key_positions", k)
        else:
            rows, columns = index + (q * block + plan.first[0]), numbers + plan.first[1]
        segments = slope = values = None
        if "query_segments" in self.refs.sides:
            segments = (
                self.side("query_segments", q)[:, None],
                self.side("key_segments", k)[None, :],
            )
        if "slopes" in bias:
            slope = bias["slopes"][self.head]
        elif "diagonals" in bias:
            first = (plan.q_blocks - 1 - q + k) * block + block - 1
            place = first - index[:, None] + index[None, :]
            diagonals: Any = bias["diagonals"]
            values = pallas_triton.load(diagonals.at[self.head, place])
        elif "query_term" in bias:
            of_query, of_key = (
                bias[name][self.batch, self.head, 0, self.span(number)]
                for name, number in (("query_term", q), ("key_term", k))
            )
            values = of_query[:, None] + of_key[None, :]
        return Tile(
            query, key, value, rows[:, None], columns[None, :], numbers[None, :], segments, slope, values
        )  # fmt: skip

    def gradients(self, q: Any, tile: Tile, more: Backward) -> tuple[Array, ...]:
        lse, delta = (
            x[self.batch, self.head, 0, self.span(q)][:, None] for x in (more.lse, more.delta)
        )
        return tile.gradients(self.plan, self.dout(q, more), lse, delta, masked=True)

    def dout(self, q: Any, more: Backward) -> Float[Array, "block value_dim"]:
        return more.dout[self.batch, self.head, self.span(q), :]


def _prepared(operands: Operands) -> Operands:
    """Returns the operands as the kernels read them."""
    bias = dict(operands.bias)
    if "diagonals" in bias:
        bias["diagonals"] = bias["diagonals"].reshape(len(bias["diagonals"]), -1)
    return _with_dims_of_powers(operands)._replace(bias=bias)


def _prepared_backward(operands: Operands, backward: Backward) -> Backward:
    more = operands.value.shape[-1] - backward.dout.shape[-1]
    return backward._replace(dout=jnp.pad(backward.dout, [(0, 0)] * 3 + [(0, more)]))


def _rows(plan: Plan, width: int) -> Any:
    return pl.BlockSpec((1, 1, plan.block, width), lambda batch, head, row: (batch, head, row, 0))


def _numbers(plan: Plan) -> Any:
    return pl.BlockSpec((1, 1, 1, plan.block), lambda batch, head, row: (batch, head, 0, row))


def forward(
    plan: Plan, operands: Operands, needed: Array, dtype: Any
) -> tuple[Float[Array, "batch heads q value_dim"], Float[Array, "batch heads 1 q"]]:
    """See `plan`."""
    value_dim, operands = operands.value.shape[-1], _prepared(operands)
    width = operands.value.shape[-1]
    shape = operands.query.shape[:3]
    out, lse = _run(
        "attention_forward",
        plan,
        _forward,
        (plan.batch, plan.heads, plan.q_blocks),
        (operands, _ranges(needed)),
        (
            jax.ShapeDtypeStruct((*shape, width), dtype),
            jax.ShapeDtypeStruct((*shape[:2], 1, shape[2]), jnp.float32),
        ),
        (_rows(plan, width), _numbers(plan)),
    )
    return out[..., :value_dim], lse


def _forward(plan: Plan, refs: Operands, ranges: Any, out: Any, lse: Any) -> None:
    batch, head, q = (pl.program_id(axis) for axis in range(3))
    reader = _Reader(plan, refs, batch, head)
    query = reader.query(q)

    def add(k: Any, state: Online) -> Online:
        tile = reader.tile(q, k, query, reader.key(k), reader.value(k))
        return state.add(plan, tile, masked=True)

    sink = None if refs.sink is None else refs.sink[head]
    state = Online.start(plan.block, refs.value.shape[-1], sink)
    state = lax.fori_loop(ranges[batch, head, q, 0], ranges[batch, head, q, 1], add, state)
    attended, of_rows = state.result()
    out[0, 0], lse[0, 0, 0] = attended.astype(out.dtype), of_rows.reshape(-1)


def backward_queries(
    plan: Plan, operands: Operands, needed: Array, backward: Backward
) -> Float[Array, "batch heads q head_dim"]:
    """See `plan`."""
    head_dim, operands = operands.query.shape[-1], _prepared(operands)
    query, backward = operands.query, _prepared_backward(operands, backward)
    found = _run(
        "attention_backward_queries",
        plan,
        _backward_queries,
        (plan.batch, plan.heads, plan.q_blocks),
        (operands, backward, _ranges(needed)),
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        _rows(plan, query.shape[-1]),
    )
    return found[..., :head_dim]


def _backward_queries(plan: Plan, refs: Operands, more: Backward, ranges: Any, out: Any) -> None:
    batch, head, q = (pl.program_id(axis) for axis in range(3))
    reader = _Reader(plan, refs, batch, head)
    query = reader.query(q)

    def add(k: Any, of_query: Array) -> Array:
        key = reader.key(k)
        tile = reader.tile(q, k, query, key, reader.value(k))
        *_, dproducts = reader.gradients(q, tile, more)
        return of_query + product(plan, dproducts.astype(key.dtype), key, ROWS_BY_COLUMNS)

    of_query = jnp.zeros(query.shape, jnp.float32)
    of_query = lax.fori_loop(ranges[batch, head, q, 0], ranges[batch, head, q, 1], add, of_query)
    out[0, 0] = (of_query * plan.scale).astype(out.dtype)


def backward_keys(
    plan: Plan, operands: Operands, needed: Array, backward: Backward, learned: tuple[str, ...]
) -> tuple[Array, Array, dict[str, Array]]:
    """See `plan`."""
    dims = operands.key.shape[-1], operands.value.shape[-1]
    operands = _prepared(operands)
    backward = _prepared_backward(operands, backward)
    widths = operands.key.shape[-1], operands.value.shape[-1]
    shape = plan.batch, plan.heads, operands.key.shape[2]
    dtype = operands.key.dtype if plan.group == 1 else jnp.float32  # a group's are summed later
    by_columns = tuple(name for name in learned if name != "diagonals")
    numbers = jax.ShapeDtypeStruct((*shape[:2], 1, shape[2]), jnp.float32)
    dkey, dvalue, *dbias = _run(
        "attention_backward_keys",
        plan,
        functools.partial(_backward_keys, by_columns),
        (plan.batch, plan.heads, plan.k_blocks),
        (operands, backward, _ranges(needed.swapaxes(2, 3))),
        [*(jax.ShapeDtypeStruct((*shape, width), dtype) for width in widths), *[numbers] * len(by_columns)],
        [*(_rows(plan, width) for width in widths), *[_numbers(plan)] * len(by_columns)],
    )  # fmt: skip
    found = dict(zip(by_columns, dbias, strict=True))
    if "slopes" in found:
        found["slopes"] = found["slopes"].sum(axis=(0, 2, 3))
    if "diagonals" in learned:
        found["diagonals"] = _diagonals(plan, operands, needed, backward)
    return dkey[..., : dims[0]], dvalue[..., : dims[1]], found


def _backward_keys(
    learned: tuple[str, ...],
    plan: Plan,
    refs: Operands,
    more: Backward,
    ranges: Any,
    dkey: Any,
    dvalue: Any,
    *dbias: Any,
) -> None:
    batch, head, k = (pl.program_id(axis) for axis in range(3))
    reader = _Reader(plan, refs, batch, head)
    key, value = reader.key(k), reader.value(k)

    def add(q: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
        of_key, of_value, *of_bias = state
        query, dout = reader.query(q), reader.dout(q, more)
        tile = reader.tile(q, k, query, key, value)
        weights, dlogits, dproducts = reader.gradients(q, tile, more)
        if "slopes" in learned:
            dlogits = -dlogits * tile.distances(plan)
        return (
            of_key + product(plan, dproducts.astype(query.dtype), query, COLUMNS_BY_COLUMNS),
            of_value + product(plan, weights.astype(dout.dtype), dout, COLUMNS_BY_COLUMNS),
            *(x + dlogits.sum(axis=0) for x in of_bias),
        )

    start = [jnp.zeros(x.shape, jnp.float32) for x in (key, value)]
    start += [jnp.zeros(plan.block, jnp.float32) for _ in dbias]
    first, after = (ranges[batch, head, k, place] for place in range(2))
    of_key, of_value, *of_bias = lax.fori_loop(first, after, add, tuple(start))
    dkey[0, 0] = (of_key * plan.scale).astype(dkey.dtype)
    dvalue[0, 0] = of_value.astype(dvalue.dtype)
    for ref, x in zip(dbias, of_bias, strict=True):
        ref[0, 0, 0] = x


def _diagonals(
    plan: Plan, operands: Operands, needed: Array, backward: Backward
) -> Float[Array, "heads blocks 1 block"]:
    """Returns the gradient of a bias by distance."""
    block, count = plan.block, plan.q_blocks + plan.k_blocks - 1
    sums = _run(
        "attention_backward_diagonals",
        plan,
        _sum_diagonal,
        (plan.heads, count),
        (operands, backward, needed.astype(jnp.int32)),
        jax.ShapeDtypeStruct((plan.heads, count, block, block), jnp.float32),
        pl.BlockSpec((1, 1, block, block), lambda head, number: (head, number, 0, 0)),
    )
    # Row r has to move by block - 1 - r columns: rows one shorter than they are move by one each.
    rows = jnp.pad(sums[:, :, ::-1], [(0, 0)] * 3 + [(0, block)]).reshape(plan.heads, count, -1)
    moved = rows[..., : block * (2 * block - 1)].reshape(plan.heads, count, block, -1).sum(axis=2)
    halves = jnp.pad(moved, [(0, 0)] * 2 + [(0, 1)]).reshape(plan.heads, count, 2, block)
    first, second = (jnp.pad(halves[:, :, at], ((0, 0), (at, 1 - at), (0, 0))) for at in range(2))
    return (first + second)[:, :, None]


def _sum_diagonal(plan: Plan, refs: Operands, more: Backward, needed: Any, out: Any) -> None:
    head, number = pl.program_id(0), pl.program_id(1)
    ahead = number - (plan.q_blocks - 1)  # block of keys minus block of queries

    def of_sequence(batch: Any, total: Array) -> Array:
        reader = _Reader(plan, refs, batch, head)

        def add(q: Any, total: Array) -> Array:
            def computed(total: Array) -> Array:
                k = q + ahead
                tile = reader.tile(q, k, reader.query(q), reader.key(k), reader.value(k))
                return total + reader.gradients(q, tile, more)[1]

            return lax.cond(needed[batch, head, q, q + ahead] > 0, computed, lambda x: x, total)

        first = jnp.maximum(-ahead, 0)
        return lax.fori_loop(first, jnp.minimum(plan.q_blocks, plan.k_blocks - ahead), add, total)

    total = jnp.zeros((plan.block, plan.block), jnp.float32)
    out[0, 0] = lax.fori_loop(0, plan.batch, of_sequence, total)
