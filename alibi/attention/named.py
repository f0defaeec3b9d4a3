"""A position method as an `attention_fn`, from its name."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from alibi.attention.call import AttentionOptions
from alibi.attention.checks import broadcasts
from alibi.attention.flax import (
    AttentionFn,
    layer_positions,
    with_flax_signature,
)
from alibi.attention.methods import method_attention_fn
from alibi.attention.visible import visible_by
from alibi.positions import Params, PositionMethod, make_position, method_class
from alibi.positions.distance import as_array

TRAIN_LENGTH = 512  # of T5, whose largest distance of 128 follows from it


def attention_fn(
    position: str | type[PositionMethod] | PositionMethod,
    *,
    num_heads: int | None = None,
    params: Params | None = None,
    causal: bool = True,
    train_length: int | None = None,
    options: Mapping[str, Any] | None = None,
    query_offset: int | Int[Array, "*#batch"] | None = None,
    window: int | None = None,
    skip_epsilon: float | None = 0.0,
    sharding: NamedSharding | None = None,
    backend: str = "auto",
) -> AttentionFn:
    """Returns a position method as the `attention_fn` of `flax.linen.MultiHeadDotProductAttention`
    or `nnx.MultiHeadAttention`. It also works on plain arrays.

    Positions are as in `alibi.alibi_attention_fn`. `alibi.linen.SelfAttention` and
    `alibi.nnx.SelfAttention` own the parameters, and also take methods that read the layer's input.

    Args:
      position: a name in `alibi.METHODS` or from an installed package, `package.module:Class`, a
        class, or the result of `alibi.make_position`, which must have the same `num_heads` and
        `causal`.
      num_heads: heads in the layer.
      params: the method's parameters, as `position_params` makes them, or None for a method without
        parameters.
      causal: hides later keys.
      train_length: tokens in a training sequence. Some options' defaults follow it, such as
        `max_distance` in t5, and methods that stretch compare the key count with it. Defaults to
        512, or to the length with which a given method was made.
      options: the method's options, as a mapping from names to values.
      query_offset, window, skip_epsilon, sharding, backend: as in `alibi.alibi_attention_fn`.

    Returns:
      A function of (query, key, value) `[*batch, length, heads, head_dim]` and Flax's keywords.

    Raises:
      ValueError: as `alibi.make_position`; a method that adds to the token embeddings, or reads the
        layer's input; missing parameters, or other names and shapes; from the function, as
        `alibi.attend`.

    Example:
      >>> import jax
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 16, 8, 32))
      >>> rotary = attention_fn("rotary", num_heads=8)
      >>> rotary(query, key, value).shape  # batch, length, heads, size
      (2, 16, 8, 32)
    """
    if isinstance(position, PositionMethod):
        _check_agrees(position, num_heads, causal, train_length, options)
        kind, heads = type(position), position.num_heads
    elif num_heads is None:
        raise ValueError(
            f"attention_fn({position!r}) needs num_heads, the heads of the layer, such as 8"
        )
    else:
        kind, heads = method_class(position), num_heads
    name = _called(position, kind)
    check_in_attention(position, kind)
    if kind.keep is not PositionMethod.keep:
        raise ValueError(
            f"position method {name!r} reads the layer's input, which an attention_fn doesn't get; use "
            f"alibi.linen.SelfAttention(position={name!r}, ...) or alibi.nnx.SelfAttention"
        )

    @functools.cache
    def made(head_dim: int, causal: bool) -> PositionMethod:
        if not isinstance(position, PositionMethod):
            return make_position(
                position,
                num_heads=heads,
                head_dim=head_dim,
                width=heads * head_dim,
                train_length=TRAIN_LENGTH if train_length is None else train_length,
                causal=causal,
                options=options,
            )
        if head_dim != position.head_dim:
            raise ValueError(
                f"{name} was made for heads of {position.head_dim} features, and the layer's have {head_dim}; make it "
                f"with head_dim={head_dim}"
            )
        return dataclasses.replace(position, causal=causal)

    # Parameters have the same names at any size; all methods take 64.
    example = position if isinstance(position, PositionMethod) else made(64, causal)
    if params is None and (shapes := _shapes(example)):
        raise ValueError(
            f"position method {name!r} has parameters ({', '.join(shapes)}); give params=, as alibi.position_params "
            "makes them, or use alibi.linen.SelfAttention or alibi.nnx.SelfAttention, which own them"
        )
    attention_options = AttentionOptions(window, skip_epsilon, sharding, backend)

    @with_flax_signature
    def attention(query: Array, key: Array, value: Array, **keywords: Any) -> Array:
        method = made(query.shape[-1], keywords.pop("is_causal", False) or causal)
        checked = _checked(name, method, params or {})
        attend = layer_attention_fn(method, checked, None, attention_options, query_offset)
        return attend(query, key, value, **keywords)

    return attention


def _check_agrees(
    method: PositionMethod,
    num_heads: int | None,
    causal: bool,
    train_length: int | None,
    options: Mapping[str, Any] | None,
) -> None:
    """Raises ValueError for arguments that contradict a method made before."""
    name = type(method).__name__
    if options:
        raise ValueError(f"options={options} are for a method by name; {name} is made already")
    arguments = {"num_heads": num_heads, "causal": causal, "train_length": train_length}
    for key, got in arguments.items():
        if got not in (None, made := getattr(method, key)):
            raise ValueError(
                f"{name} was made with {key}={made}, and attention_fn got {key}={got}; give both the same"
            )


def layer_attention_fn(
    method: PositionMethod,
    params: Params,
    x: Float[Array, "*batch k width"] | None,
    options: AttentionOptions,
    query_offset: int | Int[Array, "*#batch"] | None = None,
    segment_ids: Int[Array, "*#batch k"] | None = None,
) -> AttentionFn:
    """Returns a position method as the `attention_fn` of a layer with input `x`, which only a method
    with `keep` reads. Positions are as in `alibi_attention_fn`.
    """

    @with_flax_signature
    def attention(query: Array, key: Array, value: Array, **keywords: Any) -> Array:
        if key.shape[-2] != query.shape[-2] and not method.takes_shared_keys:
            raise ValueError(
                f"position method {type(method).__name__} needs keys of each head, and the layer has {key.shape[-2]} "
                f"heads of keys for {query.shape[-2]} of queries; give it as many"
            )
        batch, count, offset = query.shape[:-3], math.prod(query.shape[:-3]), query_offset
        if (mask := keywords.get("mask")) is not None:
            mask = visible_by(mask)
            mask = mask.reshape((1,) * (query.ndim - mask.ndim) + mask.shape)
        if len(batch) != 1:  # a method has one batch dimension
            query, key, value = (
                side.reshape(count, *side.shape[-3:]) for side in (query, key, value)
            )
            if offset is not None and np.ndim(offset):
                xp = jnp if isinstance(offset, jax.Array) else np  # known numbers stay known
                offset = xp.broadcast_to(offset, batch).reshape(count)
            if mask is not None:
                mask = jnp.broadcast_to(mask, (*batch, *mask.shape[-3:]))
                mask = mask.reshape(count, *mask.shape[-3:])
        inputs = jnp.zeros((*key.shape[:2], 0))
        if x is not None and type(method).keep is not PositionMethod.keep:
            inputs = x.reshape(count, *x.shape[-2:])
        query_positions, key_positions = layer_positions(query, key, mask, offset)
        segments = as_array(segment_ids)
        if segments is not None:
            whole = *batch, key.shape[1]
            if segments.shape[-1:] != whole[-1:] or not broadcasts(segments.shape, whole):
                raise ValueError(
                    f"segment_ids have shape {segments.shape}; the layer's input needs {whole[-1:]} or {whole}"
                )
            segments = jnp.broadcast_to(segments, whole).reshape(count, -1)
        attended = method_attention_fn(
            method.at_length(key.shape[-3]),
            params,
            inputs,
            query_positions=query_positions,
            key_positions=key_positions,
            segment_ids=segments,
            options=options,
        )(query, key, value, **{**keywords, "mask": mask})
        return attended.reshape(*batch, *attended.shape[-3:])

    return attention


def position_params(method: PositionMethod, key: Array) -> dict[str, Any]:
    """Returns a method's initial parameters for one layer, with those that layers may share.

    Example:
      >>> import jax
      >>> from alibi import attention_fn, make_position
      >>> t5 = make_position("t5", num_heads=8, head_dim=32, width=256, train_length=128)
      >>> params = position_params(t5, jax.random.key(0))  # to be trained with your model's
      >>> attention = attention_fn(t5, params=params)
    """
    if not isinstance(method, PositionMethod):
        raise ValueError(
            f"position_params got {method!r:.60}; give what alibi.make_position returns"
        )
    return {**method.init(key), **method.init_layer(jax.random.fold_in(key, 1))}


def _called(position: Any, kind: type[PositionMethod]) -> str:
    """Returns what the user called a method: its name, or that of its class."""
    return position if isinstance(position, str) else kind.__name__


def check_in_attention(position: Any, kind: type[PositionMethod]) -> None:
    """Raises ValueError for a method that adds to the token embeddings instead."""
    if kind.embed is not PositionMethod.embed:
        name = _called(position, kind)
        raise ValueError(
            f"position method {name!r} adds to the token embeddings, before the first layer: x = "
            f"alibi.make_position({name!r}, ...).embed(params, x, positions); attention itself takes none"
        )


def check_own_attention(
    attention_fn: Any, layer: str = "SelfAttention", by: str = "position"
) -> None:
    """Raises ValueError for an `attention_fn` in a layer that makes its own."""
    if attention_fn is not None:
        raise ValueError(
            f"{layer} makes its attention_fn by {by}=; leave attention_fn out, or use Flax's own layer"
        )


def check_heads(num_heads: int, features: int) -> None:
    """Raises ValueError unless the heads divide a layer's features."""
    if num_heads < 1 or features % num_heads:
        raise ValueError(
            f"num_heads={num_heads} does not divide the {features} features of the layer; change num_heads, or give "
            "qkv_features"
        )


def check_no_cache(position: Any, kind: type[PositionMethod], segment_ids: Any) -> None:
    """Raises ValueError for a method that keeps data for each token besides keys and values, or for
    documents, which Flax's cache doesn't hold.
    """
    if segment_ids is not None:
        raise ValueError("decode=True reads one document; leave segment_ids out, or decode=False")
    if kind.keep is not PositionMethod.keep:
        name = _called(position, kind)
        raise ValueError(
            f"position method {name!r} keeps data of each token, which Flax's cache (decode=True) doesn't hold; "
            "compute whole sequences, or use alibi.generation"
        )


@functools.cache
def _shapes(method: PositionMethod) -> dict[str, Any]:
    """Returns a method's parameter shapes."""
    return _tree_shapes(jax.eval_shape(lambda: position_params(method, jax.random.key(0))))


def _tree_shapes(params: Params) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True): np.shape(x) for path, x in leaves}


def _checked(name: str, method: PositionMethod, params: Params) -> Params:
    """Returns a method's parameters with lists as arrays. Other names or shapes raise ValueError."""
    arrays = jax.tree.map(jnp.asarray, params, is_leaf=lambda x: isinstance(x, list | tuple))
    needed, got = _shapes(method), _tree_shapes(arrays)
    if needed != got:
        raise ValueError(
            f"position method {name!r} needs params of shapes {needed}, as alibi.position_params makes them, "
            f"and got {got}"
        )
    return arrays
