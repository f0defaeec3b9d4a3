"""The programs in kernels for GPUs: sizes, loads, and the loop over tiles."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import CompilerParams
from jax.experimental.pallas.triton import load as load_places
from jaxtyping import Array, Float

from alibi.attention.accelerator.plan import Backward, KernelPlan, Operands
from alibi.attention.accelerator.tile_math import LoadedTile, terms_of
from alibi.attention.visible import floor


class Size(NamedTuple):
    """How a kernel runs.

    Attributes:
      rows: queries, or keys, that a program owns.
      columns: keys, or queries, in a tile.
      warps: groups of 32 threads that share a program.
      stages: tiles in memory at once: the running one and the next.
    """

    rows: int
    columns: int
    warps: int
    stages: int


FORWARD, QUERIES, KEYS, DIAGONALS = (
    "forward",
    "backward_queries",
    "backward_keys",
    "backward_diagonals",
)
# Keys have the bytes of a head's features. Among the fastest on an H200 at 8,192 tokens that fit into
# 99 KiB, which a program shares on the smallest GPU of today.
SIZES = {
    (FORWARD, 128): Size(128, 64, 4, 3),
    (QUERIES, 128): Size(64, 64, 4, 3),
    (KEYS, 128): Size(64, 64, 4, 3),
    (DIAGONALS, 128): Size(64, 64, 4, 2),
    (FORWARD, 256): Size(128, 64, 4, 2),
    (QUERIES, 256): Size(64, 64, 4, 2),
    (KEYS, 256): Size(64, 64, 4, 2),
    (DIAGONALS, 256): Size(64, 64, 4, 1),
}
WIDE = {512: Size(32, 32, 4, 1), 1024: Size(16, 16, 4, 1)}  # for every kernel, not measured
BY_DISTANCE = Size(64, 32, 4, 3)  # with a distance bias; both divide the rows of DIAGONALS
# Instead of BY_DISTANCE where nearly all tiles have one number, as T5's far ones. They were compiled, not
# timed. A near tile fits into an H100's registers. For QUERIES it would take so many that two programs
# run at once in place of three. FORWARD with a third stage would need more than 99 KiB.
OF_FAR_TILES = {(FORWARD, 128): Size(128, 64, 4, 2), (KEYS, 128): Size(64, 64, 4, 3)}
FAR_FROM = 16  # times the least distance that is far, in keys
COPIES = 4  # of such a bias, each one number ahead, so that four neighbours load at once


def size_of(plan: KernelPlan, kernel: str, operands: Operands) -> Size:
    features = max(operands.query.shape[-1], operands.value.shape[-1])
    width = max(128, features * operands.query.dtype.itemsize)
    size = WIDE[width] if width in WIDE else SIZES[kernel, width]
    if "diagonals" in operands.bias and kernel != DIAGONALS and width not in WIDE:
        larger = OF_FAR_TILES if _mostly_far(plan, operands) else {}
        size = larger.get((kernel, width), BY_DISTANCE)
    return size._replace(rows=min(size.rows, plan.block), columns=min(size.columns, plan.block))


def _mostly_far(plan: KernelPlan, operands: Operands) -> bool:
    """Whether nearly all tiles that are needed have one number of the distance bias, and no mask."""
    sight, keys = plan.sight, plan.k_blocks * plan.block
    return (
        plan.level_from is not None
        and FAR_FROM * plan.level_from <= keys
        and plan.first is not None
        and sight.causal
        and sight.window is None
        and not operands.hides
    )


def run(
    name: str,
    plan: KernelPlan,
    size: Size,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    arrays: tuple[Any, ...],
    out: Any,
    out_blocks: Any,
) -> Any:
    """Runs a kernel in which each program may read all arrays."""
    return pl.pallas_call(
        functools.partial(kernel, plan, size),
        grid=grid,
        in_specs=jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim), arrays),
        out_specs=out_blocks,
        out_shape=out,
        compiler_params=CompilerParams(num_warps=size.warps, num_stages=size.stages),
        interpret=plan.interpret,
        name=f"attention_{name}",
    )(*arrays)


def _rows_of_heads(x: Array, width: int | None = None) -> Array:
    """Returns queries, keys or values as `[batch, length, heads, features]`, like a model's.

    Features are filled up to a power of two from 16 on, as products need.
    """
    width = width or max(16, 1 << (x.shape[-1] - 1).bit_length())
    # XLA leaves out this transposition and the one before.
    return jnp.pad(x.transpose(0, 2, 1, 3), [(0, 0)] * 3 + [(0, width - x.shape[-1])])


class Program:
    """A kernel's program: its rows in one sequence and head, and the columns that they meet.

    Args:
      refs: the call's arrays.
      by_keys: True if the rows are keys.
      at: sequence, head and rows. Defaults to the running program's.
    """

    def __init__(
        self, plan: KernelPlan, size: Size, refs: Operands, *, by_keys: bool, at: Any = None
    ) -> None:
        self.plan, self.size, self.refs, self.by_keys = plan, size, refs, by_keys
        if at is None:
            *at, row = (pl.program_id(axis) for axis in range(3))
            at.append(row if by_keys else pl.num_programs(2) - 1 - row)
        self.batch, self.head, self.row = at
        self.kv_head = lax.div(self.head, jnp.int32(plan.shared_by))
        self.queries, self.keys = size[:2][:: -1 if by_keys else 1]

    def load_queries(self, array: Any, q: Any) -> Float[Array, "queries features"]:
        """Loads a query block from queries or their gradients."""
        return array[self.batch, pl.ds(q * self.queries, self.queries), self.head, :]

    def load_keys(self, array: Any, k: Any) -> Float[Array, "keys features"]:
        """Loads a key block from keys or values."""
        return array[self.batch, pl.ds(k * self.keys, self.keys), self.kv_head, :]

    def of_queries(self, x: Array) -> Array:
        """Returns numbers for queries as a column, or as a row if the rows are keys."""
        return x[None, :] if self.by_keys else x[:, None]

    def of_keys(self, x: Array) -> Array:
        return x[:, None] if self.by_keys else x[None, :]

    def sides(self, name: str, q: Any, k: Any) -> tuple[Array, Array]:
        """Returns the positions or segments in a tile, for queries and keys."""

        def load(side: str, block: Any, size: int) -> Array:
            array = self.refs.sides[f"{side}_{name}"]
            return array[self.batch if len(array) > 1 else 0, 0, pl.ds(block * size, size)]

        of_query, of_key = load("query", q, self.queries), load("key", k, self.keys)
        return self.of_queries(of_query), self.of_keys(of_key)

    def numbers(self, array: Any, q: Any) -> Array:
        """Loads one number for each query."""
        span = pl.ds(q * self.queries, self.queries)
        return self.of_queries(array[self.batch, self.head, 0, span])

    def start(self) -> Any:
        """Returns where a distance bias has the first row and the first column."""
        plan = self.plan
        least = plan.k_blocks * plan.block if self.by_keys else plan.q_blocks * plan.block - 1
        return least - self.row * self.size.rows

    def far(self) -> Any:
        """Returns how many farthest tiles have one constant bias (the first such tile if rows
        are keys).
        """
        rows, columns, *_ = self.size
        count = self.refs.bias["far_count"][self.head]
        if not self.by_keys:
            return floor(count - self.start(), columns)
        first = self.refs.bias["diagonals"].shape[2] - count + rows - 1 - self.start()
        return floor(first + columns - 1, columns)

    def values(self, tile: Any) -> Any:
        """Returns the values that a distance bias has in a tile, or None for another bias."""
        diagonals: Any = self.refs.bias.get("diagonals")
        if diagonals is None:
            return None
        # Row r of the tile starts r numbers before its first row does.
        rows = lax.broadcasted_iota(jnp.int32, (self.size.rows, 1), 0)
        columns = lax.broadcasted_iota(jnp.int32, (1, self.size.columns), 1)
        first = self.start() + tile * self.size.columns - rows
        index = lax.div(first, jnp.int32(COPIES)) * COPIES + columns
        copy = jnp.broadcast_to(lax.rem(first, jnp.int32(COPIES)), index.shape)
        return load_places(diagonals.at[self.head, copy, index])

    def tile(
        self, q: Any, k: Any, query: Array, key: Array, value: Array, values: Any
    ) -> LoadedTile:
        """Returns a tile with these arrays and its positions, segments and other biases."""
        plan, bias = self.plan, self.refs.bias
        queries = self.of_queries(lax.broadcasted_iota(jnp.int32, (self.queries,), 0))
        keys = self.of_keys(lax.broadcasted_iota(jnp.int32, (self.keys,), 0))
        ahead = q * self.queries - k * self.keys
        if plan.first is None:
            rows, columns = self.sides("positions", q, k)
        else:
            rows, columns = queries + (ahead + plan.first[0] - plan.first[1]), keys
        segments = slope = terms = mask = None
        if "query_segments" in self.refs.sides:
            segments = self.sides("segments", q, k)
        if "mask" in self.refs.sides:
            array = self.refs.sides["mask"]
            batch, head = (
                at if size > 1 else 0
                for at, size in zip((self.batch, self.head), array.shape[:2], strict=True)
            )
            spans = pl.ds(q * self.queries, self.queries), pl.ds(k * self.keys, self.keys)
            rows_first = spans[::-1] if self.by_keys else spans
            mask = array[batch, head, *rows_first] != 0
        if "slopes" in bias:
            slope = bias["slopes"][self.head]
        elif "query_term" in bias:
            of_keys = self.of_keys(
                bias["key_term"][self.batch, self.head, 0, pl.ds(k * self.keys, self.keys)]
            )
            of_first = bias["key_term"][self.batch, self.head, 0, k * self.keys]
            terms = terms_of(plan, self.numbers(bias["query_term"], q), of_keys, of_first)
        numbers = keys + k * self.keys
        vectors = query, key, value
        return LoadedTile(
            *vectors, rows, columns, numbers, segments, slope, terms, values, mask, self.by_keys
        )

    def gradients(
        self, q: Any, tile: LoadedTile, dout: Array, more: Backward, *, masked: bool
    ) -> Any:
        lse, delta = (self.numbers(x, q) for x in (more.lse, more.delta))
        return tile.gradients(self.plan, dout, lse, delta, masked=masked)

    def whole(self) -> tuple[Any, Any]:
        """Returns the first tile in which all rows see all columns, and the tile after the last,
        or an empty range if only the running program knows.
        """
        plan, (rows, columns, *_) = self.plan, self.size
        if plan.first is None or self.refs.hides:
            return jnp.int32(0), jnp.int32(0)
        ahead = plan.first[0] - plan.first[1]  # of the first query to the first key
        start = self.row * rows + (-ahead if self.by_keys else ahead)
        first, after = plan.sight.whole_tiles(start, rows, columns, by_keys=self.by_keys)
        if not self.by_keys:
            return first, jnp.minimum(after, plan.k_length // columns)
        return first, jnp.where((self.row + 1) * rows <= plan.k_length, after, 0)

    def loop(self, ranges: Any, add: Callable[..., Any], state: Any) -> Any:
        """Returns the state after `add(tile, state, values, masked=...)` for all tiles that the rows
        need.
        """
        block = lax.div(self.row, jnp.int32(self.plan.block // self.size.rows))
        first, after = (
            ranges[self.batch, self.head, block, end] * (self.plan.block // self.size.columns)
            for end in range(2)
        )
        whole_first, whole_after = (jnp.clip(x, first, after) for x in self.whole())
        whole_after = jnp.maximum(whole_first, whole_after)
        spans = [(whole_first, whole_after, False)]
        if "diagonals" in self.refs.bias:
            middle = jnp.clip(self.far(), whole_first, whole_after)
            spans = [(whole_first, middle, not self.by_keys), (middle, whole_after, self.by_keys)]

        def of_tile(tile: Any, state: Any, *, masked: bool, far: bool) -> Any:
            values = self.refs.bias["far"][self.head] if far else self.values(tile)
            return add(tile, state, values, masked=masked)

        masked = functools.partial(of_tile, masked=True, far=False)
        state = lax.fori_loop(first, whole_first, masked, state)
        for start, end, far in spans:
            seen = functools.partial(of_tile, masked=False, far=far)
            state = lax.fori_loop(start, end, seen, state)
        return lax.fori_loop(whole_after, after, masked, state)


def prepared(plan: KernelPlan, operands: Operands, *, by_keys: bool = False) -> Operands:
    """Returns the operands in the kernels' layout.

    A distance bias comes in copies, from the least i - j to the largest if the rows are keys, with
    its value at the largest distance and how many distances share it.
    """
    bias = dict(operands.bias)
    if "diagonals" in bias:
        numbers = bias["diagonals"].reshape(plan.heads, -1)
        changes = jnp.pad(numbers[:, 1:] != numbers[:, :-1], ((0, 0), (0, 1)), constant_values=True)
        bias |= {"far": numbers[:, 0], "far_count": changes.argmax(axis=1).astype(jnp.int32) + 1}
        numbers = jnp.pad(numbers[:, ::-1] if by_keys else numbers, ((0, 0), (0, COPIES)))
        copies = [numbers[:, more : more - COPIES] for more in range(COPIES)]
        bias["diagonals"] = jnp.stack(copies, axis=1)
    sides = dict(operands.sides)
    if "mask" in sides and by_keys:
        sides["mask"] = sides["mask"].swapaxes(2, 3)
    query, key, value = map(_rows_of_heads, operands[:3])
    return operands._replace(query=query, key=key, value=value, bias=bias, sides=sides)


def prepared_backward(operands: Operands, backward: Backward) -> Backward:
    return backward._replace(dout=_rows_of_heads(backward.dout, operands.value.shape[-1]))


def rows_of(size: Size, width: int, last: int | None = None) -> Any:
    """Returns the block that a program writes in an array `[batch, length, heads, width]`.

    Args:
      last: the last rows' index if programs take the last rows first: under a causal mask the
        last queries take longest, and the first keys.
    """

    def index(batch: Any, head: Any, row: Any) -> tuple[Any, ...]:
        return batch, row if last is None else last - row, head, 0

    return pl.BlockSpec((1, size.rows, 1, width), index)


def numbers_of(size: Size, last: int | None = None) -> Any:
    """Returns the block that a program writes in an array `[batch, heads, 1, length]`, with
    `last` as in `rows_of`.
    """

    def index(batch: Any, head: Any, row: Any) -> tuple[Any, ...]:
        return batch, head, 0, row if last is None else last - row

    return pl.BlockSpec((1, 1, 1, size.rows), index)
