"""One layer of the decoder, on Flax's own attention layer, for any position method."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from alibi.attention import attention_fn
from alibi.attention.backends import wants_key_norm
from alibi.attention.decoding import norm_of_all
from alibi.batch_split import heads_sharding
from alibi.initialization import Initialization
from alibi.positions import AlibiBias, PositionMethod
from alibi.positions.base import KnownPositions
from alibi.products import by_rows, dot_general_for

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,  # Flax's default, by tanh
    "gelu_exact": functools.partial(nn.gelu, approximate=False),
    "silu": nn.silu,
}


class Block(nn.Module):
    """A pre-layer-norm decoder layer: attention, then feed-forward, each on a residual branch.

    Attributes: as in `alibi.model.DecoderLM`.
    """

    position: PositionMethod
    feed_forward: int
    activation: str
    dropout: float
    attention_dropout: float
    activation_dropout: float
    norm_epsilon: float
    initialization: Initialization
    dtype: Any
    window: int
    skip_epsilon: float
    attention: str
    activations: NamedSharding | None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length width"],
        position_params: Any,
        query_positions: KnownPositions | None,
        key_positions: KnownPositions | None,
        segment_ids: Int[Array, "batch length"] | None,
        deterministic: bool,
        decode: bool,
        last: int,
    ) -> Float[Array, "batch last width"]:
        """The layer's output for the last `last` positions, of the dtype of `x`; its keys and values are of all.

        Positions that are None are 0, 1, ...
        """
        if query_positions is None or key_positions is None:
            query_positions = key_positions = np.arange(x.shape[1])
        attention = self._attention(
            x.shape[-1],
            position_params,
            query_positions[..., -last:],
            key_positions,
            segment_ids if segment_ids is None or last == x.shape[1] else (segment_ids[..., -last:], segment_ids),
            decode,
        )
        # Layer norm runs in float32 whatever the compute dtype; the products cast its result.
        y = by_rows(nn.LayerNorm(self.norm_epsilon, name="attention_norm"), x)
        y = attention(y[:, -last:], y, deterministic=deterministic)
        x = x[:, -last:] + nn.Dropout(self.dropout)(y, deterministic)
        y = by_rows(nn.LayerNorm(self.norm_epsilon, name="feed_forward_norm"), x)
        y = self._dense(x.shape[-1], self.feed_forward, "up")(y)
        y = nn.Dropout(self.activation_dropout)(ACTIVATIONS[self.activation](y), deterministic)
        y = self._dense(self.feed_forward, x.shape[-1], "down")(y)
        return x + nn.Dropout(self.dropout)(y, deterministic)

    def _attention(
        self,
        width: int,
        position_params: Any,
        query_positions: KnownPositions,
        key_positions: KnownPositions,
        segment_ids: Int[Array, "batch length"] | tuple[Array, Array] | None,
        decode: bool,
    ) -> nn.MultiHeadDotProductAttention:
        """Flax's own layer, into which the position method is injected."""
        dot_general = dot_general_for(jax.default_backend())
        bias = self.position.bias(position_params)
        key_norm = KeyNormCache(name="key_norm") if decode and isinstance(bias, AlibiBias) else None

        def rotate(query: Array, key: Array, of_queries: Array, of_keys: Array) -> tuple[Array, Array]:
            return self.position.rotate(position_params, query, key, of_queries, of_keys)

        def largest_norm(key: Array, value: Array) -> Array | None:
            if key_norm is None or not wants_key_norm(key.shape[-3], self.attention):
                return None
            # Flax has counted the newest token when it calls this.
            written: Array = attention.get_variable("cache", "cache_index")
            return key_norm(key, value, written - 1)

        attention = nn.MultiHeadDotProductAttention(
            num_heads=self.position.num_heads,
            dtype=self.dtype,
            dropout_rate=self.attention_dropout,
            broadcast_dropout=False,
            decode=decode,
            attention_fn=attention_fn(
                bias,
                num_heads=self.position.num_heads,
                query_positions=query_positions,
                key_positions=key_positions,
                segment_ids=segment_ids,
                rotate=rotate,
                key_norm=largest_norm,
                window=self.window or None,
                skip_epsilon=self.skip_epsilon,
                sharding=heads_sharding(self.activations),
                backend=self.attention,
            ),
            qkv_dot_general=dot_general,
            out_dot_general=dot_general,
            kernel_init=self.initialization.attention_in,
            bias_init=self.initialization.bias(width),
            out_kernel_init=self.initialization.attention_out,
            out_bias_init=nn.initializers.zeros,
            name="attention",
        )
        return attention

    def _dense(self, inputs: int, features: int, name: str) -> nn.Dense:
        return nn.Dense(
            features,
            dtype=self.dtype,
            kernel_init=self.initialization.feed_forward,
            bias_init=self.initialization.bias(inputs),
            dot_general=dot_general_for(jax.default_backend()),
            name=name,
        )


class PositionCache(nn.Module):
    """Remembers the position of each slot of Flax's key-value cache."""

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "batch length"], positions: Int[Array, "*batch length"] | None
    ) -> tuple[Int[Array, "*batch length"], Int[Array, "batch slots"]]:
        """The positions of `tokens` and of every slot; those after the last token Flax masks."""
        started = self.has_variable("cache", "positions")
        slots = self.variable("cache", "positions", jnp.zeros, tokens.shape, jnp.int32)
        index = self.variable("cache", "index", jnp.zeros, (), jnp.int32)
        if not started:
            return jnp.arange(tokens.shape[-1]), slots.value
        positions = jnp.broadcast_to(index.value if positions is None else positions, tokens.shape)
        slots.value = jax.lax.dynamic_update_slice(slots.value, positions, (0, index.value))
        index.value = index.value + tokens.shape[-1]
        return positions, slots.value


class KeyNormCache(nn.Module):
    """Remembers the largest norm of each head's keys in Flax's cache, so that no step needs to read them all."""

    @nn.compact
    def __call__(
        self,
        key: Float[Array, "batch slots heads head_dim"],
        value: Float[Array, "batch slots heads head_dim"],
        newest: Int[Array, ""],
    ) -> Float[Array, "batch heads"] | None:
        """At least the norm of every key up to slot `newest`, NaN where a key or value is not finite.

        None where the cache is being made.
        """
        # Of a cache that was filled without this, nothing is known: infinity skips nothing.
        unknown = 0.0 if self.is_initializing() else jnp.inf
        largest = self.variable("cache", "largest", jnp.full, key.shape[::2], unknown, jnp.float32)
        if self.is_initializing():
            return None
        # A branch, always taken: else XLA would compute the written slots from the old cache again, and copy
        # that whole for it.
        norm = jax.lax.cond(
            newest >= 0,
            lambda *cache: norm_of_all(*(jax.lax.dynamic_slice_in_dim(x, newest, 1, axis=1) for x in cache)),
            lambda *cache: jnp.zeros(largest.value.shape),
            key,
            value,
        )
        # Not by maximum, which may pass over NaN.
        largest.value = jnp.where(largest.value >= norm, largest.value, norm + 0.0 * largest.value)
        return largest.value
