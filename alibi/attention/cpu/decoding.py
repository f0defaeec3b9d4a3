"""Attention of a single query for each sequence, as in decoding: it reads only keys in reach of the
bias.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from alibi.attention.cache import norm_of_all
from alibi.attention.call import AttentionCall, dense, visible_keys
from alibi.attention.reference import MASKED, capped
from alibi.attention.skipping import LOGIT_ROUNDING, UNDERFLOW, weight_left
from alibi.positions.bias import Bias, Blocks, Part

BLOCK = 256  # keys that a head reads at a time
HIDDEN = np.iinfo(np.int32).max  # the position of a key that a head doesn't see
SEGMENTS = ("query_segments", "key_segments")
ARRAYS = (
    "query",
    "key",
    "value",
    "query_positions",
    "key_positions",
    *SEGMENTS,
    "mask",
    "key_norm",
    "sink",
)


def cannot_decode(call: AttentionCall) -> str:
    """Returns why `decoding_attention` can't do the call; the empty string if it can."""
    if call.query.shape[-3] != 1:
        return f"it is for one query of each sequence, and got {call.query.shape[-3]}"
    return "" if call.bias is not None and call.bias.bounded else "its bias has no upper bound"


def decoding_attention(call: AttentionCall) -> Float[Array, "*batch one heads value_dim"]:
    """Computes attention by a loop over blocks of keys for each head.

    The loop goes from the last visible key to the first, with an online softmax. It ends
    when all keys left can add no more than `skip_epsilon` of the weight gathered so
    far, see `alibi.attention.skipping.weight_left`. So a head reads about as many keys as its
    bias leaves in reach, however long the cache is; only the positions and the mask are read
    whole. Without `call.key_norm`, a pass over all keys and values finds it. The
    gradient is the dense formula's.
    """
    # Flattened, since jax.custom_vjp passes objects that are no arrays, which a class that checks
    # its fields refuses.
    bias, tree = jax.tree.flatten(call.bias)
    arrays = {name: getattr(call, name) for name in ARRAYS} | {"bias": bias}

    def with_arrays(arrays: dict[str, Any]) -> AttentionCall:
        return dataclasses.replace(
            call, **arrays | {"bias": jax.tree.unflatten(tree, arrays["bias"])}
        )

    @jax.custom_vjp
    def attention(arrays: dict[str, Any]) -> Array:
        return attended_and_blocks(with_arrays(arrays))[0]

    def backward(arrays: dict[str, Any], gradient: Array) -> tuple[dict[str, Any]]:
        # JAX can't differentiate a loop whose length depends on data in reverse mode. Few need a
        # gradient of decoding.
        return jax.vjp(lambda arrays: dense(with_arrays(arrays).with_own_heads()), arrays)[1](
            gradient
        )

    attention.defvjp(lambda arrays: (attention(arrays), arrays), backward)
    return attention(arrays)


def attended_and_blocks(
    call: AttentionCall,
) -> tuple[Float[Array, "*batch one heads value_dim"], Int[Array, "batch heads"]]:
    """Returns the result, without a gradient, and the number of blocks of keys each head has read
    for it.
    """
    assert call.bias is not None
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value))
    (batch, _, heads, _), (_, k_length, kv_heads, _) = query.shape, key.shape
    block = min(call.options.block or BLOCK, k_length)
    blocks = -(-k_length // block)
    bias = call.bias.folded(call.query.ndim - 3)
    query_positions, key_positions = _positions(call, batch)
    padding = blocks * block - k_length
    by_block = jnp.pad(key_positions, ((0, 0), (0, 0), (0, padding)), constant_values=HIDDEN)
    by_block = by_block.reshape(*key_positions.shape[:2], blocks, block)
    counts = (by_block != HIDDEN).sum(axis=-1)
    # The query against each block of keys; only keys that some head sees count for the distances.
    nearest = jnp.where(by_block == HIDDEN, -HIDDEN, by_block).max(axis=(1, 3))
    behind = jnp.where(nearest == -HIDDEN, HIDDEN, query_positions - nearest)
    ahead = by_block.min(axis=(1, 3)) - query_positions
    distances = Blocks(
        behind[:, None], ahead[:, None], 1, blocks, counts[:, :, None], first_query=query_positions
    )
    left = weight_left(
        bias.padded(0, padding), _logit_bound(call, query), distances, call.options.skip_epsilon
    )
    left = jnp.broadcast_to(left, (batch, heads, blocks))
    last = jnp.where(counts > 0, jnp.arange(blocks)[None, None, :], -1).max(axis=-1)
    last = jnp.broadcast_to(last, (batch, heads))
    cache: tuple[Array, ...] = key, value
    if call.slots_last:
        cache = tuple(jnp.moveaxis(x, -3, -1) for x in cache)  # as it lies
    attend = functools.partial(
        _attend_head, call, cache, bias, query_positions, key_positions, block
    )
    b, h = (x.reshape(-1) for x in np.indices((batch, heads), np.int32))
    indices = b, h, h // (heads // kv_heads), h % key_positions.shape[1]
    by_head = (
        query.reshape(b.size, -1).astype(jnp.float32),
        left.reshape(b.size, -1),
        last.reshape(-1),
    )
    attended, read = lax.map(lambda head: attend(*head), (indices, *by_head))
    attended = attended.reshape(*call.query.shape[:-1], value.shape[-1])
    return attended.astype(value.dtype), read.reshape(batch, heads)


def _positions(
    call: AttentionCall, batch: int
) -> tuple[Int[Array, "batch one"], Int[Array, "batch heads_or_1 k"]]:
    """Returns the position of each sequence's query and of its keys; `HIDDEN` for a key hidden from
    a head.
    """
    k_length, batch_dims = call.key.shape[-3], call.query.shape[:-3]
    # Signed, since differences of unsigned positions would wrap around.
    of_query, of_keys = (
        jnp.asarray(side, jnp.int32) for side in (call.query_positions, call.key_positions)
    )
    of_keys = jnp.expand_dims(of_keys, (-3, -2))
    visible = visible_keys(call)
    if visible is not None:
        rank = max(of_keys.ndim, visible.ndim)
        of_keys, visible = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (of_keys, visible))
        of_keys = jnp.where(visible, of_keys, HIDDEN)
    of_keys = jnp.broadcast_to(of_keys, (*batch_dims, of_keys.shape[-3], 1, k_length))
    return jnp.broadcast_to(of_query, (*batch_dims, 1)).reshape(batch, 1), of_keys.reshape(
        batch, -1, k_length
    )


def _logit_bound(
    call: AttentionCall, query: Float[Array, "batch one heads head_dim"]
) -> Float[Array, "batch heads"]:
    """Returns U, an upper bound of the scaled logits before their bias, capped or not; NaN or
    infinite if an input is not finite.
    """
    batch, _, heads, head_dim = query.shape
    if call.options.skip_epsilon is None:
        return jnp.full((batch, heads), jnp.inf, jnp.float32)
    key_norms = norm_of_all(call.key, call.value) if call.key_norm is None else call.key_norm
    key_norms = jnp.repeat(key_norms.reshape(batch, -1), heads // call.key.shape[-2], axis=-1)
    query_norms = jnp.linalg.norm(query[:, 0].astype(jnp.float32), axis=-1)
    return (1.0 + LOGIT_ROUNDING) * head_dim**-0.5 * query_norms * key_norms


# The block to read next, the largest logit so far, and, relative to it, the sum of the exponentials
# and the sum of the values weighted by them.
State = tuple[Array, Array, Array, Array]


def _attend_head(
    call: AttentionCall,
    cache: tuple[Float[Array, "batch ..."], ...],
    bias: Bias,
    query_positions: Int[Array, "batch one"],
    key_positions: Int[Array, "batch heads_or_1 k"],
    block_size: int,
    index: tuple[Any, Any, Any, Any],
    query: Float[Array, " head_dim"],
    left: Float[Array, " blocks"],
    last: Int[Array, ""],
) -> tuple[Float[Array, " value_dim"], Int[Array, ""]]:
    """Returns the result of a head of a sequence, and the number of blocks of keys it has read,
    from `last` downwards.

    Args:
      cache: keys and values, read `block_size` at a time: `[batch, k, kv_heads, features]`, or
        `[batch, kv_heads, features, k]` by `call.slots_last`.
      index: of the sequence, of the head, of its key head, and of its heads in `key_positions`.
      left: `weight_left` of each block.
      last: the last block with a visible key.
    """
    epsilon = call.options.skip_epsilon
    batch, head, kv_head, mask_head = index
    bias = bias.cut(Part((batch, 1), (head, 1), (0, 1)))
    # The logarithm of the ratio, weight left to weight gathered, at which the head stops.
    stop = -math.inf if epsilon is None else -UNDERFLOW if epsilon == 0 else math.log(epsilon)

    def piece(x: Array, start: Array) -> Float[Array, "features block"]:
        if call.slots_last:
            sizes = 1, 1, x.shape[2], block_size
            return lax.dynamic_slice(x, (batch, kv_head, 0, start), sizes)[0, 0]
        sizes = 1, block_size, 1, x.shape[3]
        return lax.dynamic_slice(x, (batch, start, kv_head, 0), sizes)[0, :, 0].T

    def read(block: Array) -> tuple[Array, Array, Array]:
        """Returns the biased logits of a block of keys, True for each visible key, and the values,
        float32.
        """
        first = block * block_size
        # The last block begins earlier if it would end after the last key; `visible` hides the keys
        # read before.
        start = jnp.minimum(first, call.key.shape[-3] - block_size)
        keys, values = (piece(x, start).astype(jnp.float32) for x in cache)
        places = lax.dynamic_slice(key_positions, (batch, mask_head, start), (1, 1, block_size))[
            0, 0
        ]
        visible = (places != HIDDEN) & (start + jnp.arange(block_size) >= first)
        added = bias.cut(Part(keys=(start, block_size)))(query_positions[batch], places).reshape(
            block_size
        )
        logits = jnp.matmul(query, keys, precision=call.precision) * query.size**-0.5
        logits = capped(logits, call.options.logit_cap)
        return jnp.where(visible, logits + added, MASKED), visible, values

    def matters(state: State) -> Array:
        block, largest, total, _ = state
        gathered = largest if epsilon == 0 else largest + jnp.log(total)
        # Written so that it is true, and nothing is left out, if either is NaN.
        return (block >= 0) & ~(left[block] - gathered < stop)

    def add(state: State) -> State:
        block, largest, total, attended = state
        logits, visible, values = read(block)
        larger = jnp.maximum(largest, logits.max())
        exponentials = jnp.where(visible, jnp.exp(logits - larger), 0.0)
        rescale = jnp.exp(largest - larger)
        weighted = jnp.matmul(values, exponentials, precision=call.precision)
        return (
            block - 1,
            larger,
            total * rescale + exponentials.sum(),
            attended * rescale + weighted,
        )

    largest, total = jnp.asarray(MASKED, jnp.float32), jnp.zeros((), jnp.float32)
    if call.sink is not None:  # one more key, whose value is zero
        largest, total = call.sink[head].astype(jnp.float32), jnp.ones((), jnp.float32)
    start = (last, largest, total, jnp.zeros(call.value.shape[-1], jnp.float32))
    block, _, total, attended = lax.while_loop(matters, add, start)
    return attended / jnp.where(total == 0.0, 1.0, total), last - block
