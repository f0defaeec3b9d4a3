"""Attention of one query for each sequence, as in decoding: it reads only the keys that the bias leaves in reach."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from alibi.attention.cache import norm_of_all
from alibi.attention.call import AttentionCall, AttentionOptions, dense, visible_keys
from alibi.attention.reference import MASKED
from alibi.attention.skipping import LOGIT_ROUNDING, stop_below, weight_left
from alibi.positions.bias import Bias, Blocks, Part

BLOCK = 256  # keys that a head reads at one time
HIDDEN = np.iinfo(np.int32).max  # the position of a key that a head doesn't see

# The fields of an AttentionCall that have gradients, and its other arrays.
LEARNED = ("query", "key", "value")
ADDED = ("query_positions", "key_positions", "query_segments", "key_segments", "mask", "key_norm")


def decoding_attention(call: AttentionCall) -> Float[Array, "*batch one heads value_dim"]:
    """The call by a loop over blocks of keys for each head; `cannot_decode` must have no reason against it.

    The loop goes from the last key that is seen to the first, with an online softmax. It ends
    when all keys that are left can add no more than `skip_epsilon` of the weight gathered so
    far, see `alibi.attention.skipping.weight_left`. So a head reads about as many keys as its
    bias leaves in reach, however long the cache is; only the positions and the mask are read
    whole. Where `call.key_norm` is not given, one pass over all keys and values finds it. The
    gradient is that of the dense formula.
    """
    # Flattened, since jax.custom_vjp passes objects that are no arrays, which a class that checks its fields refuses.
    bias, tree = jax.tree.flatten(call.bias)
    learned = tuple(getattr(call, name) for name in LEARNED), tuple(bias)
    added = tuple(getattr(call, name) for name in ADDED)
    return _attention(learned, added, _Static(call.causal, call.precision, call.options, tree))


def cannot_decode(call: AttentionCall) -> str:
    """Why `decoding_attention` can't do the call; empty if it can."""
    if call.query.shape[-3] != 1:
        return f"it is for one query of each sequence, and got {call.query.shape[-3]}"
    if call.bias is None or not call.bias.bounded:
        return "its bias has no upper bound"
    return "it has no dropout" if call.drops else call.wants_weights or call.adds_values


@dataclasses.dataclass(frozen=True)
class _Static:
    """The fields of a call that are no arrays."""

    causal: bool
    precision: lax.PrecisionLike
    options: AttentionOptions
    bias_tree: Any

    def call(self, learned: tuple[Any, Any], added: tuple[Any, ...]) -> AttentionCall:
        arrays = dict(zip((*LEARNED, *ADDED), (*learned[0], *added), strict=True))
        bias = jax.tree.unflatten(self.bias_tree, learned[1])
        return AttentionCall(bias=bias, causal=self.causal, precision=self.precision, options=self.options, **arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attention(learned: tuple[Any, Any], added: tuple[Any, ...], static: _Static) -> Array:
    return attended_and_blocks(static.call(learned, added))[0]


def _forward_saving(learned: Any, added: Any, static: _Static) -> tuple[Array, tuple[Any, ...]]:
    return _attention(learned, added, static), (learned, added)


def _backward(static: _Static, saved: tuple[Any, ...], gradient: Array) -> tuple[Any, None]:
    # JAX can't differentiate a loop whose length depends on data in reverse mode. Few need a gradient of decoding.
    learned, added = saved
    return jax.vjp(lambda learned: dense(static.call(learned, added).with_own_heads()), learned)[1](gradient)[0], None


_attention.defvjp(_forward_saving, _backward)


def attended_and_blocks(
    call: AttentionCall,
) -> tuple[Float[Array, "*batch one heads value_dim"], Int[Array, "batch heads"]]:
    """The result, without a gradient, and how many blocks of keys each head has read for it."""
    assert call.bias is not None
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value))
    (batch, _, heads, _), (_, k_length, kv_heads, _) = query.shape, key.shape
    block = min(call.options.block or BLOCK, k_length)
    blocks = -(-k_length // block)
    bias = call.bias.folded(call.query.ndim - 3)
    of_query, of_keys = _positions(call, batch)
    padding = blocks * block - k_length
    by_block = jnp.pad(of_keys, ((0, 0), (0, 0), (0, padding)), constant_values=HIDDEN)
    by_block = by_block.reshape(*of_keys.shape[:2], blocks, block)
    counts = (by_block != HIDDEN).sum(axis=-1)
    left = weight_left(
        bias.padded(0, padding),
        _logit_bound(call, query),
        _blocks(of_query, by_block, counts),
        call.options.skip_epsilon,
    )
    left = jnp.broadcast_to(left, (batch, heads, blocks))
    last = jnp.where(counts > 0, jnp.arange(blocks)[None, None, :], -1).max(axis=-1)
    last = jnp.broadcast_to(last, (batch, heads))
    cache = _Cache(key, value, bias, of_query, of_keys, block, call)
    b, h = (x.reshape(-1) for x in np.indices((batch, heads), np.int32))
    places = _Place(b, h, h // (heads // kv_heads), h % of_keys.shape[1])
    of_heads = query.reshape(b.size, -1).astype(jnp.float32), left.reshape(b.size, -1), last.reshape(-1)
    attended, read = lax.map(lambda head: cache.attend(*head), (places, *of_heads))
    attended = attended.reshape(*call.query.shape[:-1], value.shape[-1])
    return attended.astype(value.dtype), read.reshape(batch, heads)


def _positions(call: AttentionCall, batch: int) -> tuple[Int[Array, "batch one"], Int[Array, "batch heads_or_1 k"]]:
    """The position of each sequence's query, and those of its keys: `HIDDEN` where a head doesn't see one."""
    k_length, batch_dims = call.key.shape[-3], call.query.shape[:-3]
    # Signed, since differences of unsigned positions would wrap around.
    of_query, of_keys = (jnp.asarray(side, jnp.int32) for side in (call.query_positions, call.key_positions))
    of_keys = jnp.expand_dims(of_keys, (-3, -2))
    visible = visible_keys(call)
    if visible is not None:
        rank = max(of_keys.ndim, visible.ndim)
        of_keys, visible = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (of_keys, visible))
        of_keys = jnp.where(visible, of_keys, HIDDEN)
    of_keys = of_keys.reshape((1,) * (len(batch_dims) + 3 - of_keys.ndim) + of_keys.shape)
    of_keys = jnp.broadcast_to(of_keys, (*batch_dims, of_keys.shape[-3], 1, k_length))
    return jnp.broadcast_to(of_query, (*batch_dims, 1)).reshape(batch, 1), of_keys.reshape(batch, -1, k_length)


def _blocks(
    of_query: Int[Array, "batch one"],
    by_block: Int[Array, "batch heads_or_1 blocks block"],
    counts: Int[Array, "batch heads_or_1 blocks"],
) -> Blocks:
    """The query against each block of keys; only keys that some head sees count for the distances."""
    nearest = jnp.where(by_block == HIDDEN, -HIDDEN, by_block).max(axis=(1, 3))
    behind = jnp.where(nearest == -HIDDEN, HIDDEN, of_query - nearest)
    ahead = by_block.min(axis=(1, 3)) - of_query
    return Blocks(behind[:, None], ahead[:, None], 1, by_block.shape[2], counts[:, :, None])


def _logit_bound(call: AttentionCall, query: Float[Array, "batch one heads head_dim"]) -> Float[Array, "batch heads"]:
    """U, which no scaled logit exceeds before its bias; NaN or infinite where an input is not finite."""
    batch, _, heads, head_dim = query.shape
    if call.options.skip_epsilon is None:
        return jnp.full((batch, heads), jnp.inf)
    of_keys = norm_of_all(call.key, call.value) if call.key_norm is None else call.key_norm
    of_keys = jnp.repeat(of_keys.reshape(batch, -1), heads // call.key.shape[-2], axis=-1)
    return (1.0 + LOGIT_ROUNDING) * head_dim**-0.5 * jnp.linalg.norm(query[:, 0].astype(jnp.float32), axis=-1) * of_keys


# The block to read next, the largest logit so far, and, relative to it, the sum of the exponentials and that of the
# values weighted by them.
State = tuple[Array, Array, Array, Array]


class _Place(NamedTuple):
    """One head of one sequence: its indices in the batch, the heads, the key heads and the heads of the mask."""

    batch: Int[Array | np.ndarray, "..."]
    head: Int[Array | np.ndarray, "..."]
    kv_head: Int[Array | np.ndarray, "..."]
    mask_head: Int[Array | np.ndarray, "..."]


@dataclasses.dataclass(frozen=True)
class _Cache:
    """What all heads of all sequences read, `block` keys at a time."""

    key: Float[Array, "batch k kv_heads head_dim"]
    value: Float[Array, "batch k kv_heads value_dim"]
    bias: Bias
    of_query: Int[Array, "batch one"]
    of_keys: Int[Array, "batch heads_or_1 k"]
    block: int
    call: AttentionCall

    def attend(
        self, place: _Place, query: Array, left: Float[Array, " blocks"], last: Array
    ) -> tuple[Float[Array, " value_dim"], Int[Array, ""]]:
        """The result of one head, and how many blocks it has read, from `last` downwards.

        Args:
          left: what `weight_left` says of each block.
          last: the last block with a key that the head sees.
        """
        epsilon = self.call.options.skip_epsilon
        bias = self.bias.cut(Part((place.batch, 1), (place.head, 1), (0, 1)))

        def matters(state: State) -> Array:
            block, largest, total, _ = state
            gathered = largest if epsilon == 0 else largest + jnp.log(total)
            # Written so that it is true, and nothing is left out, where either is NaN.
            return (block >= 0) & ~(left[block] - gathered < stop_below(epsilon))

        def add(state: State) -> State:
            block, largest, total, attended = state
            logits, visible, values = self._read(bias, place, query, block)
            larger = jnp.maximum(largest, logits.max())
            exponentials = jnp.where(visible, jnp.exp(logits - larger), 0.0)
            rescale = jnp.exp(largest - larger)
            of_block = jnp.matmul(exponentials, values, precision=self.call.precision)
            return block - 1, larger, total * rescale + exponentials.sum(), attended * rescale + of_block

        start = (last, jnp.asarray(MASKED, jnp.float32), jnp.zeros(()), jnp.zeros(self.value.shape[-1]))
        block, _, total, attended = lax.while_loop(matters, add, start)
        return attended / jnp.where(total == 0.0, 1.0, total), last - block

    def _read(self, bias: Bias, place: _Place, query: Array, block: Array) -> tuple[Array, Array, Array]:
        """The biased logits of a block of keys, which of the keys are seen, and their values, float32."""
        first = block * self.block
        # The last block begins earlier where it would end after the last key; `visible` hides what was read before.
        start = jnp.minimum(first, self.key.shape[1] - self.block)

        def rows(x: Array) -> Array:
            part = lax.dynamic_slice(x, (place.batch, start, place.kv_head, 0), (1, self.block, 1, x.shape[-1]))
            return part.reshape(self.block, -1).astype(jnp.float32)

        of_keys = lax.dynamic_slice(self.of_keys, (place.batch, place.mask_head, start), (1, 1, self.block))[0, 0]
        visible = (of_keys != HIDDEN) & (start + jnp.arange(self.block) >= first)
        added = bias.cut(Part(keys=(start, self.block)))(self.of_query[place.batch], of_keys).reshape(self.block)
        logits = jnp.matmul(rows(self.key), query, precision=self.call.precision) * query.size**-0.5
        return jnp.where(visible, logits + added, MASKED), visible, rows(self.value)
