"""`attention_fn` closures: how a position method, and a cache, enter an unchanged Flax attention layer."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from alibi.attention.attend import compute_call
from alibi.attention.cache import KeyValues, Reading
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.positions import AlibiBias
from alibi.positions.base import Params, PositionMethod
from alibi.positions.bias import KnownPositions
from alibi.slopes import alibi_slopes

AttentionFn = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class Cached:
    """The cache of one layer while new tokens go through it.

    Attributes:
      variable: the layer's Flax variable, which holds its `KeyValues`, or None while the cache is being made.
      reading: the new tokens, and the slots that all layers share.
    """

    variable: Any
    reading: Reading

    def before(self) -> Any:
        """What the position method kept of the token before the new ones; None while the cache is being made."""
        held = self.variable.value
        return None if held is None else jax.tree.map(self.reading.before.newest, held.kept)

    def append(self, key: Array, value: Array, kept: Any) -> KeyValues:
        """Stores the new tokens, and returns all that the cache then holds."""
        held = self.variable.value
        if held is None:
            held = self.variable.value = KeyValues.empty(self.reading.before.positions.shape[1], key, value, kept)
        else:
            held = self.variable.value = held.append(self.reading.before, key, value, kept)
        return held


def alibi_attention_fn(
    num_heads: int,
    *,
    causal: bool = True,
    convention: str | Sequence[float] = "paper",
    slopes: Float[Array, " heads"] | Sequence[float] | None = None,
    window: int | None = None,
    skip_epsilon: float | None = 0.0,
    sharding: NamedSharding | None = None,
    backend: str = "auto",
) -> AttentionFn:
    """ALiBi as the `attention_fn` of `flax.linen.MultiHeadDotProductAttention` or `flax.nnx.MultiHeadAttention`.

    The layer is used as it is, with or without batch dimensions, masks, attention dropout,
    mixed precision and `decode=True`. Where there are fewer queries than keys, the last query
    stands at the last key (bottom-right aligned). A single query with a mask, as Flax gives it
    in decoding, stands at the last key that it sees. It makes arrays, so on several hosts it is called after
    `jax.distributed.initialize`.

    Args:
      num_heads: heads of the layer.
      causal: hide later keys, and bias by -m (i - j); False: the symmetric -m |i - j|,
        for encoders.
      convention: that of the slopes, see `alibi.alibi_slopes`; "random" is the first draw.
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
    given = alibi_slopes(num_heads, convention) if slopes is None else jnp.asarray(slopes, jnp.float32)
    if given.shape != (num_heads,):
        raise ValueError(f"slopes have shape {given.shape}; {num_heads} heads need ({num_heads},)")
    bias = AlibiBias(given, symmetric=not causal)
    options = AttentionOptions(window, skip_epsilon, sharding, backend)

    def compute(query: Array, key: Array, value: Array, is_causal: bool, arguments: dict[str, Any]) -> Array:
        of_queries, of_keys = _positions(query, key, arguments["mask"])
        call = AttentionCall(
            query, key, value, bias, causal or is_causal, of_queries, of_keys, options=options, **arguments
        )
        return compute_call(call)

    return flax_attention_fn(num_heads, compute)


def method_attention_fn(
    position: PositionMethod,
    params: Params,
    x: Float[Array, "batch length width"],
    *,
    query_positions: KnownPositions,
    key_positions: KnownPositions,
    segment_ids: Int[Array, "batch length"] | tuple[Array, Array] | None = None,
    ascending: bool = False,
    scale: Callable[[Array, KnownPositions], Array] | None = None,
    max_position: int = 0,
    options: AttentionOptions,
    cache: Cached | None = None,
) -> AttentionFn:
    """Any position method as an `attention_fn`, for a layer whose input is `x`, with a cache or without one.

    Args:
      params: the parameters that the method shares between layers, and those of this layer.
      query_positions: of the queries, which belong to the last tokens of `x`.
      key_positions: of all tokens of `x`.
      segment_ids, options: see `alibi.attention.attend`.
      ascending: see `alibi.attention.call.AttentionCall`.
      scale: applied to the queries, with their positions, after the position method.
      max_position: positions known only at run time are below it, and few of them may be used; 0: unknown.
      cache: the keys and values of `x`, and what the method keeps of each token, are appended to it, and the queries
        attend to all that it holds.
    """

    def compute(query: Array, key: Array, value: Array, is_causal: bool, arguments: dict[str, Any]) -> Array:
        del is_causal
        before = None if cache is None else cache.before()
        kept = position.keep(params, x, key, None if cache is None else cache.reading.padding, before)
        of_queries = jax.tree.map(lambda of_tokens: of_tokens[:, -query.shape[1] :], kept)
        query = position.queries(params, query, query_positions)
        if scale is not None:
            query = scale(query, query_positions)
        key = position.keys(params, key, key_positions)
        of_keys, key_norm = key_positions, None
        if cache is not None:
            held = cache.append(key, value, kept)
            key, value, kept, key_norm = held.key, held.value, held.kept, held.key_norm
            of_keys = cache.reading.after.positions
        bias = position.content_bias(params, query, of_queries, kept)
        if bias is not None and 0 < max_position < query.shape[0] * query.shape[1] * key.shape[1]:
            bias = bias.up_to(max_position - 1)  # fewer distances than pairs
        own, others = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        call = AttentionCall(
            query,
            key,
            value,
            bias,
            position.causal,
            query_positions,
            of_keys,
            query_segments=own,
            key_segments=others,
            key_norm=key_norm,
            ascending=ascending,
            options=options,
            **arguments,
        )
        return compute_call(call)

    return flax_attention_fn(position.num_heads, compute)


def flax_attention_fn(num_heads: int, compute: Callable[..., Array]) -> AttentionFn:
    """Makes of `compute(query, key, value, is_causal, fields of an AttentionCall)` a function as Flax calls it."""

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
        force_fp32_for_softmax: bool = True,  # the softmax always is float32
        qk_attn_weights_einsum: Callable[..., Array] | None = None,
        attn_weights_value_einsum: Callable[..., Array] | None = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> Float[Array, "*batch q heads value_dim"]:
        del force_fp32_for_softmax
        if query.shape[-2] != num_heads:
            raise ValueError(f"attention_fn is for {num_heads} heads and the layer has {query.shape[-2]}")
        query, key, value = nn.dtypes.promote_dtype(query, key, value, dtype=dtype)
        arguments = {
            "mask": mask,
            "dropout_rate": dropout_rate,
            "dropout_rng": None if deterministic else dropout_rng,
            "broadcast_dropout": broadcast_dropout,
            "precision": precision,
            "weights_einsum": qk_attn_weights_einsum,
            "values_einsum": attn_weights_value_einsum,
            "sow": None if module is None else lambda weights: _sow(module, weights),
        }
        return compute(query, key, value, is_causal, arguments)

    return attention


def _positions(query: Array, key: Array, mask: Array | None) -> tuple[KnownPositions, KnownPositions]:
    """Positions of queries and keys where the layer gives none: the queries stand at the last keys."""
    q_length, key_positions = query.shape[-3], np.arange(key.shape[-3])
    if q_length == 1 and mask is not None:
        # In decoding Flax's cache index is out of sight, but the mask ends there. (Without a window any position
        # would be right for ALiBi, since softmax ignores a constant; this one also keeps the biases small.)
        seen = mask.any(axis=(-3, -2)) if mask.ndim >= 3 else mask.any(axis=-2)
        return jnp.where(seen, key_positions, -1).max(axis=-1, keepdims=True), key_positions
    return np.arange(q_length) + (key_positions.size - q_length), key_positions


def _sow(module: Any, weights: Array) -> None:
    """Stores the weights where Flax's own attention function does."""
    if isinstance(module, nn.Module):
        module.sow("intermediates", "attention_weights", weights)
    else:
        import flax.nnx as nnx  # takes as long as the rest of Flax, and is there already where a module of it calls

        module.sow(nnx.Intermediate, "attention_weights", weights)
