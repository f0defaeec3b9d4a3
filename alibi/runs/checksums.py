"""Checksums of arrays, by which a checkpoint that is read is known to be the one that was saved."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, UInt32


def checksums(tree: PyTree) -> dict[str, str]:
    """The checksum of each array of `tree`, 16 hexadecimal digits, by its path.

    It depends on the bits of the elements and on their places, not on how they are split over devices, each of which
    sums up its own. An array with one changed element never has the checksum that it had; one with several has it by
    a chance of about 2^-64.
    """
    jax.block_until_ready(tree)
    sums = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # One after the other: many programs at once, each of which sums over devices, wait for each other on CPUs.
        first, second = jax.device_get(_checksum(leaf))
        sums[jax.tree_util.keystr(path, simple=True, separator="/")] = f"{first:08x}{second:08x}"
    return sums


@jax.jit
def _checksum(array: Array) -> UInt32[Array, "2"]:
    """Two sums, modulo 2^32, of each element's bits mixed with its place; the mixing is one to one, as in murmur3."""
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(jnp.uint32)
    place, size = jnp.zeros(array.shape, jnp.uint32), 1
    for axis in reversed(range(array.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(size * 0x9E3779B1 % 2**32)
        size *= array.shape[axis]
    once = (bits ^ place) * jnp.uint32(0x85EBCA6B)
    once ^= once >> 15
    twice = once * jnp.uint32(0xC2B2AE35)
    return jnp.stack([once.sum(), (twice ^ twice >> 13).sum()])
