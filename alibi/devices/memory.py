"""The free memory of this process's devices."""

import math

import jax
import psutil
from jaxtyping import PyTree


def check_memory(what: str, tree: PyTree, remedy: str) -> None:
    """Raises ValueError if the arrays in `tree` don't fit into free memory on this process's devices.
    Arrays without a sharding count as split over all.

    Args:
      what, remedy: name the arrays and the way out, for the error.
    """
    devices = jax.local_devices()
    needed = sum(
        leaf.dtype.itemsize
        * (
            math.prod(leaf.sharding.shard_shape(leaf.shape))
            if leaf.sharding
            else leaf.size / len(devices)
        )
        for leaf in jax.tree.leaves(tree)
    )
    stats = devices[0].memory_stats()
    if stats is None:  # CPU devices share the memory of the machine
        needed, free = needed * len(devices), psutil.virtual_memory().available
    else:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
    if needed > free:
        holder = "this machine" if stats is None else f"each {devices[0].device_kind}"
        raise ValueError(
            f"{what} needs {needed / 1e9:.1f} GB and {holder} has {free / 1e9:.1f} GB free; {remedy}"
        )
