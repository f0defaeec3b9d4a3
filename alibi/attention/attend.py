"""The one entry to attention with a position bias, whatever computes it."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from alibi.attention.backends import choose, compute
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.devices import check_sharding, fitting_sharding, on_each_device
from alibi.positions import AlibiBias
from alibi.positions.bias import Bias, KnownPositions, Part
from alibi.positions.distance import check_integers


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
    """Attention with a position bias, in Flax's layout.

    It is differentiable in query, key, value and the arrays of the bias, once and in reverse
    mode; with backend="reference" any number of times and in forward mode too.

    Args:
      query, key, value: all of one dtype, which the result has too. Where there are fewer key
        than query heads, groups of query heads share a key head.
      slopes: ALiBi's m of each head; short for `bias=AlibiBias(slopes, symmetric=not causal)`.
      bias: what is added to the scaled logits, or None.
      causal: a query sees no key of a greater position.
      query_positions, key_positions: integers; by default keys are 0, 1, ... and the
        last query stands at the last key (bottom-right aligned).
      segment_ids: integers, of all positions or (of queries, of keys); a query sees only
        keys of its own segment.
      window: a query sees only keys whose positions are less than this from its own: under the
        causal mask, itself and the window - 1 before it. None: any. `blocked` then computes
        nothing of the tiles outside.
      mask: True where a query may see a key, besides `causal`, `segment_ids` and `window`.
      dropout_rate, dropout_rng, broadcast_dropout: of the weights, as in Flax; no key, no dropout.
      skip_epsilon: the share of a query's attention weights that may be lost where a `bounded`
        bias puts keys out of reach. With 0 only weights that float32 rounds to zero are left
        out, and the result is the same bit by bit; with None nothing is left out. It acts in
        `blocked` and `decoding`, see `alibi.attention.skipping`. Heads that are computed
        together, as on several devices without `sharding`, leave out what all of them can.
      key_norm: for each sequence and head a number that no norm of a key exceeds, not finite
        where a key or value is not. `decoding` uses it; without, it reads all keys to find it.
      sharding: how query, key and value `[batch, length, heads, head_dim]` lie on several
        devices, such as P("data", None, "tensor"): each device then computes its own
        sequences and heads by itself (`jax.shard_map`), as kernels need and skipping by heads
        does. It should name every axis of the mesh: over others, as over one that doesn't
        divide batch or heads, each device repeats the work. Without it, and for calls with
        dropout, a mask, an einsum or `sow`, the compiler splits what it can. Call it under
        `jax.jit`: outside, each call compiles.
      backend: a name from `alibi.attention.backends.BACKENDS`, or "auto" for the fastest that
        can do the call (`python -m alibi.attention` prints which that is).

    Raises:
      ValueError: shapes that don't fit, slopes or a bias of another number of heads, both slopes
        and bias, a backend that is unknown or can't do the call, a window below 1, a skip_epsilon
        out of range, a known negative slope with a skip_epsilon above 0 (with 0 its head skips
        nothing), a sharding of lengths or features, or of another kind.
    """
    options = AttentionOptions(window, skip_epsilon, sharding, backend)
    if slopes is not None:
        bias = _bias_of_slopes(slopes, bias, query.shape[-2], symmetric=not causal)
    of_queries, of_keys = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if key_positions is None:
        key_positions = np.arange(key.shape[-3])
    if query_positions is None:
        query_positions = np.arange(query.shape[-3]) + (key.shape[-3] - query.shape[-3])
    return compute_call(
        AttentionCall(
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
            key_norm=key_norm,
            options=options,
        )
    )


def compute_call(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """The call by the backend of its options, on as many devices as its sharding names; ValueError as in `attend`."""
    _check_call(call)
    query, key, value, options = call.query, call.key, call.value, call.options
    if 0 in (*query.shape, *key.shape, *value.shape):
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), value.dtype)
    if call.bias is not None and options.backend != "reference":
        call = dataclasses.replace(call, bias=call.bias.tabulated(call.query_positions, call.key_positions))

    def by_backend(own: AttentionCall) -> Array:
        # Chosen by the bias of the whole call: a device's own slopes are picked at run time, so never known.
        like = dataclasses.replace(own, bias=call.bias)
        return compute(own, choose(like) if options.backend == "auto" else options.backend)

    if options.sharding is None:
        return by_backend(call)
    check_sharding(options.sharding)
    if options.sharding.mesh.size == 1:
        return by_backend(dataclasses.replace(call, devices=1))
    fitting = fitting_sharding(call, options.sharding)
    return by_backend(call) if fitting is None else on_each_device(call, fitting, by_backend)


def _check_call(call: AttentionCall) -> None:
    query, key, value = call.query, call.key, call.value
    _check_shapes(query, key, value)
    if call.bias is not None:
        _check_heads(call.bias, query.shape[-2])
    _check_positions(query, key, call.query_positions, call.key_positions)
    _check_hiding(query, key, call.mask, call.query_segments, call.key_segments)
    key_norm, needed = call.key_norm, (*key.shape[:-3], key.shape[-2])
    if key_norm is not None and key_norm.shape != needed:
        raise ValueError(f"key_norm has shape {key_norm.shape}; it must be {needed}")


def _bias_of_slopes(slopes: Array, bias: Bias | None, num_heads: int, *, symmetric: bool) -> Bias:
    if bias is not None:
        raise ValueError("attend got both slopes and bias; give one of them")
    if jnp.shape(slopes) != (num_heads,):
        raise ValueError(f"slopes have shape {jnp.shape(slopes)}; the query's {num_heads} heads need ({num_heads},)")
    return AlibiBias(slopes, symmetric)


def _check_heads(bias: Bias, num_heads: int) -> None:
    # Without this check a tile that asks for a missing head would silently get the last one.
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    first = Part(queries=(0, 1), keys=(0, 1))
    heads = jax.eval_shape(lambda bias, *sides: bias.cut(first)(*sides), bias, one, one).shape[-3]
    if heads != num_heads:
        raise ValueError(f"the bias is of {heads} heads and the query has {num_heads}; they must be the same")


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


def _check_hiding(
    query: Array, key: Array, mask: Array | None, of_queries: Array | None, of_keys: Array | None
) -> None:
    weights = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    if mask is not None:
        sizes = zip(mask.shape[::-1], weights[::-1], strict=False)
        if mask.ndim > len(weights) or any(size not in (1, full) for size, full in sizes):
            raise ValueError(f"mask has shape {mask.shape}; it must broadcast to [*batch, heads, q, k] = {weights}")
    if (of_queries is None) != (of_keys is None):
        raise ValueError("segment_ids were given of one side alone; give (of queries, of keys), or one array for both")
    for name, x, segments in (("query", query, of_queries), ("key", key, of_keys)):
        if segments is not None and not _is_side(segments, x):
            needed = [*x.shape[:-3], x.shape[-3]]
            raise ValueError(f"segment_ids have shape {segments.shape}; {name} needs {needed}, or 1 for its batch")


def _check_positions(query: Array, key: Array, query_positions: KnownPositions, key_positions: KnownPositions) -> None:
    for name, x, positions in (("query", query, query_positions), ("key", key, key_positions)):
        if not _is_side(positions, x):
            needed = [*x.shape[:-3], x.shape[-3]]
            raise ValueError(f"{name}_positions have shape {positions.shape}; {name} needs {needed[-1:]} or {needed}")
        check_integers(name, positions)


def _is_side(side: KnownPositions, x: Array) -> bool:
    """Whether positions or segments are `[length]` of the queries or keys `x`, or broadcast to `[*batch, length]`."""
    batch = side.shape[:-1][::-1]
    fits = len(batch) <= x.ndim - 3 and all(
        size in (1, full) for size, full in zip(batch, x.shape[:-3][::-1], strict=False)
    )
    return side.ndim > 0 and side.shape[-1] == x.shape[-3] and fits
