"""Attention for a bias that reads rows: tiles of queries against all keys, or against tiles of keys
from right to left if the bias carries what it needs.

No array `[q, k]` exists, but for the queries in a tile. The backward pass computes each tile again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from alibi.attention.blocked import Group, Leaves, in_tiles, joined, product, queries_of
from alibi.attention.call import AttentionCall
from alibi.attention.online import Online
from alibi.attention.reference import capped, reference_attention
from alibi.attention.tiles import (
    BlockPair,
    Sides,
    Tiling,
    put_group,
    take_group,
)
from alibi.positions.bias import MASKED, Bias, Part


def rows_attention(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """Computes attention in tiles of queries, with memory linear in the length.

    With a carry, tiles of keys that the causal mask or a window hides are not computed.
    """
    return _attention(*in_tiles(call)).reshape(*call.query.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _attention(
    q: Array,
    k: Array,
    v: Array,
    leaves: Leaves,
    sink: Array | None,
    sides: Sides,
    ranges: Array,
    tiling: Tiling,
    tree: Any,
) -> Float[Array, "batch q heads value_dim"]:
    bias = jax.tree.unflatten(tree, leaves)

    def add_group(out: Array, index: Array) -> tuple[Array, None]:
        group = Group.take(index, q, k, v, bias, sink, sides, tiling)

        def rows(q_block: Array) -> Array:
            compute, *inputs = _of_block(group, q_block, ranges)
            return compute(*inputs)

        attended = lax.map(rows, jnp.arange(tiling.q_blocks))
        return put_group(out, tiling, index, joined(attended)), None

    out = jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype)
    return lax.scan(add_group, out, jnp.arange(tiling.groups))[0]


def _forward(*arguments: Any) -> tuple[Array, tuple[Any, ...]]:
    return _attention(*arguments), arguments[:-2]


def _backward(tiling: Tiling, tree: Any, saved: tuple[Any, ...], dout: Array) -> tuple[Any, ...]:
    q, k, v, leaves, sink, sides, ranges = saved
    bias = jax.tree.unflatten(tree, leaves)

    def zeros(x: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), x)

    def add_group(state: tuple[Any, ...], index: Array) -> tuple[tuple[Any, ...], Any]:
        dbias, *gradients = state
        group = Group.take(index, q, k, v, bias, sink, sides, tiling)
        group_dout = take_group(dout, tiling, index, group.q.shape[2])

        def add(state: tuple[Any, ...], q_block: Array) -> tuple[tuple[Any, ...], Array]:
            dbias, *others = state
            _, vjp = jax.vjp(*_of_block(group, q_block, ranges))
            dq, dk, dv, of_bias, dsink = vjp(queries_of(group_dout, q_block, tiling))
            others = jax.tree.map(jnp.add, others, [dk, dv, dsink])
            part = group.part(q_block, 0, group.k.shape[2])
            return (dbias.with_added(of_bias, part), *others), dq

        start = (dbias, *map(zeros, (group.k, group.v, group.sink)))
        (dbias, dk, dv, dsink), dq = lax.scan(add, start, jnp.arange(tiling.q_blocks))
        added = zip(gradients, (joined(dq), dk, dv), strict=True)
        return (dbias, *(put_group(whole, tiling, index, x) for whole, x in added)), dsink

    start = (zeros(bias), *(jnp.zeros_like(x) for x in (q, k, v)))
    (dbias, *gradients), dsink = lax.scan(add_group, start, jnp.arange(tiling.groups))
    if sink is not None:
        dsink = dsink.reshape(tiling.batch_groups, -1).sum(axis=0).astype(sink.dtype)
    of_leaves = zip(jax.tree.leaves(dbias), leaves, strict=True)
    return *gradients, tuple(x.astype(leaf.dtype) for x, leaf in of_leaves), dsink, None, None


_attention.defvjp(_forward, _backward)


def _of_block(group: Group, q_block: Array, ranges: Array) -> tuple[Any, ...]:
    """Returns a function to attention for a query block, and its arguments: queries, keys, values, the
    bias cut to the queries, and the sink.
    """
    part = group.part(q_block, 0, group.k.shape[2])
    tile = BlockPair(q_block, 0, part, group.tiling, group.sides)
    compute = functools.partial(_whole_rows, tile)
    if group.bias.carried:
        compute = functools.partial(_from_the_right, tile, ranges[group.at, q_block])
    q = queries_of(group.q, q_block, group.tiling)
    return compute, q, group.k, group.v, group.bias.cut(part), group.sink


def _whole_rows(
    tile: BlockPair,
    q: Float[Array, "batch heads block features"],
    k: Float[Array, "batch heads k features"],
    v: Float[Array, "batch heads k value_dim"],
    bias: Bias,
    sink: Float[Array, "1 heads 1 1"] | None,
) -> Float[Array, "batch heads block value_dim"]:
    """Returns attention for a query block, from its logits for all keys."""
    tiling, shape = tile.tiling, (*q.shape[:3], k.shape[2])
    keep = None
    if tile.sides["dropout_rng"] is not None:
        keep = tile.dropout(jnp.ones(shape, jnp.float32))
    # the compiler sees that each transpose below is undone
    attended = reference_attention(
        *(x.swapaxes(1, 2) for x in (q, k, v)),
        bias=bias,
        visible=tile.visible(),
        query_positions=tile.side("query_positions"),
        key_positions=tile.side("key_positions"),
        keep=keep,
        weights_einsum=lambda *_: product(q, k, 3, 3, tiling),
        values_einsum=lambda _, weights, v: product(
            weights, v.swapaxes(1, 2), 3, 2, tiling
        ).swapaxes(1, 2),
        sink=None if sink is None else sink.reshape(-1),
        logit_cap=tiling.logit_cap,
    )
    return attended.swapaxes(1, 2)


def _from_the_right(
    tile: BlockPair,
    key_range: Int[Array, " two"],
    q: Float[Array, "batch heads block features"],
    k: Float[Array, "batch heads k features"],
    v: Float[Array, "batch heads k value_dim"],
    bias: Bias,
    sink: Float[Array, "1 heads 1 1"] | None,
) -> Float[Array, "batch heads block value_dim"]:
    """Returns attention for a query block, tile after tile from the last keys on."""
    tiling, rows, size = tile.tiling, q.shape[:3], tile.tiling.k_block

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(state: Any, block: tuple[Array, Array, Array]) -> tuple[Any, None]:
        k_block, k, v = block
        keys = (k_block * size, size)
        pair = tile._replace(k_block=k_block, part=tile.part._replace(keys=keys))

        def add(state: Any) -> Any:
            carry, softmax = state
            logits = capped(product(q, k, 3, 3, tiling) * q.shape[-1] ** -0.5, tiling.logit_cap)
            visible = pair.visible()
            seen = jnp.broadcast_to(True if visible is None else visible, logits.shape)
            sides = pair.side("query_positions"), pair.side("key_positions")
            made, carry = bias.cut(Part(keys=keys)).of_tile(
                jnp.where(seen, logits, MASKED), seen, *sides, carry
            )

            def attend(weights: Array) -> Array:
                return product(pair.dropout(weights).astype(v.dtype), v, 3, 2, tiling)

            if bias.gives_weights:
                return carry, softmax + attend(jnp.where(seen, made, 0.0))
            made = jnp.where(seen, made, MASKED)
            return carry, softmax.add(made, attend, differentiated=True)

        needed = (key_range[0] <= k_block) & (k_block < key_range[1]) & ~bias.finished(state[0])
        return lax.cond(needed, add, lambda same: same, state), None

    def blocks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, x.shape[-1]), 2, 0)

    start: Any = Online.start(rows, v.shape[-1], sink)
    if bias.gives_weights:
        start = start.attended
    start = jnp.zeros((*rows, bias.carried), jnp.float32), start
    tiles = jnp.arange(tiling.k_blocks), blocks(k), blocks(v)
    (_, softmax), _ = lax.scan(step, start, tiles, reverse=True)
    return (softmax if bias.gives_weights else softmax.result()[0]).astype(v.dtype)
