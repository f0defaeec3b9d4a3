"""One query of each sequence, as in decoding: reads only the keys that ALiBi leaves within reach."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from alibi.attention.call import AttentionCall, dense, visible_keys
from alibi.attention.reference import MASKED
from alibi.attention.skipping import HIDDEN, LOGIT_ROUNDING, stop_below, weight_left
from alibi.positions import AlibiBias
from alibi.positions.base import rows_and_columns

BLOCK = 256  # keys that a head reads at one time

# Of an AttentionCall: what has a gradient, and what else is an array.
LEARNED = ("query", "key", "value")
ADDED = ("query_positions", "key_positions", "query_segments", "key_segments", "mask", "key_norm")


def decoding_attention(call: AttentionCall) -> Float[Array, "*batch one heads value_dim"]:
    """A call that `cannot_decode` has no objection to, by a loop over blocks of keys for each head.

    The loop goes from the last slot that is seen to the first, with an online softmax,
    and ends when all keys that are left can add nothing that counts: at most
    `skip_epsilon` of the weight gathered so far, see `alibi.attention.skipping.weight_left`.
    So a head reads about as many keys as its window has, however long the cache is; only
    the positions and the mask are read whole. Where `call.key_norm` is not given, one pass
    over all keys and values finds it. Its gradient is that of the dense formula.
    """
    assert isinstance(call.bias, AlibiBias)
    static = _Static(call.causal, call.window, call.bias.symmetric, call.precision, call.skip_epsilon)
    learned = {name: getattr(call, name) for name in LEARNED} | {"slopes": call.bias.slopes}
    return _attention(learned, {name: getattr(call, name) for name in ADDED}, static)


def cannot_decode(call: AttentionCall, platform: str) -> str:
    """Why `decoding_attention` can't do the call; empty if it can. The platform makes no difference."""
    del platform
    if call.query.shape[-3] != 1:
        return f"it is for one query of each sequence, and got {call.query.shape[-3]}"
    if not isinstance(call.bias, AlibiBias):
        return "its bias is not ALiBi's"
    return "it has no dropout" if call.drops else call.wants_weights


@dataclasses.dataclass(frozen=True)
class _Static:
    causal: bool
    window: int | None
    symmetric: bool
    precision: lax.PrecisionLike
    skip_epsilon: float | None

    def call(self, learned: dict[str, Any], added: dict[str, Any]) -> AttentionCall:
        arrays = {name: learned[name] for name in LEARNED} | added
        bias = AlibiBias(learned["slopes"], self.symmetric)
        return AttentionCall(
            bias=bias,
            causal=self.causal,
            window=self.window,
            precision=self.precision,
            skip_epsilon=self.skip_epsilon,
            **arrays,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attention(learned: dict[str, Any], added: dict[str, Any], static: _Static) -> Array:
    return attended_and_blocks(static.call(learned, added))[0]


def _forward_saving(learned: dict[str, Any], added: dict[str, Any], static: _Static) -> tuple[Array, tuple[Any, ...]]:
    return _attention(learned, added, static), (learned, added)


def _backward(static: _Static, saved: tuple[Any, ...], gradient: Array) -> tuple[Any, None]:
    # A loop that ends when it may has no gradient of its own. Few need one of decoding.
    learned, added = saved
    return jax.vjp(lambda learned: dense(static.call(learned, added).with_own_heads()), learned)[1](gradient)[0], None


_attention.defvjp(_forward_saving, _backward)


def attended_and_blocks(
    call: AttentionCall,
) -> tuple[Float[Array, "*batch one heads value_dim"], Int[Array, "batch heads"]]:
    """The attended values, and how many blocks of keys each head has read for them; without a gradient."""
    assert isinstance(call.bias, AlibiBias)
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value))
    (batch, _, heads, _), (_, k_length, kv_heads, _) = query.shape, key.shape
    slopes = call.bias.slopes.astype(jnp.float32)
    block = min(BLOCK, k_length)
    distance = _distances(call, batch, block)
    by_block = distance.reshape(*distance.shape[:2], -1, block)
    nearest, count = by_block.min(axis=-1), (by_block != HIDDEN).sum(axis=-1)
    left = weight_left(slopes, _logit_bound(call, query), nearest, count, call.skip_epsilon)
    last = jnp.broadcast_to(_last(count > 0), (batch, heads))
    cache = _Cache(key, value, distance, block, call.precision, call.skip_epsilon)
    b, h = (x.reshape(-1) for x in np.indices((batch, heads), np.int32))
    places = _Place(b, h // (heads // kv_heads), h % distance.shape[1])
    rows = query.reshape(b.size, -1).astype(jnp.float32), jnp.tile(slopes, batch), left.reshape(b.size, -1)
    attended, blocks = lax.map(lambda head: cache.attend(*head), (places, *rows, last.reshape(-1)))
    attended = attended.reshape(*call.query.shape[:-1], value.shape[-1])
    return attended.astype(value.dtype), blocks.reshape(batch, heads)


def _distances(call: AttentionCall, batch: int, block: int) -> Int[Array, "batch heads_or_1 whole_blocks"]:
    """Of each key from the query, as the bias counts it; HIDDEN where it is not seen."""
    rows, columns = rows_and_columns(jnp.asarray(call.query_positions), jnp.asarray(call.key_positions))
    distance = jnp.expand_dims(rows - columns, -3)
    distance = jnp.abs(distance) if isinstance(call.bias, AlibiBias) and call.bias.symmetric else distance
    visible = visible_keys(call)
    if visible is not None:
        rank = max(distance.ndim, visible.ndim)
        distance, visible = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (distance, visible))
        distance = jnp.where(visible, distance, HIDDEN)
    k_length, of_heads = call.key.shape[-3], distance.shape[-3]
    distance = distance.reshape((1,) * (len(call.query.shape) - distance.ndim) + distance.shape)
    distance = jnp.broadcast_to(distance, (*call.query.shape[:-3], of_heads, 1, k_length))
    padding = (0, -k_length % block)
    return jnp.pad(distance.reshape(batch, of_heads, k_length), ((0, 0), (0, 0), padding), constant_values=HIDDEN)


def _last(seen: Array) -> Int[Array, "batch heads_or_1"]:
    """The last block with a key that is seen; -1 if there is none."""
    return jnp.where(seen, jnp.arange(seen.shape[-1])[None, None, :], -1).max(axis=-1)


def _logit_bound(call: AttentionCall, query: Float[Array, "batch one heads head_dim"]) -> Float[Array, "batch heads"]:
    """No scaled logit is greater; NaN or infinite where an input is not finite."""
    batch, _, heads, head_dim = query.shape
    if call.skip_epsilon is None:
        return jnp.full((batch, heads), jnp.inf)
    of_keys = norm_of_all(call.key, call.value) if call.key_norm is None else call.key_norm
    of_keys = jnp.repeat(of_keys.reshape(batch, -1), heads // call.key.shape[-2], axis=-1)
    return (1.0 + LOGIT_ROUNDING) * head_dim**-0.5 * jnp.linalg.norm(query[:, 0].astype(jnp.float32), axis=-1) * of_keys


def norm_of_all(
    key: Float[Array, "*batch k heads head_dim"], value: Float[Array, "*batch k heads value_dim"]
) -> Float[Array, "*batch heads"]:
    """The largest norm of a key of each head; NaN where a key or value is not finite, which must not be skipped."""
    norm = jnp.linalg.norm(lax.stop_gradient(key).astype(jnp.float32), axis=-1)
    # Sums, since XLA's maximum may pass over NaN.
    sums = norm.sum(axis=-2) + lax.stop_gradient(value).astype(jnp.float32).sum(axis=(-3, -1))
    return norm.max(axis=-2) + 0.0 * sums


# The block to read next, the largest logit so far, and relative to it the sum of exponentials and of values.
State = tuple[Array, Array, Array, Array]


class _Place(NamedTuple):
    """Where a head of a sequence finds its keys, and what it sees of them."""

    batch: Int[Array | np.ndarray, "..."]
    kv_head: Int[Array | np.ndarray, "..."]
    mask_head: Int[Array | np.ndarray, "..."]


@dataclasses.dataclass(frozen=True)
class _Cache:
    """What the heads of all sequences read from, `block` keys at a time."""

    key: Float[Array, "batch k kv_heads head_dim"]
    value: Float[Array, "batch k kv_heads value_dim"]
    distance: Int[Array, "batch heads_or_1 whole_blocks"]
    block: int
    precision: lax.PrecisionLike
    skip_epsilon: float | None

    def attend(
        self, place: _Place, query: Array, slope: Array, left: Float[Array, " blocks"], last: Array
    ) -> tuple[Float[Array, " value_dim"], Int[Array, ""]]:
        """The attended values of one head, and the number of blocks from `last` downwards that were read."""

        def matters(state: State) -> Array:
            block, largest, total, _ = state
            gathered = largest if self.skip_epsilon == 0 else largest + jnp.log(total)
            # True too where either is not a number.
            return (block >= 0) & ~(left[block] - gathered < stop_below(self.skip_epsilon))

        def add(state: State) -> State:
            block, largest, total, attended = state
            logits, visible, values = self._read(place, query, slope, block)
            larger = jnp.maximum(largest, logits.max())
            exponentials = jnp.where(visible, jnp.exp(logits - larger), 0.0)
            rescale = jnp.exp(largest - larger)
            of_block = jnp.matmul(exponentials, values, precision=self.precision)
            return block - 1, larger, total * rescale + exponentials.sum(), attended * rescale + of_block

        start = (last, jnp.asarray(MASKED, jnp.float32), jnp.zeros(()), jnp.zeros(self.value.shape[-1]))
        block, _, total, attended = lax.while_loop(matters, add, start)
        return attended / jnp.where(total == 0.0, 1.0, total), last - block

    def _read(self, place: _Place, query: Array, slope: Array, block: Array) -> tuple[Array, Array, Array]:
        """Biased logits of a block of keys, which of them are seen, and their values, float32."""
        first = block * self.block
        # The last block may begin earlier, so as not to end after the last key.
        start = jnp.minimum(first, self.key.shape[1] - self.block)

        def rows(x: Array) -> Array:
            part = lax.dynamic_slice(x, (place.batch, start, place.kv_head, 0), (1, self.block, 1, x.shape[-1]))
            return part.reshape(self.block, -1).astype(jnp.float32)

        distance = lax.dynamic_slice(self.distance, (place.batch, place.mask_head, start), (1, 1, self.block))[0, 0]
        visible = (distance != HIDDEN) & (start + jnp.arange(self.block) >= first)
        logits = jnp.matmul(rows(self.key), query, precision=self.precision) * query.size**-0.5
        return jnp.where(visible, logits - slope * distance.astype(jnp.float32), MASKED), visible, rows(self.value)
