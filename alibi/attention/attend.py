"""The one entry to attention with a position bias, for every backend."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from alibi.attention.backends import choose, compute
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.devices import fitting_sharding, on_each_device
from alibi.attention.validate import validate
from alibi.positions import AlibiBias
from alibi.positions.bias import Bias, KnownPositions


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
    window: int | None = None,
    mask: Shaped[Array, "*#batch #heads #q k"] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: PRNGKeyArray | None = None,
    broadcast_dropout: bool = True,
    precision: jax.lax.PrecisionLike = None,
    weights_einsum: Callable[..., Array] | None = None,
    values_einsum: Callable[..., Array] | None = None,
    sow: Callable[[Array], None] | None = None,
    skip_epsilon: float | None = 0.0,
    key_norm: Float[Array, "*batch kv_heads"] | None = None,
    sharding: NamedSharding | None = None,
    backend: str = "auto",
) -> Float[Array, "*batch q heads value_dim"]:
    """Returns softmax(query key^T / sqrt(head_dim) + bias) value, in Flax's layout.

    It is differentiable in query, key, value and the arrays of the bias, once and in reverse
    mode; with backend="reference" any number of times and in forward mode too.

    Args:
      query, key, value: arrays of one dtype, which the result has too. With fewer key heads than query heads,
        groups of query heads share a key head.
      slopes: ALiBi's slope m of each head; short for `bias=AlibiBias(slopes, symmetric=not causal)`.
      bias: the bias added to the scaled logits, or None.
      causal: a query sees no key of a greater position.
      query_positions, key_positions: integers; by default keys are 0, 1, ... and the
        last query stands at the last key (bottom-right aligned).
      segment_ids: integers, for all tokens or as (queries', keys'); a query sees only keys of its own segment.
      window: a query sees only keys at distances below it: under the causal mask, itself and the window - 1 keys
        before. None: no limit. `blocked` doesn't compute the tiles outside.
      mask: True if a query may see a key, besides `causal`, `segment_ids` and `window`.
      dropout_rate, dropout_rng, broadcast_dropout: dropout of the weights, as in Flax; without a key there is none.
      precision, weights_einsum, values_einsum, sow: see `alibi.attention.reference_attention`.
      skip_epsilon: the share of a query's attention weights that may be lost to keys out of reach of a `bounded`
        bias. With 0 only weights that float32 rounds to zero are left out, and the result is the same bit by bit;
        with None nothing is left out. `blocked` and `decoding` use it, see `alibi.attention.skipping`. Heads that are
        computed together, as on several devices without `sharding`, leave out the keys that all of them can.
      key_norm: for each sequence and head an upper bound of the norms of its keys, not finite if a key or value is
        not. `decoding` uses it; without it, `decoding` reads all keys to find it.
      sharding: how query, key and value `[batch, length, heads, head_dim]` lie on several devices, such as
        P("data", None, "tensor"): each device then computes its own sequences and heads by itself (`jax.shard_map`),
        as kernels and skipping by heads need. It should name every axis of the mesh: devices along other axes, or
        along an axis that doesn't divide batch or heads, repeat the work. Without it, and for calls with dropout, a
        mask, an einsum or `sow`, the compiler splits the work. Call it under `jax.jit`: outside, each call compiles.
      backend: a name from `alibi.attention.backends.BACKENDS`, or "auto" for the fastest backend
        (`python -m alibi.attention` prints the choice).

    Raises:
      ValueError: shapes that don't fit; slopes or a bias with another number of heads; both slopes and bias; an
        unknown backend or one that can't do the call; a window below 1; a skip_epsilon out of range; a known negative
        slope with a skip_epsilon above 0; a sharding that splits lengths or features, or of another kind.
    """
    heads, q_length, k_length = query.shape[-2], query.shape[-3], key.shape[-3]
    if slopes is not None and bias is not None:
        raise ValueError("attend got both slopes and bias; give one of them")
    if slopes is not None:
        if jnp.shape(slopes) != (heads,):
            raise ValueError(f"slopes have shape {jnp.shape(slopes)}; the query's {heads} heads need ({heads},)")
        bias = AlibiBias(slopes, symmetric=not causal)
    query_segments, key_segments = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    return compute_call(
        AttentionCall(
            query,
            key,
            value,
            bias=bias,
            causal=causal,
            query_positions=np.arange(q_length) + (k_length - q_length) if query_positions is None else query_positions,
            key_positions=np.arange(k_length) if key_positions is None else key_positions,
            query_segments=query_segments,
            key_segments=key_segments,
            mask=mask,
            dropout_rate=dropout_rate,
            dropout_rng=dropout_rng,
            broadcast_dropout=broadcast_dropout,
            precision=precision,
            weights_einsum=weights_einsum,
            values_einsum=values_einsum,
            sow=sow,
            key_norm=key_norm,
            options=AttentionOptions(window, skip_epsilon, sharding, backend),
        )
    )


def compute_call(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """Validates the call, chooses its backend and computes it, on each device of its sharding; raises as `attend`."""
    validate(call)
    value, options = call.value, call.options
    if 0 in (*call.query.shape, *call.key.shape, *value.shape):
        return jnp.zeros((*call.query.shape[:-1], value.shape[-1]), value.dtype)
    if call.bias is not None and options.backend != "reference":
        call = dataclasses.replace(call, bias=call.bias.tabulated(call.query_positions, call.key_positions))

    def by_backend(own: AttentionCall) -> Array:
        # The bias of the whole call decides: a device picks its own slopes at run time, so they are never known.
        like = dataclasses.replace(own, bias=call.bias)
        return compute(own, choose(like) if options.backend == "auto" else options.backend)

    if options.sharding is None:
        return by_backend(call)
    if options.sharding.mesh.size == 1:
        return by_backend(dataclasses.replace(call, devices=1))
    fitting = fitting_sharding(call, options.sharding)
    return by_backend(call) if fitting is None else on_each_device(call, fitting, by_backend)
