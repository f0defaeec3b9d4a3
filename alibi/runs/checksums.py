"""Checksums: restored arrays equal saved ones, and devices hold equal copies."""

import collections
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree, UInt32

from alibi.parallel import hosts
from alibi.parallel.axes import path_name


def checksums(tree: PyTree) -> dict[str, str]:
    """Returns a checksum, 16 hexadecimal digits, for the path of each array in `tree`.

    It depends on the elements' bits and places, not on how devices split them. Each device sums its
    part. A change in one element always changes it, in several with a probability of 1 - 2^-64.
    """
    jax.block_until_ready(tree)
    sums = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # One after the other: on CPUs many programs that sum over devices wait for each other.
        first, second = jax.device_get(_checksum(leaf))
        sums[path_name(path)] = f"{first:08x}{second:08x}"
    return sums


def check_replicas(state: PyTree, when: str) -> None:
    """Checks that devices with the same part of an array hold the same values.

    A checkpoint takes parts from all processes. A part on one device alone is not compared.

    Raises:
      UserError: on every process, as in `hosts.check_same_state`.
    """
    sums = [_checksums_of_parts(leaf.sharding)(leaf) for leaf in jax.tree.leaves(state)]
    digests: dict[tuple[str, int], Any] = collections.defaultdict(hashlib.sha256)
    for leaf, of_leaf in zip(jax.tree.leaves(state), sums, strict=True):
        split = str(leaf.sharding.spec)
        for shard in of_leaf.addressable_shards:
            axes = [
                f"{axis}={index.start}"
                for axis, index in zip(leaf.sharding.mesh.axis_names, shard.index, strict=False)
                if repr(axis) in split
            ]
            digests[" ".join(axes), shard.device.id].update(np.asarray(shard.data).tobytes())
    parts = [(axes, digest.hexdigest()) for (axes, _), digest in digests.items()]
    hosts.check_same_state(parts, when)


@functools.cache
def _checksums_of_parts(sharding: NamedSharding) -> Callable[[Array], Array]:
    """Returns a function from an array to each device's checksum, `[data, fsdp, tensor, 2]`."""
    axes = sharding.mesh.axis_names
    checksum = jax.shard_map(
        lambda shard: jnp.expand_dims(_checksum(shard), tuple(range(len(axes)))),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=P(*axes),
        check_vma=False,
    )
    return jax.jit(checksum)


@jax.jit
def _checksum(array: Array) -> UInt32[Array, "2"]:
    """Returns two sums, modulo 2^32, over each element's bits and place, mixed as in murmur3."""
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(
        jnp.uint32
    )
    index, size = jnp.zeros(array.shape, jnp.uint32), 1
    for axis in reversed(range(array.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(
            size * 0x9E3779B1 % 2**32
        )
        size *= array.shape[axis]
    once = (bits ^ index) * jnp.uint32(0x85EBCA6B)
    once ^= once >> 15
    twice = once * jnp.uint32(0xC2B2AE35)
    return jnp.stack([once.sum(), (twice ^ twice >> 13).sum()])
