"""A position method, with or without a cache, as the `attention_fn` of a Flax layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from alibi.attention.cache import EMPTY, KeyValues, Reading
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.dispatch import compute_call
from alibi.attention.flax import AttentionFn, flax_attention_fn
from alibi.positions.base import Params, PositionMethod
from alibi.positions.bias import KnownPositions
from alibi.positions.scaled import ScaledBias
from alibi.positions.shapes import PerHead


class Cached(NamedTuple):
    """A layer's cache while new tokens go through it.

    Attributes:
      variable: the layer's Flax variable, which holds its `KeyValues`, or None while the cache is
        being made.
      reading: the new tokens, and the slots that all layers share.
    """

    variable: Any
    reading: Reading


def method_attention_fn(
    position: PositionMethod,
    params: Params,
    x: Float[Array, "batch length width"],
    *,
    query_positions: KnownPositions,
    key_positions: KnownPositions,
    segment_ids: Int[Array, "batch length"] | tuple[Array, Array] | None = None,
    causal: bool | None = None,
    reach: Int[Array, "batch q"] | None = None,
    ascending: bool = False,
    scale: Callable[[Array, KnownPositions], Array] | None = None,
    bias_scale: PerHead | None = None,
    max_position: int = 0,
    sink: Float[Array, " heads"] | None = None,
    options: AttentionOptions,
    cache: Cached | None = None,
) -> AttentionFn:
    """Returns a position method as the `attention_fn` of a layer with input `x`.

    Args:
      params: the method's parameters, both those that layers share and the layer's own.
      query_positions: for the queries, which are the last tokens in `x`.
      key_positions: for all tokens in `x`.
      segment_ids, sink, options: as in `alibi.attention.attend`.
      causal: hides later keys. Defaults to the method's.
      reach: the last position that each query sees under the causal mask. Defaults to its own.
      ascending: as in `alibi.attention.call.AttentionCall`.
      scale: a function for queries and their positions, applied after the position method.
      bias_scale: s for each head, if `scale` multiplies queries by s ln n (n visible keys) and the
        bias should be multiplied too. Defaults to adding the bias as it is.
      max_position: exclusive upper bound on traced positions, or 0 if unknown.
      cache: receives the keys and values of `x` and the method's data for each token. The queries
        attend to all cached tokens, or to `x` alone if the cache was empty.
    """
    query_segments, key_segments = (
        segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    )

    def compute(
        query: Array, key: Array, value: Array, _is_causal: bool, arguments: dict[str, Any]
    ) -> Array:
        held = before = padding = None
        cached = in_slots = cache is not None and not cache.reading.fresh
        if cache is not None:
            held, padding = cache.variable.value, cache.reading.padding
            before = None if held is None else jax.tree.map(cache.reading.before.newest, held.kept)
        kept = position.keep(params, x, key, padding, before, key_segments)
        kept_of_queries = jax.tree.map(lambda tokens: tokens[:, -query.shape[1] :], kept)
        query = position.queries(params, query, query_positions, kept_of_queries)
        scaled = query if scale is None else scale(query, query_positions)
        key, places = position.keys(params, key, key_positions, kept), key_positions
        if cache is not None:
            slots, newest = cache.reading.before, kept
            if not position.reads_kept_of_keys:
                newest = jax.tree.map(lambda tokens: tokens[:, -1:], kept)
            if held is None:
                held = KeyValues.empty(slots.positions.shape[1], key, value, newest)
            else:
                held = held.append(slots, key, value, newest)
            cache.variable.value = held
            if cached:
                key, value = (jnp.moveaxis(x, 3, 1) for x in (held.key, held.value))
                kept = held.kept
                places = cache.reading.after.positions
            elif padding is not None:
                places = jnp.where(padding, EMPTY, places)
        # A bias that is scaled itself gets the queries without their scale.
        of_bias = scaled if bias_scale is None else query
        bias = position.content_bias(params, of_bias, kept_of_queries, kept)
        ring = cached and cache is not None and cache.reading.after.ring
        if ring and bias is not None and bias.reads_rows:
            order = jnp.argsort(places, axis=1)  # a ring's slots in the order of their tokens

            def ordered(x: Any) -> Array:
                indices = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
                return jnp.take_along_axis(x, indices, axis=1)

            key, value, places = (ordered(x) for x in (key, value, places))
            kept = jax.tree.map(ordered, kept) if position.reads_kept_of_keys else kept
            bias, in_slots = position.content_bias(params, of_bias, kept_of_queries, kept), False
        if bias is not None and 0 < max_position < query.shape[0] * query.shape[1] * key.shape[1]:
            bias = bias.up_to(max_position - 1)  # fewer distances than pairs
        if bias is not None and bias_scale is not None and bias.reads_rows:
            raise ValueError(
                f"position method {type(position).__name__} reads whole rows of scaled logits, and model.logit_scale "
                "log_n or ssmax would scale its result again; use log_n_beyond, ssmax_queries or llama4"
            )
        if bias is not None and bias_scale is not None:
            bias = ScaledBias(bias, bias_scale)
        call = AttentionCall(
            scaled,
            key,
            value,
            bias,
            position.causal if causal is None else causal,
            query_positions,
            places,
            query_reach=None
            if reach is None
            else jnp.maximum(reach, jnp.broadcast_to(jnp.asarray(query_positions), reach.shape)),
            query_segments=query_segments,
            key_segments=key_segments,
            sink=sink,
            ascending=ascending,
            slots_last=in_slots,
            options=options,
            **arguments,
        )
        return compute_call(call)

    return flax_attention_fn(position.num_heads, compute)
