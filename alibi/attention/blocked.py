"""Attention in tiles: exact, with memory linear in the length, on any device.

The algorithm is FlashAttention (Dao et al. 2022). A tile is a query block against a key block. The
forward pass goes through the tiles in a row with the online softmax. It keeps the result `out` and,
for each query, lse = log(sum(exp(logits))). The backward pass computes the weights in each tile again
as exp(logits - lse). With `dout`, the gradient for `out`, and `delta`, the sum of dout * out over
features,

    dv = weights^T dout    dlogits = weights * (dout v^T - delta)    dq = dlogits k    dk = dlogits^T q

The bias's gradient, `dbias`, is the sum of the tiles' logit gradients. If the bias adds to
the values, v means the values that each query sees. `Bias.of_values` and its derivative compute
these products. A sink is one more key with value zero: the online softmax starts with it, and its
logit has the gradient -exp(sink - lse) * delta.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from alibi.attention.call import ATTENDED, AttentionCall
from alibi.attention.online import Online
from alibi.attention.reference import capped
from alibi.attention.skipping import key_ranges
from alibi.attention.tiles import (
    BlockPair,
    Sides,
    Tiling,
    make_sides,
    make_tiling,
    put_group,
    take_group,
)
from alibi.numerics.products import transposed, written_out
from alibi.numerics.sums import dot_rows, sum_first
from alibi.positions.bias import MASKED, Part

Leaves = tuple[Any, ...]


def blocked_attention(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """Computes attention tile after tile.

    No array `[q, k]` exists: neither logits nor bias nor weights. Tiles that the causal mask or a
    window hides are not computed, nor are tiles that a bounded bias makes too light
    (`alibi.attention.skipping`).
    """
    return _attention(*in_tiles(call)).reshape(*call.query.shape[:-1], -1)


def in_tiles(call: AttentionCall) -> tuple[Any, ...]:
    """Returns queries, keys and values `[batch, length, heads, features]`, the bias's leaves, sink, sides,
    ranges of keys, the tiling, and the bias's tree.
    """
    tiling = make_tiling(call)
    sides = make_sides(call, tiling)
    vectors = (x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value))
    ranges, bias = key_ranges(call, tiling, sides), call.bias
    if bias is not None:
        bias = bias.folded(call.query.ndim - 3).padded(*tiling.padding)
    # Flattened, since jax.custom_vjp passes objects that are no arrays, which a class that checks
    # its fields refuses.
    leaves, tree = jax.tree.flatten(bias)
    return *vectors, tuple(leaves), call.sink, sides, ranges, tiling, tree


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Leaves,
    sink: Array | None,
    sides: Sides,
    ranges: Array,
    tiling: Tiling,
    bias_tree: Any,
) -> Float[Array, "batch q heads value_dim"]:
    return _forward(q, k, v, bias, sink, sides, ranges, tiling, bias_tree, v.dtype)[0]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    bias: Leaves,
    sink: Array | None,
    sides: Sides,
    ranges: Array,
    tiling: Tiling,
    bias_tree: Any,
    dtype: Any,
) -> tuple[
    Float[Array, "batch q heads value_dim"],
    Float[Array, "groups group_batch group_heads whole_blocks 1"],
]:
    """Returns `out` in `dtype`, and `lse` for each group."""

    def add_group(out: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        index, ranges = inputs
        tree = jax.tree.unflatten(bias_tree, bias)
        group = Group.take(index, q, k, v, tree, sink, sides, tiling)
        rows, lse = lax.map(
            lambda block: _forward_rows(group, *block), (jnp.arange(tiling.q_blocks), ranges)
        )
        return put_group(out, tiling, index, joined(rows)), joined(lse)

    out = jnp.zeros((*q.shape[:3], v.shape[-1]), dtype)
    return lax.scan(add_group, out, (jnp.arange(tiling.groups), ranges))


class Group(NamedTuple):
    """Batch entries and heads that are computed together.

    Attributes:
      at: the group's index.
      q, k, v: the group's queries, keys and values, filled up with zeros to whole blocks.
      sink: float32, or None.
      bias, sides: from the whole call, for each tile to cut its part.
    """

    at: Int[Array, ""]
    q: Float[Array, "batch heads q features"]
    k: Float[Array, "batch heads k features"]
    v: Float[Array, "batch heads k value_dim"]
    bias: Any
    sink: Float[Array, "1 heads 1 1"] | None
    sides: Sides
    tiling: Tiling

    @classmethod
    def take(
        cls,
        index: Array,
        q: Array,
        k: Array,
        v: Array,
        bias: Any,
        sink: Array | None,
        sides: Sides,
        tiling: Tiling,
    ) -> "Group":
        """Returns the group `index` from the whole call's arrays."""
        q = take_group(q, tiling, index, tiling.q_blocks * tiling.q_block)
        k, v = (take_group(x, tiling, index, tiling.k_blocks * tiling.k_block) for x in (k, v))
        q, k, v = (written_out(x) for x in (q, k, v))
        if sink is not None:
            first, sink = tiling.first_of_group(index)[1], sink.astype(jnp.float32)
            sink = lax.dynamic_slice_in_dim(sink, first, tiling.head_group)[None, :, None, None]
        return cls(index, q, k, v, bias, sink, sides, tiling)

    def part(self, q_block: Any, first: Any, keys: int) -> Part:
        """Returns the part of the call with a query block and so many `keys` from the `first` on."""
        tiling = self.tiling
        starts = (*tiling.first_of_group(self.at), q_block * tiling.q_block, first)
        sizes = tiling.batch_group, tiling.head_group, tiling.q_block, keys
        return Part(*zip(starts, sizes, strict=True))

    def tile(self, q_block: Any, k_block: Any) -> tuple[BlockPair, Array, Array, Any]:
        """Returns a tile with its keys, values and bias."""
        tiling, start = self.tiling, k_block * self.tiling.k_block
        part = self.part(q_block, start, tiling.k_block)
        k, v = (
            lax.dynamic_slice_in_dim(x, start, tiling.k_block, axis=2) for x in (self.k, self.v)
        )
        bias = None if self.bias is None else self.bias.cut(part)
        return BlockPair(q_block, k_block, part, tiling, self.sides), k, v, bias


def _scaled(
    q: Float[Array, "batch heads q features"],
    k: Float[Array, "batch heads k features"],
    tiling: Tiling,
) -> Float[Array, "batch heads q k"]:
    """Returns a tile's scaled products, float32."""
    return product(q, k, 3, 3, tiling) * q.shape[-1] ** -0.5


def _logits(
    tile: BlockPair,
    logits: Float[Array, "batch heads q k"],
    bias: Float[Array, "#batch heads q k"] | None,
) -> Float[Array, "batch heads q k"]:
    """Returns a tile's logits with bias and mask."""
    if bias is not None:
        logits = logits + bias
    visible = tile.visible()
    return logits if visible is None else jnp.where(visible, logits, MASKED)


def _forward_rows(
    group: Group, q_block: Array, key_range: Int[Array, " two"]
) -> tuple[Array, Array]:
    """Returns `out` and `lse` for a query block.

    Args:
      key_range: the first key block to visit, and the block after the last.
    """
    q = queries_of(group.q, q_block, group.tiling)

    def add(k_block: Array, softmax: Online) -> Online:
        tile, k, v, bias = group.tile(q_block, k_block)

        def attend(exponentials: Array) -> Array:
            dropped = tile.dropout(exponentials)
            attended = product(dropped.astype(v.dtype), v, 3, 2, group.tiling)
            if bias is not None and bias.adds_values:
                attended = attended + tile.added_values(bias, dropped)
            return attended

        logits = capped(_scaled(q, k, group.tiling), group.tiling.logit_cap)
        return softmax.add(_logits(tile, logits, tile.bias_values(bias)), attend)

    start = Online.start(q.shape[:3], group.v.shape[-1], group.sink)
    return lax.fori_loop(key_range[0], key_range[1], add, start).result()


def _forward_saving(
    q: Any,
    k: Any,
    v: Any,
    bias: Leaves,
    sink: Any,
    sides: Sides,
    ranges: Any,
    tiling: Tiling,
    bias_tree: Any,
) -> tuple[Array, tuple[Any, ...]]:
    """Returns `out` and the arrays saved for the backward pass.

    The inputs say whether their gradients are wanted (`perturbed`).
    """
    # An array if the gradient of the bias is wanted, else None.
    learned = jnp.zeros((), jnp.float32) if any(x.perturbed for x in bias) else None
    q, k, v, bias, sink, sides, ranges = saved = jax.tree.map(
        lambda x: x.value, (q, k, v, bias, sink, sides, ranges)
    )
    # `out` is kept in float32 for delta: rounded to half precision, it would make the errors of dq
    # and dk up to 1.4 times as large.
    results = _forward(q, k, v, bias, sink, sides, ranges, tiling, bias_tree, jnp.float32)
    out, lse = checkpoint_name(results, ATTENDED)
    return out.astype(v.dtype), (*saved, out, lse, learned)


def _backward(tiling: Tiling, bias_tree: Any, saved: tuple[Any, ...], dout: Any) -> tuple[Any, ...]:
    q, k, v, leaves, sink, sides, ranges, out, lse, learned = saved
    bias = jax.tree.unflatten(bias_tree, leaves)
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    dbias = (
        None if learned is None else jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), bias)
    )

    def add_group(state: tuple[Any, ...], inputs: tuple[Array, ...]) -> tuple[tuple[Any, ...], Any]:
        dbias, dq, dk, dv = state
        index, lse, ranges = inputs
        group = Group.take(index, q, k, v, bias, sink, sides, tiling)
        group_dout, group_out = (
            take_group(x, tiling, index, group.q.shape[2]) for x in (dout, out)
        )
        delta = dot_rows(group_dout, group_out)[..., None]
        rows = functools.partial(_backward_rows, group, group_dout, delta, lse)
        transposed_zeros = (
            jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), jnp.float32)
            for x in (group.k, group.v)
        )
        start = (dbias, *transposed_zeros)
        (dbias, group_dk, group_dv), group_dq = lax.scan(
            rows, start, (jnp.arange(tiling.q_blocks), ranges)
        )
        scale, dsink = q.shape[-1] ** -0.5, None
        if group.sink is not None:
            dsink = -(jnp.exp(group.sink - lse) * delta).sum(axis=(0, 2, 3))
        return (
            dbias,
            put_group(dq, tiling, index, joined(group_dq) * scale),
            put_group(dk, tiling, index, group_dk.swapaxes(2, 3) * scale),
            put_group(dv, tiling, index, group_dv.swapaxes(2, 3)),
        ), dsink

    start: tuple[Any, ...] = (dbias, *(jnp.zeros(x.shape, x.dtype) for x in (q, k, v)))
    groups: tuple[Array, ...] = (jnp.arange(tiling.groups), lse, ranges)
    (dbias, dq, dk, dv), dsink = lax.scan(add_group, start, groups)
    if sink is not None:
        dsink = dsink.reshape(tiling.batch_groups, -1).sum(axis=0).astype(sink.dtype)
    if dbias is not None:
        dbias = tuple(
            x.astype(like.dtype) for x, like in zip(jax.tree.leaves(dbias), leaves, strict=True)
        )
    return dq, dk, dv, dbias, dsink, None, None


def _backward_rows(
    group: Group,
    dout: Float[Array, "batch heads q value_dim"],
    delta: Float[Array, "batch heads q 1"],
    lse: Float[Array, "batch heads q 1"],
    state: tuple[Any, Array, Array],
    block: tuple[Array, Array],
) -> tuple[tuple[Any, Array, Array], Float[Array, "batch heads block features"]]:
    """Returns dbias, dk and dv after a query block, and the block's dq.

    Args:
      dout, delta, lse: arrays for all queries in the group.
      state: dbias, dk and dv so far. dk and dv are transposed, `[batch, heads, features, k]`.
      block: the query block's index, and its range of key blocks.
    """
    q_block, key_range = block
    tiling = group.tiling
    rows = (group.q, dout, delta, lse)
    q, block_dout, delta, lse = (queries_of(x, q_block, tiling) for x in rows)
    # Products that contract queries take a third of the time on a CPU if the small operand comes
    # first and transposed.
    transposed_q, transposed_dout = transposed(q), transposed(block_dout)

    def add(
        k_block: Array, state: tuple[Array, Any, Array, Array]
    ) -> tuple[Array, Any, Array, Array]:
        dq, dbias, dk, dv = state
        tile, k, v, bias = group.tile(q_block, k_block)
        added, bias_vjp = jax.vjp(tile.bias_values, bias)
        cap = functools.partial(capped, most=tiling.logit_cap)
        logits, cap_vjp = jax.vjp(cap, _scaled(q, k, tiling))
        weights = jnp.exp(_logits(tile, logits, added) - lse)
        dropped, dweights = tile.dropout(weights), product(block_dout, v, 3, 3, tiling)
        if bias is not None and bias.adds_values:
            values, values_vjp = jax.vjp(tile.added_values, bias, dropped)
            dbias_of_values, more = values_vjp(block_dout.astype(values.dtype))
            dweights = dweights + more
            if dbias is not None:
                dbias = dbias.with_added(dbias_of_values, tile.part)
        dlogits = weights * (tile.dropout(dweights) - delta)
        if dbias is not None:
            # Hidden keys have zeros here, as in the weights.
            shared = (
                dlogits if added is not None and added.shape[0] > 1 else sum_first(dlogits)[None]
            )
            dbias = dbias.with_added(bias_vjp(shared)[0], tile.part)
        dlogits = cap_vjp(dlogits)[0].astype(q.dtype)
        dropped = dropped.astype(v.dtype)
        dq = dq + product(dlogits, k, 3, 2, tiling)
        dk = _added(dk, product(transposed_q, dlogits, 3, 2, tiling), tile.part.keys[0])
        dv = _added(dv, product(transposed_dout, dropped, 3, 2, tiling), tile.part.keys[0])
        return dq, dbias, dk, dv

    start = (jnp.zeros(q.shape, jnp.float32), *state)
    dq, *state = lax.fori_loop(key_range[0], key_range[1], add, start)
    return tuple(state), dq


_attention.defvjp(_forward_saving, _backward, symbolic_zeros=True)


def queries_of(
    x: Float[Array, "batch heads length features"], q_block: Any, tiling: Tiling
) -> Array:
    """Returns x's rows for a query block."""
    return lax.dynamic_slice_in_dim(x, q_block * tiling.q_block, tiling.q_block, axis=2)


def _added(x: Float[Array, "batch heads features k"], tile: Array, start: Array) -> Array:
    """Returns `x` with `tile` added to its columns from `start`."""
    old = lax.dynamic_slice_in_dim(x, start, tile.shape[-1], axis=3)
    return lax.dynamic_update_slice_in_dim(x, old + tile, start, axis=3)


def joined(
    blocks: Float[Array, "blocks batch heads block features"],
) -> Float[Array, "batch heads length features"]:
    return jnp.moveaxis(blocks, 0, 2).reshape(*blocks.shape[1:3], -1, blocks.shape[-1])


def product(
    a: Array, b: Array, axis_a: int, axis_b: int, tiling: Tiling
) -> Float[Array, "batch heads rows columns"]:
    contracted, batch = ((axis_a,), (axis_b,)), ((0, 1), (0, 1))
    return lax.dot_general(
        a, b, (contracted, batch), precision=tiling.precision, preferred_element_type=jnp.float32
    )
