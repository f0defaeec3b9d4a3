"""A call's tiles: queries and keys in blocks, batch entries and heads in groups."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from alibi.attention.call import AttentionCall
from alibi.attention.reference import dropout_factors
from alibi.attention.visible import Sight
from alibi.positions.bias import Bias

# Measured on two cores where nothing is skipped: smaller tiles spend their time on starting
# products, larger ones leave the cache and compute more keys above the diagonal.
BLOCK = 512  # queries or keys
LEAST_QUERIES = 64  # in a tile of whole rows
TILE_WEIGHTS = 2**20  # of all batch entries and heads in a group
# An accelerator does a whole batch at once.
ACCELERATOR_TILE_WEIGHTS = 2**26

# Positions and segments `[length]`, or `[batch, length]` if batch entries differ, under the names of
# the call's fields, and the mask, all filled up to whole blocks; and the dropout key.
Sides = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A call's tiles and other static values.

    Attributes:
      batch, heads, q_length, k_length: the call's sizes. All batch dimensions count as one.
      batch_group, head_group: how many batch entries and heads are computed together.
      q_block, k_block: queries and keys in a tile.
      sight, logit_cap, dropout_rate, broadcast_dropout, precision: as in the call.
    """

    batch: int
    heads: int
    q_length: int
    k_length: int
    batch_group: int
    head_group: int
    q_block: int
    k_block: int
    sight: Sight
    logit_cap: float | None
    dropout_rate: float
    broadcast_dropout: bool
    precision: jax.lax.PrecisionLike

    @property
    def batch_groups(self) -> int:
        return self.batch // self.batch_group

    @property
    def head_groups(self) -> int:
        return self.heads // self.head_group

    @property
    def groups(self) -> int:
        return self.batch_groups * self.head_groups

    @property
    def q_blocks(self) -> int:
        return -(-self.q_length // self.q_block)

    @property
    def k_blocks(self) -> int:
        return -(-self.k_length // self.k_block)

    @property
    def padding(self) -> tuple[int, int]:
        """The queries and the keys that fill up the last blocks."""
        return (
            self.q_blocks * self.q_block - self.q_length,
            self.k_blocks * self.k_block - self.k_length,
        )

    def first_of_group(self, index: Any) -> tuple[Any, Any]:
        """Returns the first batch entry and the first head in a group (`index` may be traced)."""
        batch, head = jnp.divmod(index, self.head_groups)
        return batch * self.batch_group, head * self.head_group


def make_tiling(call: AttentionCall) -> Tiling:
    """Returns the tiling that `blocked` uses on the platform in the call's options."""
    on_cpu = call.options.platform == "cpu"
    room = TILE_WEIGHTS if on_cpu else ACCELERATOR_TILE_WEIGHTS
    heads, (q_length, k_length) = call.query.shape[-2], call.weights_shape[-2:]
    batch, blocks = math.prod(call.query.shape[:-3]), list[int]()
    largest = [call.options.block or BLOCK] * 2
    if call.bias is not None and call.bias.reads_rows and not call.bias.carried:
        # all keys, and a quarter of the queries that fit, since such a bias makes arrays of its own
        largest = [min(largest[0], max(LEAST_QUERIES, room // 4 // k_length)), k_length]
    for length, most in zip((q_length, k_length), largest, strict=True):
        count = -(-length // most)
        # Blocks are about equal, so that little is filled up, and if there are several, multiples
        # of 8.
        blocks.append(length if count == 1 else -(-length // (8 * count)) * 8)
    weights, together = math.prod(blocks), call.bias is not None and call.bias.mixes_heads
    if together:
        weights *= heads
    batch_group = _at_once(batch, room // weights, call.devices)
    if on_cpu and call.bias is not None:
        # Each head has its own bias, which fills the cache too; batch entries mostly share a bias. A
        # tile of two heads with a bounded bias must be computed if either needs it, so such heads go
        # one by one. (This doesn't depend on skip_epsilon, so that skipping doesn't change how
        # products are rounded.)
        room //= 4 if call.bias.bounded else 2
    head_group = _at_once(heads, room // (batch_group * weights), call.devices)
    if together:
        head_group = heads
    return Tiling(
        batch,
        heads,
        q_length,
        k_length,
        batch_group,
        head_group,
        q_block=blocks[0],
        k_block=blocks[1],
        sight=call.sight,
        logit_cap=call.options.logit_cap,
        dropout_rate=call.dropout_rate,
        broadcast_dropout=call.broadcast_dropout,
        precision=call.precision,
    )


def _at_once(count: int, fitting: int, devices: int) -> int:
    """Returns how many among `count` batch entries or heads to compute together: its largest divisor up
    to `fitting`.

    On several devices it is `count`, since a loop over a split array would gather it.
    """
    if devices > 1:
        return count
    return max(n for n in range(1, count + 1) if count % n == 0 and n <= max(1, fitting))


def make_sides(call: AttentionCall, tiling: Tiling) -> Sides:
    """Returns positions, segments and mask in whole blocks, and the dropout key."""
    batch_dims, (more_queries, more_keys) = call.query.shape[:-3], tiling.padding
    sides: Sides = {"dropout_rng": call.dropout_rng if "dropout" in call.features else None}
    names = "query_positions", "key_positions", "query_segments", "key_segments", "query_reach"
    for name in names:
        x, padding = getattr(call, name), more_queries if name.startswith("query") else more_keys
        if x is not None:
            x = jnp.asarray(x, jnp.int32)  # differences of unsigned positions would wrap around
            if x.ndim > 1:
                x = jnp.broadcast_to(x, (*batch_dims, x.shape[-1])).reshape(-1, x.shape[-1])
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)], mode="edge")
        sides[name] = x
    mask = call.mask
    if mask is not None:
        mask = mask.reshape((1,) * (len(batch_dims) + 3 - mask.ndim) + mask.shape)
        if len(batch_dims) != 1:
            mask = jnp.broadcast_to(mask, (*batch_dims, *mask.shape[-3:])).reshape(
                -1, *mask.shape[-3:]
            )
        *_, q, k = mask.shape
        mask = jnp.pad(
            mask,
            [(0, 0), (0, 0), (0, more_queries if q > 1 else 0), (0, more_keys if k > 1 else 0)],
        )
    return sides | {"mask": mask}


def take_group(
    x: Float[Array, "batch length heads features"], tiling: Tiling, index: Any, length: int
) -> Float[Array, "group_batch group_heads whole_blocks features"]:
    """Returns the batch entries and heads in the group `index`, filled up with zeros to `length`.

    They stay two dimensions, so that both can be split over devices.
    """
    if tiling.groups > 1:
        batch, head = tiling.first_of_group(index)
        sizes = (tiling.batch_group, x.shape[1], tiling.head_group, x.shape[3])
        x = jax.lax.dynamic_slice(x, (batch, 0, head, 0), sizes)
    return jnp.pad(x.transpose(0, 2, 1, 3), [(0, 0), (0, 0), (0, length - x.shape[1]), (0, 0)])


def put_group(
    whole: Float[Array, "batch length heads features"],
    tiling: Tiling,
    index: Any,
    group: Float[Array, "group_batch group_heads whole_blocks features"],
) -> Float[Array, "batch length heads features"]:
    """Returns `whole` with a group put in, without its padding: the inverse of `take_group`.

    A loop that carries `whole` changes it in place.
    """
    group = group[:, :, : whole.shape[1]].transpose(0, 2, 1, 3).astype(whole.dtype)
    if tiling.groups == 1:
        return group
    batch, head = tiling.first_of_group(index)
    return jax.lax.dynamic_update_slice(whole, group, (batch, 0, head, 0))


class BlockPair(NamedTuple):
    """A query block against a key block, for the batch entries and heads in a group.

    Attributes:
      q_block, k_block: the blocks' indices, which may be traced.
      part: a `Part` with all four ranges.
    """

    q_block: Any
    k_block: Any
    part: Any
    tiling: Tiling
    sides: Sides

    def side(self, name: str) -> Any:
        """Returns the tile's positions or segments, `[batch, block]` or `[block]`, or None."""
        if (x := self.sides[name]) is None:
            return None
        start, size = self.part.queries if name.startswith("query") else self.part.keys
        if x.ndim > 1:
            x = jax.lax.dynamic_slice_in_dim(x, *self.part.batch)
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis=-1)

    def bias_values(self, bias: Bias | None) -> Float[Array, "batch heads q k"] | None:
        """Returns the values from a bias cut to the tile. The batch dimension is 1 if entries
        share them.
        """
        if bias is None:
            return None
        block = bias(self.side("query_positions"), self.side("key_positions"))
        return block if block.ndim == 4 else block[None]

    def added_values(
        self, bias: Bias, weights: Float[Array, "batch heads q k"]
    ) -> Float[Array, "batch heads q value_dim"]:
        """Returns what a bias that `adds_values`, cut to the tile, adds to the results."""
        return bias.of_values(weights, self.side("query_positions"), self.side("key_positions"))

    def visible(self) -> Bool[Array, "#batch #heads q k"] | None:
        """Returns a mask, True where a query sees a key, or None if all queries see all keys."""
        tiling, pairs = self.tiling, self.tiling.sight.of_sides(self.side)
        masks = [mask[:, None] if mask.ndim == 3 else mask[None, None] for mask in pairs]
        if tiling.padding[1]:
            column = self.part.keys[0] + jnp.arange(tiling.k_block)
            masks.append((column < tiling.k_length)[None, None, None, :])
        if (mask := self.sides["mask"]) is not None:
            # Dimensions of size 1 broadcast.
            spans = [
                (0, 1) if size == 1 else span
                for size, span in zip(mask.shape, self.part, strict=True)
            ]
            # of one type, also with 64 bits
            starts = [jnp.asarray(start, jnp.int32) for start, _ in spans]
            masks.append(jax.lax.dynamic_slice(mask, starts, [size for _, size in spans]))
        return functools.reduce(jnp.logical_and, masks) if masks else None

    def dropout(self, weights: Float[Array, "batch heads q k"]) -> Float[Array, "batch heads q k"]:
        """Returns the weights times dropout's factors, equal in forward and backward pass."""
        key, tiling = self.sides["dropout_rng"], self.tiling
        if key is None:
            return weights
        key = jax.random.fold_in(jax.random.fold_in(key, self.q_block), self.k_block)
        if not tiling.broadcast_dropout:
            key = jax.random.fold_in(
                jax.random.fold_in(key, self.part.batch[0]), self.part.heads[0]
            )
        return weights * dropout_factors(
            key, tiling.dropout_rate, weights.shape, tiling.broadcast_dropout
        )
