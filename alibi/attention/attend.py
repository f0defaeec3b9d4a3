"""The one entry to attention with a position bias, whatever computes it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from alibi.attention.blocked import blocked_attention
from alibi.attention.call import AttentionCall, dense
from alibi.attention.rows import ROWS, attention_by_rows
from alibi.attention.saved import saved_attention
from alibi.attention.skipping import check_skipping
from alibi.positions import AlibiBias, Bias
from alibi.positions.base import KnownPositions

# Above so many weights (a quarter of a GiB in float32) dense attention takes queries in blocks.
DENSE_WEIGHTS = 2**26
# `saved_attention` keeps half as many exponentials for the backward pass.
SAVED_WEIGHTS = 2**27


def attend(
    query: Float[Array, "*batch q heads head_dim"],
    key: Float[Array, "*batch k kv_heads head_dim"],
    value: Float[Array, "*batch k kv_heads value_dim"],
    *,
    slopes: Float[Array, " heads"] | None = None,
    bias: Bias | None = None,
    causal: bool = True,
    query_positions: KnownPositions | None = None,
    key_positions: KnownPositions | None = None,
    segment_ids: Int[Array, "*batch length"] | tuple[Array, Array] | None = None,
    mask: Shaped[Array, "*#batch #heads #q k"] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: PRNGKeyArray | None = None,
    broadcast_dropout: bool = True,
    precision: jax.lax.PrecisionLike = None,
    weights_einsum: Callable[..., Array] | None = None,
    values_einsum: Callable[..., Array] | None = None,
    sow: Callable[[Array], None] | None = None,
    skip_epsilon: float | None = 0.0,
    backend: str = "auto",
) -> Float[Array, "*batch q heads value_dim"]:
    """Attention with a position bias, in Flax's layout; differentiable in all its arrays.

    Args:
      query, key, value: of one dtype, which the result has too; fewer key than query
        heads are shared by groups of query heads.
      slopes: ALiBi's m of each head; short for `bias=AlibiBias(slopes, symmetric=not causal)`.
      bias: what is added to the scaled logits, or None.
      causal: a query sees no key of a greater position.
      query_positions, key_positions: integers; by default keys are 0, 1, ... and the
        last query stands at the last key (bottom-right aligned).
      segment_ids: integers, of all positions or (of queries, of keys); a query sees only
        keys of its own segment.
      mask: True where a query may see a key, besides `causal` and `segment_ids`.
      dropout_rate, dropout_rng, broadcast_dropout: of the weights, as in Flax; no key, no dropout.
      skip_epsilon: share of a row's attention mass that may be lost where ALiBi's slopes put
        keys out of reach; 0: only what float32 rounds to zero, the same result bit by bit;
        None: nothing. Acts in backends that skip blocks, see `alibi.attention.skipping`.
      backend: a name from `BACKENDS`, or "auto" for the fastest one that can do the call.

    Raises:
      ValueError: shapes that don't fit, both slopes and bias, an unknown backend.
    """
    _check_shapes(query, key, value)
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; use auto, {', '.join(BACKENDS)}")
    if slopes is not None:
        bias = _bias_of_slopes(slopes, bias, query.shape[-2], symmetric=not causal)
    key, value = _share_heads(query, key), _share_heads(query, value)
    if key_positions is None:
        key_positions = np.arange(key.shape[-3])
    if query_positions is None:
        query_positions = np.arange(query.shape[-3]) + (key.shape[-3] - query.shape[-3])
    _check_positions(query, key, query_positions, key_positions)
    of_queries, of_keys = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    call = AttentionCall(
        query,
        key,
        value,
        bias=bias,
        causal=causal,
        query_positions=query_positions,
        key_positions=key_positions,
        query_segments=of_queries,
        key_segments=of_keys,
        mask=mask,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        weights_einsum=weights_einsum,
        values_einsum=values_einsum,
        sow=sow,
        skip_epsilon=skip_epsilon,
    )
    check_skipping(call)
    return BACKENDS[_choose(call) if backend == "auto" else backend](call)


def _by_saving(call: AttentionCall) -> Array:
    reason = _cannot_save(call)
    if reason:
        raise ValueError(f"attention backend 'saved' can't do this call: {reason}; use backend='auto'")
    bias = None
    if call.bias is not None:
        bias = call.bias(jnp.asarray(call.query_positions), jnp.asarray(call.key_positions))
    return saved_attention(call.query, call.key, call.value, bias, causal=call.causal)


# What computes a call, by the name that `backend` and `config.model.attention` take besides "auto".
BACKENDS: dict[str, Callable[[AttentionCall], Array]] = {
    "reference": dense,
    "rows": attention_by_rows,
    "blocked": blocked_attention,
    "saved": _by_saving,
}


def _choose(call: AttentionCall) -> str:
    """The fastest backend that can do the call on the default device in bounded memory."""
    plain = call.sow is None and call.weights_einsum is None and call.values_einsum is None
    if jax.default_backend() == "cpu" and not _cannot_save(call) and call.num_weights <= SAVED_WEIGHTS:
        return "saved"
    return "rows" if plain and call.num_weights > DENSE_WEIGHTS and call.query.shape[-3] > ROWS else "reference"


def _cannot_save(call: AttentionCall) -> str:
    """Why `saved_attention` can't do the call; empty if it can."""
    if call.query.ndim != 4:
        return "query is not [batch, length, heads, head_dim]"
    if call.drops or call.mask is not None or call.query_segments is not None:
        return "it has no dropout, masks or segments"
    if call.sow is not None or call.weights_einsum is not None or call.values_einsum is not None:
        return "it gives no weights and takes no einsum"
    queries, keys = call.query_positions, call.key_positions
    if not (isinstance(queries, np.ndarray) and isinstance(keys, np.ndarray) and queries.ndim == keys.ndim == 1):
        return "positions are not known when it is traced"
    aligned = np.array_equal(np.diff(keys), np.ones(keys.size - 1)) and np.array_equal(queries, keys[-queries.size :])
    return "" if aligned or not call.causal else "queries do not stand at the last of consecutive keys"


def _share_heads(query: Array, x: Array) -> Array:
    """Repeats key or value heads so that each query head has its own (grouped-query attention)."""
    return x if x.shape[-2] == query.shape[-2] else jnp.repeat(x, query.shape[-2] // x.shape[-2], axis=-2)


def _bias_of_slopes(slopes: Array, bias: Bias | None, num_heads: int, *, symmetric: bool) -> Bias:
    if bias is not None:
        raise ValueError("attend got both slopes and bias; give one of them")
    if jnp.shape(slopes) != (num_heads,):
        raise ValueError(f"slopes have shape {jnp.shape(slopes)}; the query's {num_heads} heads need ({num_heads},)")
    return AlibiBias(slopes, symmetric)


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    shapes = f"got query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"query, key and value must be [*batch, length, heads, head_dim], all of one rank; {shapes}")
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"batch dimensions of query, key and value, and lengths of key and value, must agree; {shapes}"
        )
    if query.shape[-1] != key.shape[-1] or query.shape[-2] % key.shape[-2]:
        raise ValueError(f"query and key need one head_dim, and key heads that divide the query heads; {shapes}")


def _check_positions(query: Array, key: Array, query_positions: KnownPositions, key_positions: KnownPositions) -> None:
    for name, x, positions in (("query", query, query_positions), ("key", key, key_positions)):
        if positions.ndim < 1 or positions.shape[-1] != x.shape[-3]:
            raise ValueError(f"{name}_positions have shape {positions.shape}; {name} has {x.shape[-3]} positions")
