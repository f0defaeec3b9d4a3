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


def fitting_sharding(call: AttentionCall, sharding: NamedSharding) -> NamedSharding | None:
    """Returns the part of `sharding` that divides the batch and the heads of the call evenly.

    None if it divides neither, or if the call has a mask, dropout, an einsum or `sow`; then
    the compiler splits the work.
    """
    if call.query.ndim != 4 or call.mask is not None or call.features & {"dropout", "weights"}:
        return None
    over_batch, _, over_heads, _ = (*sharding.spec, None, None, None, None)[:4]
    size = sharding.mesh.size  # of which `shard_shape` gives the share of one part
    batch_parts, head_parts = (
        size // NamedSharding(sharding.mesh, P(axes)).shard_shape((size,))[0] for axes in (over_batch, over_heads)
    )
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
    """Computes each device's own part of the call by `compute` (`jax.shard_map`).

    Each device gets the part of the bias for its sequences and heads; gradients of the parts that
    several devices share are summed. `sharding` comes from `fitting_sharding`.
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
    bias_specs = [] if call.bias is None else call.bias.layouts({"batch": over_batch, "heads": over_heads})

    def on_device(split: dict[str, Any], bias: list[Any]) -> Array:
        if call.key_segments is call.query_segments and call.query_segments is not None:
            split = split | {"key_segments": split["query_segments"]}  # skipping must see that they are the same
        return compute(dataclasses.replace(call, **split, bias=jax.tree.unflatten(bias_tree, bias), devices=1))

    mapped = jax.shard_map(
        on_device, mesh=sharding.mesh, in_specs=(specs, bias_specs), out_specs=sharding.spec, check_vma=False
    )
    # Compiled in any case: outside jit shard_map can't run a custom_vjp with symbolic zeros.
    return jax.jit(mapped)(split, bias)
