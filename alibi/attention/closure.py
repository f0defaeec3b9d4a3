"""`attention_fn` closures: how ALiBi enters an unchanged Flax attention layer."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from alibi.attention.attend import attend
from alibi.positions import AlibiBias, Bias
from alibi.positions.base import KnownPositions
from alibi.slopes import alibi_slopes

AttentionFn = Callable[..., Array]


def alibi_attention_fn(
    num_heads: int,
    *,
    causal: bool = True,
    convention: str = "paper",
    slopes: Float[Array, " heads"] | None = None,
    window: int | None = None,
    skip_epsilon: float | None = 0.0,
    sharding: NamedSharding | None = None,
    backend: str = "auto",
) -> AttentionFn:
    """ALiBi as the `attention_fn` of `flax.linen.MultiHeadDotProductAttention` or `flax.nnx.MultiHeadAttention`.

    The layer is used as it is, with or without batch dimensions, masks, attention
    dropout, mixed precision and `decode=True`. Queries that are fewer than the keys
    stand at their end (bottom-right aligned); a single query with a mask, as in decoding,
    at the last key that it sees.

    Args:
      num_heads: heads of the layer.
      causal: hide later keys, and bias by -m (i - j); False: the symmetric -m |i - j|,
        for encoders.
      convention: of the slopes, see `alibi.alibi_slopes`; of random ones the first draw.
      slopes: `[num_heads]`, in place of the convention's (learned ones, for example).
      window, skip_epsilon, sharding, backend: see `alibi.attention.attend`. In decoding a window
        ends at the last key that the mask leaves, so a mask must not hide the newest.

    Returns:
      A function of (query, key, value) `[*batch, length, heads, head_dim]` and of every
      keyword that Flax passes.

    Raises:
      ValueError: from the closure, if the layer has another number of heads; see also
        `alibi.alibi_slopes`.
    """
    if slopes is None:
        slopes = alibi_slopes(num_heads, convention)
    return attention_fn(
        AlibiBias(slopes, symmetric=not causal),
        num_heads=num_heads,
        causal=causal,
        window=window,
        skip_epsilon=skip_epsilon,
        sharding=sharding,
        backend=backend,
    )


def attention_fn(
    bias: Bias | None,
    *,
    num_heads: int,
    causal: bool = True,
    query_positions: KnownPositions | None = None,
    key_positions: KnownPositions | None = None,
    segment_ids: Int[Array, "*batch length"] | tuple[Array, Array] | None = None,
    rotate: Callable[[Array, Array, Array, Array], tuple[Array, Array]] | None = None,
    key_norm: Callable[[Array, Array], Array | None] | None = None,
    window: int | None = None,
    skip_epsilon: float | None = 0.0,
    sharding: NamedSharding | None = None,
    backend: str = "auto",
) -> AttentionFn:
    """An `attention_fn` for Flax with any position method's bias and rotation; see `alibi_attention_fn`.

    Args:
      rotate: is given queries, keys and the positions of both, see `PositionMethod.rotate`.
      key_norm: is given keys and values, and gives what `alibi.attention.attend` calls so.
    """

    # Flax passes only the keywords that this signature names, so it names each of them:
    # **kwargs would silently lose dropout, dtype and precision.
    def attention(
        query: Float[Array, "*batch q heads head_dim"],
        key: Float[Array, "*batch k kv_heads head_dim"],
        value: Float[Array, "*batch k kv_heads value_dim"],
        *,
        mask: Shaped[Array, "*#batch #heads #q k"] | None = None,
        dropout_rng: PRNGKeyArray | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = False,
        dtype: Any = None,
        precision: jax.lax.PrecisionLike = None,
        force_fp32_for_softmax: bool = True,  # it always is
        qk_attn_weights_einsum: Callable[..., Array] | None = None,
        attn_weights_value_einsum: Callable[..., Array] | None = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> Float[Array, "*batch q heads value_dim"]:
        del force_fp32_for_softmax
        if query.shape[-2] != num_heads:
            raise ValueError(f"attention_fn is for {num_heads} heads and the layer has {query.shape[-2]}")
        query, key, value = nn.dtypes.promote_dtype(query, key, value, dtype=dtype)
        of_queries, of_keys = _positions(query, key, query_positions, key_positions, mask)
        if rotate is not None:
            query, key = rotate(query, key, jnp.asarray(of_queries), jnp.asarray(of_keys))
        return attend(
            query,
            key,
            value,
            bias=bias,
            causal=causal or is_causal,
            query_positions=of_queries,
            key_positions=of_keys,
            segment_ids=segment_ids,
            window=window,
            mask=mask,
            dropout_rate=dropout_rate,
            dropout_rng=None if deterministic else dropout_rng,
            broadcast_dropout=broadcast_dropout,
            precision=precision,
            weights_einsum=qk_attn_weights_einsum,
            values_einsum=attn_weights_value_einsum,
            sow=None if module is None else lambda weights: _sow(module, weights),
            skip_epsilon=skip_epsilon,
            key_norm=None if key_norm is None else key_norm(key, value),
            sharding=sharding,
            backend=backend,
        )

    return attention


def _positions(
    query: Array,
    key: Array,
    query_positions: KnownPositions | None,
    key_positions: KnownPositions | None,
    mask: Array | None,
) -> tuple[KnownPositions, KnownPositions]:
    q_length, k_length = query.shape[-3], key.shape[-3]
    if key_positions is None:
        key_positions = np.arange(k_length)
    if query_positions is not None:
        return query_positions, key_positions
    if q_length == 1 and mask is not None:
        # Decoding: Flax's cache index is out of sight, but the mask ends at it. Without a window
        # the row shift of softmax would make any position right; this one is also precise.
        seen = mask.any(axis=(-3, -2)) if mask.ndim >= 3 else mask.any(axis=-2)
        return jnp.where(seen, key_positions, -1).max(axis=-1, keepdims=True), key_positions
    return np.arange(q_length) + (k_length - q_length), key_positions


def _sow(module: Any, weights: Array) -> None:
    """Stores the weights where Flax's own attention function does."""
    if isinstance(module, nn.Module):
        module.sow("intermediates", "attention_weights", weights)
    else:
        import flax.nnx as nnx  # takes as long as the rest of Flax, and is there already where a module of it calls

        module.sow(nnx.Intermediate, "attention_weights", weights)
