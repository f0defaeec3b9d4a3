"""Attention on several devices: each computes its own sequences and heads, by itself."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from alibi.attention.call import AttentionCall

# Fields of an AttentionCall that are split as their batch dimension is; NumPy's of one dimension stay known.
SIDES = ("query_positions", "key_positions", "query_segments", "key_segments")
HEADS = ("query", "key", "value")


def check_sharding(sharding: NamedSharding) -> None:
    """Raises ValueError where a sharding splits more of `[batch, length, heads, head_dim]` than batch and heads."""
    spec = _spec(sharding)
    if len(spec) > 4 or spec[1] is not None or spec[3] is not None:
        raise ValueError(
            f"sharding has spec {sharding.spec}; of [batch, length, heads, head_dim] it may split batch and heads "
            "alone, such as P('data', None, 'tensor')"
        )


def cannot_split(call: AttentionCall, sharding: NamedSharding) -> str:
    """Why the devices can't each compute their own part of the call; empty if they can."""
    if call.query.ndim != 4:
        return "query is not [batch, length, heads, head_dim]"
    if call.mask is not None or call.drops or call.wants_weights:
        return "it has a mask, dropout or weights to give"
    batch_parts, head_parts = _parts(sharding)
    if call.query.shape[0] % batch_parts:
        return f"{batch_parts} parts don't divide a batch of {call.query.shape[0]}"
    if call.query.shape[2] % head_parts or call.key.shape[2] % head_parts:
        return f"{head_parts} parts don't divide {call.query.shape[2]} query and {call.key.shape[2]} key heads"
    return ""


def on_each_device(
    call: AttentionCall, sharding: NamedSharding, compute: Callable[[AttentionCall], Array]
) -> Float[Array, "batch q heads value_dim"]:
    """A call that `cannot_split` has no objection to, by `compute` of what each device has (`jax.shard_map`).

    Slopes and other biases go with their heads; their gradients are summed over the devices.
    """
    over_batch, _, over_heads, _ = _spec(sharding)
    _, head_parts = _parts(sharding)
    heads = call.query.shape[2] // head_parts
    split: dict[str, Any] = {name: getattr(call, name) for name in HEADS}
    specs = {name: P(over_batch, None, over_heads, None) for name in HEADS}
    for name in SIDES:
        x = getattr(call, name)
        if x is not None and not (isinstance(x, np.ndarray) and x.ndim == 1):
            split[name] = jnp.asarray(x)
            specs[name] = P(over_batch if x.ndim > 1 and x.shape[0] > 1 else None)
    if call.key_norm is not None:
        split["key_norm"], specs["key_norm"] = call.key_norm, P(over_batch, over_heads)

    def of_device(split: dict[str, Any], bias: Any) -> Array:
        if bias is not None and head_parts > 1:
            bias = bias.of_heads(lax.axis_index(over_heads) * heads + jnp.arange(heads))
        return compute(dataclasses.replace(call, **split, bias=bias, devices=1))

    mapped = jax.shard_map(
        of_device,
        mesh=sharding.mesh,
        in_specs=(specs, P()),
        out_specs=P(over_batch, None, over_heads, None),
        check_vma=False,
    )
    # Where nothing else is compiled, this must be: run step by step, shard_map knows no custom_vjp with symbolic zeros.
    return jax.jit(mapped)(split, call.bias)


def _spec(sharding: NamedSharding) -> tuple[Any, ...]:
    """Mesh axes of `[batch, length, heads, head_dim]`, None where there is none."""
    return (*sharding.spec, *(None,) * (4 - len(sharding.spec)))


def _parts(sharding: NamedSharding) -> tuple[int, int]:
    """Into how many parts batch and heads are split."""
    over_batch, _, over_heads, _ = _spec(sharding)
    return _size(sharding, over_batch), _size(sharding, over_heads)


def _size(sharding: NamedSharding, axes: Any) -> int:
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return math.prod(sharding.mesh.shape[name] for name in names)
