"""`attend`, the entry to attention with a position bias, on one or more devices."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.attention.backends import choose, compute
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.checks import check_ranks, validate
from alibi.attention.visible import visible_by
from alibi.positions.alibi import bias_of_slopes
from alibi.positions.bias import Bias
from alibi.positions.distance import as_array
from alibi.positions.shapes import (
    Keys,
    KnownPositions,
    Mask,
    PerHead,
    Queries,
    Segments,
    Slopes,
    Values,
)

_WATCH: contextvars.ContextVar[Callable[[AttentionCall], object] | None] = contextvars.ContextVar(
    "watch", default=None
)


@contextlib.contextmanager
def watched(watch: Callable[[AttentionCall], object]) -> Iterator[None]:
    """Calls `watch` with each attention call that is made, or traced, in this context.

    A compiled program makes no calls again: trace it inside.

    Example:
      >>> import jax
      >>> from alibi import attend
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16, 8, 32))
      >>> calls = []
      >>> with watched(calls.append):
      ...     result = attend(query, key, value)
      >>> [call.query.shape for call in calls]
      [(1, 16, 8, 32)]
    """
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


# As texts, types have their short names in `help(attend)`.
def attend(
    query: "Queries",
    key: "Keys",
    value: "Values",
    *,
    slopes: "Slopes | None" = None,
    bias: "Bias | None" = None,
    causal: bool = True,
    query_positions: "KnownPositions | None" = None,
    key_positions: "KnownPositions | None" = None,
    segment_ids: "Segments | None" = None,
    window: int | None = None,
    mask: "Mask | None" = None,
    dropout_rate: float = 0.0,
    dropout_rng: "PRNGKeyArray | None" = None,
    broadcast_dropout: bool = True,
    precision: "jax.lax.PrecisionLike" = None,
    weights_einsum: "Callable[..., Array] | None" = None,
    values_einsum: "Callable[..., Array] | None" = None,
    sow: "Callable[[Array], None] | None" = None,
    skip_epsilon: float | None = 0.0,
    sink: "PerHead | None" = None,
    logit_cap: float | None = None,
    sharding: "NamedSharding | None" = None,
    backend: str = "auto",
) -> "Float[Array, '*batch q heads value_dim']":
    """Returns softmax(query key^T / sqrt(head_dim) + bias) value, in Flax's layout.

    It is differentiable in query, key, value, sink and the bias's arrays, once and in reverse
    mode, and with backend="reference" any number of times and in forward mode too.

    Args:
      query, key, value: `[*batch, length, heads, head_dim]`, in one dtype, which the result has too.
        Lists are float32. Logits and sums are float32, for float64 too. With fewer key heads than
        query heads, several query heads share a key head.
      slopes: ALiBi's slope m for each head, or `[*batch, heads]` for each batch entry, which skips no
        keys. It is short for `bias=AlibiBias(slopes, symmetric=not causal)`.
      bias: added to the scaled logits. Defaults to no bias.
      causal: hides keys at greater positions than the query's.
      query_positions, key_positions: integers. Keys default to 0, 1, ... and queries to the
        positions of the last keys (bottom-right aligned).
      segment_ids: integers, for all tokens or as (queries', keys'). A query sees only keys in its
        own segment.
      window: hides keys at this distance or farther: under the causal mask a query sees itself and
        the window - 1 keys before. `blocked` and `fused` don't compute the tiles outside. Defaults
        to no limit.
      mask: `[*batch, heads, q, k]`, True where a query may see a key, besides `causal`,
        `segment_ids` and `window`. Zeros and ones are taken too, and an additive mask: zeros show a
        key and values below zero (at most -1000) hide it. Floats that are all zero show all keys,
        integers none. Under `jax.vmap` each entry's mask is read alone, so give booleans there.
      dropout_rate, dropout_rng, broadcast_dropout: dropout for the weights, as in Flax. There is none
        without a key.
      precision, weights_einsum, values_einsum, sow: as in `alibi.attention.reference_attention`.
      skip_epsilon: the largest share of a query's attention weights that may be lost to keys beyond
        the reach of a `bounded` bias. With 0 only weights that float32 rounds to zero are left out, and
        the result is the same in every bit. With None nothing is left out. `blocked` and `fused` use
        it (`alibi.attention.skipping`). Heads computed together, as on several devices without
        `sharding`, leave out only keys that are too far for all.
      sink: b for each head. exp(b) is added to the softmax's denominator, as a key with value
        zero would, so that a query may attend to nothing. Zeros are softmax1 (Miller 2023), gpt-oss
        learns them (arXiv 2508.10925).
      logit_cap: c. A scaled logit z becomes c tanh(z / c) before the bias is added (Gemma 2, arXiv
        2408.00118). So the bias can still hide far keys. FlashAttention adds ALiBi after its cap
        too.
      sharding: how query, key and value `[batch, length, heads, head_dim]` lie on several devices,
        such as P("data", None, "tensor"). Each device then computes its own sequences and heads
        (`jax.shard_map`), as kernels and skipping need. It should name every axis in the mesh:
        devices along other axes, or along an axis that doesn't divide batch or heads, repeat the
        work. Without it, and for calls with dropout, a mask of pairs, an einsum or `sow`, the compiler
        splits the work. Call it under `jax.jit`: outside, each call compiles.
      backend: a name from `alibi.attention.backends.BACKENDS`, or "auto" for the fastest backend
        (`python -m alibi.attention` prints the choice).

    Raises:
      ValueError: shapes that don't fit; dtypes that are no floats; a known mask with other values;
        slopes or a bias for another number of heads; both slopes and bias; an unknown or unable
        backend; key_positions alone for more queries than keys; a window below 1; a skip_epsilon or
        logit_cap outside its range; a known negative slope with a skip_epsilon above 0; a sharding
        that splits lengths or features.

    Example:
      >>> import jax
      >>> from alibi import alibi_slopes
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 16, 8, 32))
      >>> attend(query, key, value, slopes=alibi_slopes(8)).shape  # batch, length, heads, size
      (2, 16, 8, 32)
    """
    if slopes is not None and bias is not None:
        raise ValueError("attend got both slopes and bias; give one of them")
    query, key, value = (
        x if isinstance(x, jax.Array) else jnp.asarray(as_array(x)) for x in (query, key, value)
    )
    check_ranks(query, key, value)
    if slopes is not None:
        bias = bias_of_slopes(jnp.asarray(as_array(slopes)), query.shape, symmetric=not causal)
    q_length, k_length = query.shape[-3], key.shape[-3]
    places = np.arange(k_length) if key_positions is None else as_array(key_positions)
    if query_positions is None and key_positions is None:
        query_positions = np.arange(q_length) + (k_length - q_length)
    elif query_positions is None:
        if q_length > k_length:
            raise ValueError(
                f"key_positions alone don't say where {q_length} queries stand beside {k_length} keys; give "
                "query_positions too"
            )
        # keys that stand at no array are refused below
        query_positions = places[..., k_length - q_length :] if places.ndim else places
    query_segments, key_segments = (
        segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    )
    return compute_call(
        AttentionCall(
            query,
            key,
            value,
            bias=bias,
            causal=causal,
            query_positions=as_array(query_positions),
            key_positions=places,
            query_segments=as_array(query_segments),
            key_segments=as_array(key_segments),
            mask=None if mask is None else visible_by(mask),
            dropout_rate=dropout_rate,
            dropout_rng=dropout_rng,
            broadcast_dropout=broadcast_dropout,
            precision=precision,
            weights_einsum=weights_einsum,
            values_einsum=values_einsum,
            sow=sow,
            sink=as_array(sink),
            options=AttentionOptions(window, skip_epsilon, sharding, backend, logit_cap=logit_cap),
        )
    )


def compute_call(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """Validates the call, chooses its backend and computes it. Raises as `attend`."""
    validate(call)
    if (watch := _WATCH.get()) is not None:
        watch(call)
    value, options = call.value, call.options
    if 0 in (*call.query.shape, *call.key.shape, *value.shape):
        return jnp.zeros((*call.query.shape[:-1], value.shape[-1]), value.dtype)
    # A bias with a carry is cut twice, which a table of distances does not allow.
    if call.bias is not None and options.backend != "reference" and not call.bias.carried:
        call = dataclasses.replace(
            call, bias=call.bias.tabulated(call.query_positions, call.key_positions)
        )

    def by_backend(share: AttentionCall) -> Array:
        # The whole call's bias decides, since a device picks its slopes at run time and so never
        # knows them.
        like = dataclasses.replace(share, bias=call.bias)
        backend = choose(like) if options.backend == "auto" else options.backend
        leaves = jax.tree.leaves((share.query, share.key, share.value, share.bias))
        if backend != "reference" and any(jax.typeof(x).manual_axis_type.varying for x in leaves):
            raise ValueError(
                f"attention backend {backend!r} can't run where jax.shard_map checks which values vary; give "
                "jax.shard_map check_vma=False, or attention backend='reference'"
            )
        return compute(share, backend)

    def placed(call: AttentionCall) -> Array:
        sharding = call.options.sharding
        if sharding is None:
            return by_backend(call)
        if sharding.mesh.size == 1:
            return by_backend(dataclasses.replace(call, devices=1))
        call = call.with_mask_in_segments()
        fitting = fitting_sharding(call, sharding)
        return by_backend(call) if fitting is None else on_each_device(call, fitting, by_backend)

    explicit = jax.typeof(call.query).sharding.mesh.explicit_axes
    return on_explicit_mesh(call, placed) if explicit else placed(call)


def on_explicit_mesh(
    call: AttentionCall, compute: Callable[[AttentionCall], Array]
) -> Float[Array, "*batch q heads value_dim"]:
    """Computes a call of arrays on a mesh with explicit axes (`jax.set_mesh`), where types have shardings.

    Inside, the axes are automatic. The type of the queries says how sequences and heads lie on the devices,
    as `sharding` in `attend` does elsewhere, and the result lies as the queries, as do weights for `call.sow`.
    """
    spec = (*jax.typeof(call.query).sharding.spec, *(None,) * call.query.ndim)[: call.query.ndim]
    named = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    del named["key_segments"]
    if call.known_slopes is not None:  # as an argument they would be unknown to the kernels
        del named["bias"]
    leaves, tree = jax.tree.flatten(
        {name: x for name, x in named.items() if isinstance(x, jax.Array | Bias)}
    )

    *of_batch, of_queries, of_heads, _ = spec
    of_weights = P(*of_batch, of_heads, of_queries, None)

    @functools.partial(jax.sharding.auto_axes, out_sharding=(P(*spec[:-1], None), of_weights))
    def automatic(leaves: list[Array], key_segments: Any) -> tuple[Array, list[Array]]:
        fields: dict[str, Any] = jax.tree.unflatten(tree, leaves)
        if "bias" not in named:  # made here, so that its type has no sharding of the mesh outside
            fields["bias"] = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), call.bias)
        same = call.key_segments is call.query_segments
        fields["key_segments"] = (
            fields.get("query_segments", call.query_segments) if same else key_segments
        )
        sharding = call.options.sharding
        layout = P(spec[0], None, of_heads, None) if sharding is None else sharding.spec
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), layout)
        options = dataclasses.replace(call.options, sharding=sharding)
        sown: list[Array] = []
        sow = None if call.sow is None else sown.append
        return compute(dataclasses.replace(call, **fields, options=options, sow=sow)), sown

    attended, sown = automatic(leaves, call.key_segments)
    if call.sow is not None:
        call.sow(*sown)
    return attended


def fitting_sharding(call: AttentionCall, sharding: NamedSharding) -> NamedSharding | None:
    """Returns the axes in `sharding` that divide batch and heads evenly.

    A bias that mixes heads splits no heads. Returns None if they divide neither, or if the call has a
    mask, dropout, an einsum or `sow`. Then the compiler splits the work, but for the backend `fused`,
    which runs on one device: each computes the whole call.
    """
    if call.query.ndim != 4 or call.mask is not None or call.features & {"dropout", "weights"}:
        return None
    over_batch, _, over_heads, _ = (*sharding.spec, None, None, None, None)[:4]
    size = sharding.mesh.size
    batch_parts, head_parts = (
        size // NamedSharding(sharding.mesh, P(axes)).shard_shape((size,))[0]
        for axes in (over_batch, over_heads)
    )
    if call.query.shape[0] % batch_parts:
        over_batch, batch_parts = None, 1
    mixes_heads = call.bias is not None and call.bias.mixes_heads
    if mixes_heads or call.query.shape[2] % head_parts or call.key.shape[2] % head_parts:
        over_heads, head_parts = None, 1
    if batch_parts * head_parts == 1 and call.options.backend != "fused":
        return None
    return NamedSharding(sharding.mesh, P(over_batch, None, over_heads, None))


def on_each_device(
    call: AttentionCall, sharding: NamedSharding, compute: Callable[[AttentionCall], Array]
) -> Float[Array, "batch q heads value_dim"]:
    """Computes each device's part of the call with `compute` (`jax.shard_map`).

    Each device gets the bias for its sequences and heads. Shared fields' gradients are summed.
    `sharding` comes from `fitting_sharding`.
    """
    over_batch, _, over_heads, _ = sharding.spec
    split: dict[str, Any] = {name: getattr(call, name) for name in ("query", "key", "value")}
    specs = dict.fromkeys(split, sharding.spec)
    sides = "query_positions", "key_positions", "query_segments", "key_segments", "query_reach"
    for name in sides:
        x = getattr(call, name)
        # NumPy positions for all sequences need no split, and so stay known when the call is traced.
        if x is not None and not (isinstance(x, np.ndarray) and x.ndim == 1):
            split[name] = jnp.asarray(x)
            specs[name] = P(over_batch if x.ndim > 1 and x.shape[0] > 1 else None)
    if call.slots_last:  # as they lie: XLA would copy a view for each device
        for name in ("key", "value"):
            split[name] = jnp.moveaxis(split[name], -3, -1)
            specs[name] = P(over_batch, over_heads)
    if call.sink is not None:
        split["sink"], specs["sink"] = call.sink, P(over_heads)

    bias, bias_tree = jax.tree.flatten(call.bias)
    bias_specs = (
        [] if call.bias is None else call.bias.layouts({"batch": over_batch, "heads": over_heads})
    )

    def on_device(split: dict[str, Any], bias: list[Any]) -> Array:
        if call.key_segments is call.query_segments and call.query_segments is not None:
            # so that skipping sees that they are the same
            split = split | {"key_segments": split["query_segments"]}
        if call.slots_last:
            split = split | {name: jnp.moveaxis(split[name], -1, -3) for name in ("key", "value")}
        return compute(
            dataclasses.replace(call, **split, bias=jax.tree.unflatten(bias_tree, bias), devices=1)
        )

    mapped = jax.shard_map(
        on_device,
        mesh=sharding.mesh,
        in_specs=(specs, bias_specs),
        out_specs=sharding.spec,
        check_vma=False,
    )
    # Compiled in any case: outside jit shard_map can't run a custom_vjp with symbolic zeros.
    return jax.jit(mapped)(split, bias)
