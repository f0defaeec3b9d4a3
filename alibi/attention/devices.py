"""Attention on several devices, each of which computes its own sequences and heads by itself."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from alibi.attention.call import AttentionCall

# The fields of an AttentionCall that are split by batch, and those that are split by batch and heads.
SIDES = ("query_positions", "key_positions", "query_segments", "key_segments")
HEADS = ("query", "key", "value")


def check_sharding(sharding: Any) -> None:
    """Raises ValueError for a sharding that splits more of `[batch, length, heads, head_dim]` than batch and heads."""
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"sharding is {sharding}; it must be a jax.sharding.NamedSharding(mesh, P(...)), or None on one device"
        )
    over_batch, over_length, over_heads, over_features = (*sharding.spec, None, None, None, None)[:4]
    if len(sharding.spec) > 4 or over_length is not None or over_features is not None:
        raise ValueError(
            f"sharding has spec {sharding.spec}; of [batch, length, heads, head_dim] it may split batch and heads "
            f"alone: P({over_batch!r}, None, {over_heads!r})"
        )


def fitting_sharding(call: AttentionCall, sharding: NamedSharding) -> NamedSharding | None:
    """The part of `sharding` that divides the batch and the heads of the call evenly.

    None if neither can be divided, or if the call has a mask, dropout, an einsum or `sow`; then
    the compiler splits what it can.
    """
    if call.query.ndim != 4 or call.mask is not None or call.drops or call.wants_weights:
        return None
    over_batch, _, over_heads, _ = (*sharding.spec, None, None, None, None)[:4]
    batch_parts, head_parts = (_parts(sharding, axes) for axes in (over_batch, over_heads))
    if call.query.shape[0] % batch_parts:
        over_batch, batch_parts = None, 1
    if call.query.shape[2] % head_parts or call.key.shape[2] % head_parts:
        over_heads, head_parts = None, 1
    if batch_parts * head_parts == 1:
        return None
    return NamedSharding(sharding.mesh, P(over_batch, None, over_heads, None))


def on_each_device(
    call: AttentionCall, sharding: NamedSharding, compute: Callable[[AttentionCall], Array]
) -> Float[Array, "batch q heads value_dim"]:
    """The call, of which each device computes its own part by `compute` (`jax.shard_map`).

    Each device gets the part of the bias that belongs to its sequences and heads; gradients of
    what several devices share of it are summed. `sharding` is a `fitting_sharding`.
    """
    over_batch, _, over_heads, _ = sharding.spec
    split: dict[str, Any] = {name: getattr(call, name) for name in HEADS}
    specs = dict.fromkeys(HEADS, sharding.spec)
    for name in SIDES:
        x = getattr(call, name)
        # Positions as a NumPy array for all sequences need no split, and so stay known when the call is traced.
        if x is not None and not (isinstance(x, np.ndarray) and x.ndim == 1):
            split[name] = jnp.asarray(x)
            specs[name] = P(over_batch if x.ndim > 1 and x.shape[0] > 1 else None)
    if call.key_norm is not None:
        split["key_norm"], specs["key_norm"] = call.key_norm, P(over_batch, over_heads)

    bias, bias_tree = jax.tree.flatten(call.bias)
    axes = {"batch": over_batch, "heads": over_heads}
    bias_specs = [] if call.bias is None else call.bias.layouts(axes)

    def of_device(split: dict[str, Any], bias: list[Any]) -> Array:
        if call.key_segments is call.query_segments and call.query_segments is not None:
            split = split | {"key_segments": split["query_segments"]}  # skipping must see that they are the same
        own = dataclasses.replace(call, **split, bias=jax.tree.unflatten(bias_tree, bias), devices=1)
        return compute(own)

    mapped = jax.shard_map(
        of_device, mesh=sharding.mesh, in_specs=(specs, bias_specs), out_specs=sharding.spec, check_vma=False
    )
    # Compiled in any case: outside jit shard_map can't run a custom_vjp with symbolic zeros.
    return jax.jit(mapped)(split, bias)


def _parts(sharding: NamedSharding, axes: Any) -> int:
    """Into how many parts these axes of the mesh split a dimension."""
    size = sharding.mesh.size
    return size // NamedSharding(sharding.mesh, P(axes)).shard_shape((size,))[0]
