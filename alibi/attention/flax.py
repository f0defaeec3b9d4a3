"""ALiBi in an unchanged Flax attention layer: the closure given as its `attention_fn`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, Shaped

from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.dispatch import compute_call
from alibi.attention.visible import visible_by
from alibi.positions.alibi import bias_of_slopes
from alibi.positions.bias import KnownPositions
from alibi.slopes import alibi_slopes

AttentionFn = Callable[..., Array]


def alibi_attention_fn(
    num_heads: int,
    *,
    causal: bool = True,
    convention: str | Sequence[float] = "paper",
    slopes: Float[ArrayLike, "*#batch heads"] | Sequence[float] | None = None,
    query_offset: int | Int[Array, "*#batch"] | None = None,
    window: int | None = None,
    skip_epsilon: float | None = 0.0,
    sharding: NamedSharding | None = None,
    backend: str = "auto",
) -> AttentionFn:
    """Returns ALiBi as the `attention_fn` of `flax.linen.MultiHeadDotProductAttention` or
    `nnx.MultiHeadAttention`.

    The layer stays as it is, with or without batch dimensions, masks, attention dropout, mixed
    precision and `decode=True`. On several hosts, call it after `jax.distributed.initialize`, since
    it makes arrays.

    Keys stand at 0, 1, ... Without `query_offset` the last query stands at the last key
    (bottom-right aligned), and a single query with a mask, as Flax passes it in decoding, at its
    last visible key. Both are right for self-attention only. In cross-attention give
    `query_offset=0` in training, and the number already decoded in decoding.

    Args:
      num_heads: heads in the layer.
      causal: hides later keys and adds -m (i - j). False adds the symmetric -m |i - j|, for encoders.
      convention: as in `alibi.alibi_slopes`. "random" is the first draw.
      slopes: `[num_heads]`, or `[*batch, num_heads]` for each batch entry, for example learned
        slopes. Defaults to the convention.
      query_offset: the first query's position, for all batch entries or each. It may be traced.
      window, skip_epsilon, sharding, backend: as in `alibi.attention.attend`. In decoding a window
        ends at the last key that the mask shows, so a mask must not hide the newest key.

    Returns:
      A function of (query, key, value) `[*batch, length, heads, head_dim]` and Flax's keywords.

    Raises:
      ValueError: from `alibi.alibi_slopes`; from the function, a layer with another number of
        heads, and as `attend`.

    Example:
      >>> import flax.linen as nn, jax
      >>> attention_fn = alibi_attention_fn(num_heads=8)
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn)
      >>> x = jax.random.normal(jax.random.key(0), (2, 16, 64))  # batch, length, width
      >>> layer.init_with_output(jax.random.key(1), x)[0].shape
      (2, 16, 64)
    """
    slopes = alibi_slopes(num_heads, convention) if slopes is None else slopes
    per_head = jnp.asarray(slopes, jnp.float32)
    options = AttentionOptions(window, skip_epsilon, sharding, backend)

    def compute(
        query: Array, key: Array, value: Array, is_causal: bool, arguments: dict[str, Any]
    ) -> Array:
        bias = bias_of_slopes(per_head, query.shape, symmetric=not causal)
        positions = layer_positions(query, key, arguments["mask"], query_offset)
        call = AttentionCall(
            query, key, value, bias, causal or is_causal, *positions, options=options, **arguments
        )
        return compute_call(call)

    return flax_attention_fn(num_heads, compute)


def flax_attention_fn(num_heads: int, compute: Callable[..., Array]) -> AttentionFn:
    """Returns `compute(query, key, value, is_causal, arguments)` as an `attention_fn`. `arguments` are
    fields of an `AttentionCall`.
    """

    # Flax passes only the keywords that this signature names, so it names each of them:
    # **kwargs would silently lose dropout, dtype and precision.
    def attention(
        query: Float[Array, "*batch q heads head_dim"],
        key: Float[Array, "*batch k kv_heads head_dim"],
        value: Float[Array, "*batch k kv_heads value_dim"],
        *,
        mask: Shaped[Array, "*#batch #heads #q #k"] | None = None,
        dropout_rng: PRNGKeyArray | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = False,
        dtype: Any = None,
        precision: jax.lax.PrecisionLike = None,
        force_fp32_for_softmax: bool = True,  # the softmax always is float32
        qk_attn_weights_einsum: Callable[..., Array] | None = None,
        attn_weights_value_einsum: Callable[..., Array] | None = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> Float[Array, "*batch q heads value_dim"]:
        if query.shape[-2] != num_heads:
            raise ValueError(
                f"attention_fn is for {num_heads} heads and the layer has {query.shape[-2]}"
            )
        query, key, value = nn.dtypes.promote_dtype(query, key, value, dtype=dtype)
        arguments = {
            "mask": None if mask is None else visible_by(mask),
            "dropout_rate": dropout_rate,
            "dropout_rng": None if deterministic else dropout_rng,
            "broadcast_dropout": broadcast_dropout,
            "precision": precision,
            "weights_einsum": qk_attn_weights_einsum,
            "values_einsum": attn_weights_value_einsum,
            # where Flax's own attention function stores them, in Linen and in NNX
            "sow": None
            if module is None
            else functools.partial(module.sow, "intermediates", "attention_weights"),
        }
        return compute(query, key, value, is_causal, arguments)

    return attention


def with_flax_signature(attention: AttentionFn) -> AttentionFn:
    """Returns a function of (query, key, value, **keywords) with the signature from which Flax takes
    the keywords to pass.
    """
    return functools.wraps(flax_attention_fn(0, attention))(attention)


def layer_positions(
    query: Array,
    key: Array,
    mask: Bool[Array, "*shape"] | None,
    query_offset: int | Int[Array, "*#batch"] | None,
) -> tuple[KnownPositions, KnownPositions]:
    """Returns positions for the queries and keys in a layer that has none: keys stand at 0, 1, ...,
    and the first query at `query_offset`, which defaults to the last query at the last key.
    """
    q_length, key_positions = query.shape[-3], np.arange(key.shape[-3])
    if query_offset is not None:
        # NumPy's stay known when the call is traced
        numpy = jnp if isinstance(query_offset, jax.Array) else np
        steps = np.arange(q_length).reshape((1,) * np.ndim(query_offset) + (q_length,))
        return numpy.expand_dims(query_offset, -1) + steps, key_positions
    if q_length == 1 and mask is not None:
        # In decoding Flax hides its cache index, but the mask ends there. (Without a window any
        # position would be right for ALiBi, since softmax ignores a constant; this position also
        # keeps the biases small.)
        seen = mask.any(axis=(-3, -2)) if mask.ndim >= 3 else mask.any(axis=-2)
        return jnp.where(seen, key_positions, -1).max(axis=-1, keepdims=True), key_positions
    return np.arange(q_length) + (key_positions.size - q_length), key_positions
