"""How a call of attention is cut into tiles: queries and keys in blocks, batch and heads in groups."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from alibi.attention.call import AttentionCall, at_once, shown_to
from alibi.attention.reference import dropout_factors
from alibi.positions.bias import Bias, Part

# Measured on two cores where nothing is skipped: smaller tiles spend their time on starting
# products, larger ones leave the cache and compute more of what the causal mask hides.
BLOCK = 512  # queries or keys
TILE_WEIGHTS = 2**20  # of all batch entries and heads that go together
# An accelerator does a whole batch at once.
ACCELERATOR_TILE_WEIGHTS = 2**26


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is cut into tiles, with what else is static of it.

    Attributes:
      batch, heads, q_length, k_length: sizes of the call, its batch dimensions taken together.
      batch_group, head_group: how many batch entries and heads are computed together, as one group.
      q_block, k_block: how many queries and keys a tile has.
      causal, window, dropout_rate, broadcast_dropout, precision, platform: of the call.
    """

    batch: int
    heads: int
    q_length: int
    k_length: int
    batch_group: int
    head_group: int
    q_block: int
    k_block: int
    causal: bool
    window: int | None
    dropout_rate: float
    broadcast_dropout: bool
    precision: jax.lax.PrecisionLike
    platform: str

    @property
    def batch_groups(self) -> int:
        return self.batch // self.batch_group

    @property
    def head_groups(self) -> int:
        return self.heads // self.head_group

    @property
    def groups(self) -> int:
        return self.batch_groups * self.head_groups

    def first_of_group(self, index: Any) -> tuple[Any, Any]:
        """The first batch entry and the first head of a group, whose number may be traced."""
        batch, head = jnp.divmod(index, self.head_groups)
        return batch * self.batch_group, head * self.head_group

    @property
    def padding(self) -> tuple[int, int]:
        """How many queries and keys fill up the last blocks."""
        return self.q_blocks * self.q_block - self.q_length, self.k_blocks * self.k_block - self.k_length

    @property
    def q_blocks(self) -> int:
        return -(-self.q_length // self.q_block)

    @property
    def k_blocks(self) -> int:
        return -(-self.k_length // self.k_block)


def make_plan(call: AttentionCall) -> Plan:
    """The plan for `call` on the platform of its options."""
    platform = call.options.platform
    heads, (q_length, k_length) = call.query.shape[-2], call.weights_shape[-2:]
    batch = math.prod(call.query.shape[:-3])
    q_block, k_block = (_block(length, call.options.block or BLOCK) for length in (q_length, k_length))
    room = TILE_WEIGHTS if platform == "cpu" else ACCELERATOR_TILE_WEIGHTS
    batch_group = at_once(batch, room // (q_block * k_block), call.devices)
    if platform == "cpu" and call.bias is not None:
        # Each head has a bias of its own, which fills the cache too; batch entries mostly share one. A tile of two
        # heads with a bounded bias must be computed as soon as one of them needs it, so such heads go one by one.
        # (That doesn't depend on skip_epsilon, so that skipping doesn't change how products are rounded.)
        room //= 4 if call.bias.bounded else 2
    head_group = at_once(heads, room // (batch_group * q_block * k_block), call.devices)
    return Plan(
        batch,
        heads,
        q_length,
        k_length,
        batch_group,
        head_group,
        q_block,
        k_block,
        call.causal,
        call.window,
        call.dropout_rate,
        call.broadcast_dropout,
        call.precision,
        platform,
    )


def _block(length: int, most: int) -> int:
    """The length of blocks that are about equal, so that little is filled up; a multiple of 8 if there are several."""
    blocks = -(-length // most)
    return length if blocks == 1 else -(-length // (8 * blocks)) * 8


def take_group(
    x: Float[Array, "batch length heads features"], plan: Plan, index: Any, length: int
) -> Float[Array, "group_batch group_heads whole_blocks features"]:
    """The batch entries and heads of the group whose number is `index`, filled up with zeros to `length`.

    They stay two dimensions, since joined they could not both be split over devices.
    """
    if plan.groups > 1:
        batch, head = plan.first_of_group(index)
        x = jax.lax.dynamic_slice(x, (batch, 0, head, 0), (plan.batch_group, x.shape[1], plan.head_group, x.shape[3]))
    return jnp.pad(x.transpose(0, 2, 1, 3), [(0, 0), (0, 0), (0, length - x.shape[1]), (0, 0)])


def put_group(
    whole: Float[Array, "batch length heads features"],
    plan: Plan,
    index: Any,
    part: Float[Array, "group_batch group_heads whole_blocks features"],
) -> Float[Array, "batch length heads features"]:
    """`whole` with the `part` of one group in its place, without what filled it up: the inverse of `take_group`.

    Where a loop carries `whole`, it is changed in place. A call of one group makes `part` the whole.
    """
    part = part[:, :, : whole.shape[1]].transpose(0, 2, 1, 3).astype(whole.dtype)
    if plan.groups == 1:
        return part
    batch, head = plan.first_of_group(index)
    return jax.lax.dynamic_update_slice(whole, part, (batch, 0, head, 0))


@dataclasses.dataclass(frozen=True)
class Sides:
    """What else is known of the queries and keys of a call, filled up to whole blocks.

    Positions and segments are `[length]`, or `[batch, length]` where batch entries differ.
    """

    query_positions: Int[Array, "*#batch q"]
    key_positions: Int[Array, "*#batch k"]
    query_segments: Int[Array, "*segments q"] | None
    key_segments: Int[Array, "*segments k"] | None
    mask: Bool[Array, "#batch #heads #q #k"] | None
    dropout_rng: Array | None


jax.tree_util.register_dataclass(Sides)


def make_sides(call: AttentionCall, plan: Plan) -> Sides:
    """The call's positions, segments and mask in whole blocks."""
    batch_dims = call.query.shape[:-3]

    def side(x: Any, blocks: int, block: int) -> Array:
        x = jnp.asarray(x, jnp.int32)  # differences of unsigned ones would wrap around
        if x.ndim > 1:
            x = jnp.broadcast_to(x, (*batch_dims, x.shape[-1])).reshape(-1, x.shape[-1])
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, blocks * block - x.shape[-1])], mode="edge")

    q_side, k_side = (plan.q_blocks, plan.q_block), (plan.k_blocks, plan.k_block)
    mask = call.mask
    if mask is not None:
        mask = mask.astype(bool).reshape((1,) * (len(batch_dims) + 3 - mask.ndim) + mask.shape)
        if len(batch_dims) != 1:
            mask = jnp.broadcast_to(mask, (*batch_dims, *mask.shape[-3:])).reshape(-1, *mask.shape[-3:])
        padding = [
            (0, blocks * block - size if size > 1 else 0)
            for size, (blocks, block) in zip(mask.shape[-2:], (q_side, k_side), strict=True)
        ]
        mask = jnp.pad(mask, [(0, 0), (0, 0), *padding])
    return Sides(
        query_positions=side(call.query_positions, *q_side),
        key_positions=side(call.key_positions, *k_side),
        query_segments=None if call.query_segments is None else side(call.query_segments, *q_side),
        key_segments=None if call.key_segments is None else side(call.key_segments, *k_side),
        mask=mask,
        dropout_rng=call.dropout_rng if call.drops else None,
    )


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a tile: its first batch entry and head, and the numbers of its blocks; all may be traced."""

    batch: Any
    head: Any
    q_block: Any
    k_block: Any


def part_of(plan: Plan, place: Place) -> Part:
    """The batch entries, heads, queries and keys of one tile, as a bias is cut to them."""
    return Part(
        (place.batch, plan.batch_group),
        (place.head, plan.head_group),
        (place.q_block * plan.q_block, plan.q_block),
        (place.k_block * plan.k_block, plan.k_block),
    )


def tile_bias(of_tile: Bias, plan: Plan, sides: Sides, place: Place) -> Float[Array, "batch heads q k"]:
    """The values of a bias that has been cut to one tile; the batch dimension is 1 where all entries share them."""
    block = of_tile(*_of_tile(sides.query_positions, sides.key_positions, plan, place))
    return block if block.ndim == 4 else block[None]


def tile_values(
    of_tile: Bias, weights: Float[Array, "batch heads q k"], plan: Plan, sides: Sides, place: Place
) -> Float[Array, "batch heads q value_dim"]:
    """What a bias that adds values, cut to one tile, adds to the results of its queries by these weights."""
    return of_tile.of_values(weights, *_of_tile(sides.query_positions, sides.key_positions, plan, place))


def tile_visible(plan: Plan, sides: Sides, place: Place) -> Bool[Array, "#batch #heads q k"] | None:
    """True where the queries of one tile see its keys; None if they do everywhere."""
    positions = _of_tile(sides.query_positions, sides.key_positions, plan, place)
    segments = _of_tile(sides.query_segments, sides.key_segments, plan, place)
    shown = shown_to(*positions, *segments, causal=plan.causal, window=plan.window)
    conditions = [one[:, None] if one.ndim == 3 else one[None, None] for one in shown]
    if plan.k_blocks * plan.k_block > plan.k_length:
        column = place.k_block * plan.k_block + jnp.arange(plan.k_block)
        conditions.append((column < plan.k_length)[None, None, None, :])
    if sides.mask is not None:
        starts = (place.batch, place.head, place.q_block * plan.q_block, place.k_block * plan.k_block)
        sizes = (plan.batch_group, plan.head_group, plan.q_block, plan.k_block)
        whole = [size == 1 for size in sides.mask.shape]
        conditions.append(
            jax.lax.dynamic_slice(
                sides.mask,
                [0 if one else start for one, start in zip(whole, starts, strict=True)],
                [1 if one else size for one, size in zip(whole, sizes, strict=True)],
            )
        )
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def tile_dropout(plan: Plan, sides: Sides, place: Place) -> Float[Array, "#batch #heads q k"] | None:
    """Dropout's factors 0 or 1 / (1 - rate) of one tile, the same in forward and backward pass; None: no dropout."""
    if sides.dropout_rng is None:
        return None
    key = jax.random.fold_in(jax.random.fold_in(sides.dropout_rng, place.q_block), place.k_block)
    if not plan.broadcast_dropout:
        key = jax.random.fold_in(jax.random.fold_in(key, place.batch), place.head)
    shape = (plan.batch_group, plan.head_group, plan.q_block, plan.k_block)
    return dropout_factors(key, plan.dropout_rate, shape, plan.broadcast_dropout)


def _of_tile(of_queries: Array | None, of_keys: Array | None, plan: Plan, place: Place) -> tuple[Any, Any]:
    """Positions or segments of one tile, for the batch entries of its group where these differ; None stays None."""

    def part(x: Int[Array, "*batch length"] | None, block: int, number: Any) -> Int[Array, "*group block"] | None:
        if x is not None and x.ndim > 1:
            x = jax.lax.dynamic_slice_in_dim(x, place.batch, plan.batch_group, axis=0)
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, number * block, block, axis=-1)

    return part(of_queries, plan.q_block, place.q_block), part(of_keys, plan.k_block, place.k_block)
