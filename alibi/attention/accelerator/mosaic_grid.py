"""The grid for a fused kernel on TPUs: its tiles, and the blocks that each reads and writes.

The grid is a list for each core, in scalar memory, made when the program runs. The tiles in
a row follow each other. A row is a query block in the forward pass and for their gradients, and
a key block for the other gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.tpu import SMEM, VMEM, CompilerParams, PrefetchScalarGridSpec, roll
from jaxtyping import Array, Bool, Float

from alibi.attention.accelerator.plan import Backward, KernelPlan, Operands
from alibi.attention.accelerator.tile_math import LoadedTile, terms_of

VMEM_LIMIT = 48 * 2**20  # bytes that a kernel may use, of 64 MiB or more since TPU v5


class Place(NamedTuple):
    """The indices of a tile's sequence, query head, query block and key block."""

    batch: Any
    head: Any
    q: Any
    k: Any


class Step(NamedTuple):
    """A step of a kernel.

    Attributes:
      at: the tile.
      is_computed: False for steps after the list's end.
      begins_head, begins_row, ends_row: whether the tile is the first in a head, and the first or
        last in a row.
    """

    at: Place
    is_computed: Any
    begins_head: Any
    begins_row: Any
    ends_row: Any


class Pass:
    """The lists of tiles for a kernel, and the blocks that a tile reads or writes.

    Args:
      by_keys: True if rows are key blocks.
    """

    def __init__(
        self,
        plan: KernelPlan,
        needed: Bool[Array, "batch heads q_blocks k_blocks"],
        *,
        by_keys: bool,
    ) -> None:
        self.plan, self.by_keys = plan, by_keys
        batch, heads = plan.batch, plan.heads
        # Chips may have two cores. Neighbouring heads go to different cores: their biases reach about
        # as far, so that both cores get about the same work.
        self.cores = 2 if heads % 2 == 0 else 1
        by_core = needed.reshape(batch, heads // self.cores, self.cores, *needed.shape[2:])
        # heads before sequences, so that a head's gradient of the bias is summed over sequences
        by_core = by_core.transpose((2, 1, 0, 4, 3) if by_keys else (2, 0, 1, 3, 4))
        rows = by_core.reshape(self.cores, -1, by_core.shape[-1])
        # A row that needs no tile computes its first, so that its result is written.
        rows = rows.at[:, :, 0].max(~rows.any(axis=2))
        most = plan.most_tiles // self.cores
        lists = [jnp.nonzero(of_core.reshape(-1), size=most, fill_value=0)[0] for of_core in rows]
        self.tiles = jnp.stack(lists).astype(jnp.int32)
        self.counts = rows.sum(axis=(1, 2), dtype=jnp.int32)

    def place(self, core: Any, tile: Any) -> Place:
        """Returns the place of a core's tile, counted as row * columns + column."""
        plan, heads = self.plan, self.plan.heads // self.cores
        if self.by_keys:
            row, q = _divided(tile, plan.q_blocks)
            outer, k = _divided(row, plan.k_blocks)
            head, batch = _divided(outer, plan.batch)
        else:
            row, k = _divided(tile, plan.k_blocks)
            outer, q = _divided(row, plan.q_blocks)
            batch, head = _divided(outer, heads)
        return Place(batch, head * self.cores + core, q, k)

    def step(self, steps: Any) -> "Step":
        """Returns the running step from all lists and their lengths."""
        tiles, counts = steps
        core, step = pl.program_id(0), pl.program_id(1)
        columns, last = self.plan.q_blocks if self.by_keys else self.plan.k_blocks, counts[core] - 1

        def row(step: Any) -> Any:
            return lax.div(tiles[core, step], jnp.int32(columns))

        here = jnp.minimum(step, last)
        before, after = jnp.maximum(here - 1, 0), jnp.minimum(here + 1, last)
        at = self.place(core, tiles[core, here])
        head_before = self.place(core, tiles[core, before]).head
        return Step(
            at,
            is_computed=step <= last,
            begins_head=(here == 0) | (head_before != at.head),
            begins_row=(here == 0) | (row(before) != row(here)),
            ends_row=(here == last) | (row(after) != row(here)),
        )

    def block(self, shape: tuple[int, ...], of: Callable[[Place], tuple[Any, ...]]) -> Any:
        """Returns the block, with this shape, that each step reads or writes."""

        def index(core: Any, step: Any, tiles: Any, counts: Any) -> tuple[Any, ...]:
            # The shorter list stays at its last tile.
            return of(self.place(core, tiles[core, jnp.minimum(step, counts[core] - 1)]))

        return pl.BlockSpec(shape, index)

    def queries(self, width: int) -> Any:
        return self.block((1, 1, self.plan.block, width), lambda at: (at.batch, at.head, at.q, 0))

    def keys(self, width: int, group: int) -> Any:
        """Returns the key block in a head that `group` query heads share."""
        return self.block(
            (1, 1, self.plan.block, width),
            lambda at: (at.batch, lax.div(at.head, jnp.int32(group)), at.k, 0),
        )

    def numbers(self, of: str) -> Any:
        """Returns the block in an array with a number for each query or key, `[batch, heads, 1,
        length]`.
        """
        return self.block(
            (1, 1, 1, self.plan.block), lambda at: (at.batch, at.head, 0, getattr(at, of))
        )

    def operands(self, operands: Operands) -> Any:
        block, group = self.plan.block, self.plan.shared_by
        scalars = pl.BlockSpec(memory_space=SMEM)

        def half(more: int) -> Any:
            first = self.plan.q_blocks - 1 + more
            return self.block((1, 1, 1, block), lambda at: (at.head, first - at.q + at.k, 0, 0))

        def side(name: str, array: Array) -> Any:
            if name == "mask":
                batch, heads = (size > 1 for size in array.shape[:2])
                return self.block(
                    (1, 1, block, block),
                    lambda at: (at.batch if batch else 0, at.head if heads else 0, at.q, at.k),
                )
            of, batch = "q" if name.startswith("query") else "k", len(array) > 1
            return self.block(
                (1, 1, block), lambda at: (at.batch if batch else 0, 0, getattr(at, of))
            )

        of_bias = {
            "slopes": scalars,
            "diagonals": (half(0), half(1)),
            "query_term": self.numbers("q"),
            "key_term": self.numbers("k"),
        }
        of_sink: Any = None if operands.sink is None else scalars
        return Operands(
            self.queries(operands.query.shape[-1]),
            self.keys(operands.key.shape[-1], group),
            self.keys(operands.value.shape[-1], group),
            {name: of_bias[name] for name in operands.bias},
            of_sink,
            {name: side(name, array) for name, array in operands.sides.items()},
        )

    def backward(self, backward: Backward) -> Any:
        numbers = self.numbers("q")
        return Backward(self.queries(backward.dout.shape[-1]), numbers, numbers)

    def run(
        self,
        name: str,
        kernel: Callable[..., None],
        operands: Operands,
        backward: Backward | None,
        out: Any,
        out_blocks: Any,
        scratch: list[tuple[int, int]],
    ) -> Any:
        """Runs a kernel with float32 scratch arrays in these shapes."""
        blocks = self.operands(operands), None if backward is None else self.backward(backward)
        if "diagonals" in operands.bias:  # a tile reads two blocks
            both: Any = (operands.bias["diagonals"],) * 2
            operands = operands._replace(bias={"diagonals": both})

        def computed(tiles: Any, counts: Any, *refs: Any) -> None:
            step = self.step((tiles, counts))
            pl.when(step.is_computed)(lambda: kernel(self, step, *refs))

        return pl.pallas_call(
            computed,
            grid_spec=PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(self.cores, self.counts.max()),
                in_specs=list(blocks),
                out_specs=out_blocks,
                scratch_shapes=[VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=out,
            compiler_params=CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
            ),
            interpret=self.plan.interpret,
            name=name,
        )(self.tiles, self.counts, operands, backward)

    def load(self, refs: Operands, at: Place) -> LoadedTile:
        """Loads the tile at a place."""
        plan, bias, sides = self.plan, refs.bias, refs.sides
        block = plan.block
        numbers = lax.broadcasted_iota(jnp.int32, (1, block), 1) + at.k * block
        if plan.first is None:
            rows = sides["query_positions"][0].reshape(block, 1)
            columns = sides["key_positions"][0]
        else:
            ahead = plan.first[0] - plan.first[1] + (at.q - at.k) * block
            rows = lax.broadcasted_iota(jnp.int32, (block, 1), 0) + ahead
            columns = lax.broadcasted_iota(jnp.int32, (1, block), 1)
        segments = terms = values = mask = None
        if "query_segments" in sides:
            segments = sides["query_segments"][0].reshape(block, 1), sides["key_segments"][0]
        if "mask" in sides:
            mask = sides["mask"][0, 0].astype(jnp.int32) != 0
        if "diagonals" in bias:
            values = _from_diagonals([half[0, 0] for half in bias["diagonals"]])
        elif "query_term" in bias:
            of_keys = bias["key_term"][0, 0]
            of_queries = bias["query_term"][0, 0].reshape(block, 1)
            terms = terms_of(plan, of_queries, of_keys, of_keys[:, :1])
        return LoadedTile(
            refs.query[0, 0],
            refs.key[0, 0],
            refs.value[0, 0],
            rows,
            columns,
            numbers,
            segments,
            bias["slopes"][at.head] if "slopes" in bias else None,
            terms,
            values,
            mask,
        )

    def add(self, refs: Operands, at: Place, add: Callable[..., None]) -> None:
        """Calls `add(tile, masked=...)`, with False if each query sees all keys."""
        plan = self.plan
        if plan.first is None or refs.hides:
            add(self.load(refs, at), masked=True)
            return
        least = plan.first[0] - plan.first[1] + (at.q - at.k - 1) * plan.block + 1
        whole = (at.k + 1) * plan.block <= plan.k_length
        whole = plan.sight.of_whole_tile(whole, least, 2 * (plan.block - 1))
        pl.when(whole)(lambda: add(self.load(refs, at), masked=False))
        pl.when(jnp.logical_not(whole))(lambda: add(self.load(refs, at), masked=True))

    def gradients(
        self, tile: LoadedTile, more: Backward, *, masked: bool
    ) -> tuple[Float[Array, "block block"], ...]:
        lse, delta = (x[0, 0].reshape(self.plan.block, 1) for x in (more.lse, more.delta))
        return tile.gradients(self.plan, more.dout[0, 0], lse, delta, masked=masked)


def _divided(index: Any, size: int) -> tuple[Any, Any]:
    return lax.div(index, jnp.int32(size)), lax.rem(index, jnp.int32(size))


def _from_diagonals(halves: list[Float[Array, "1 block"]]) -> Float[Array, "block block"]:
    """Returns a tile that has, at row r and column c, the entry block - 1 - r + c from both halves."""
    numbers = jnp.concatenate(halves, axis=1)
    block = numbers.shape[1] // 2
    rows = jnp.broadcast_to(numbers, (block, 2 * block))
    return roll(rows, block + 1, 1, stride=1, stride_axis=0)[:, :block]
