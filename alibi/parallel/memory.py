"""The free memory of this process's devices."""

import math

import jax
import psutil
from jaxtyping import PyTree


def check_memory(what: str, tree: PyTree, remedy: str) -> None:
    """Raises ValueError, before anything is read, if arrays with the shapes, dtypes and shardings of
    `tree` don't fit into the free memory of this process's devices; arrays without a sharding count
    as split over them.

    Args:
      what: of the arrays, for the error.
      remedy: what to do, for the error.
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
    known = devices[0].memory_stats()
    if known is None:  # CPU devices share the memory of the machine
        needed, free = needed * len(devices), psutil.virtual_memory().available
    else:
        free = known["bytes_limit"] - known["bytes_in_use"]
    if needed > free:
        place = "this machine" if known is None else f"each {devices[0].device_kind}"
        raise ValueError(
            f"{what} needs {needed / 1e9:.1f} GB and {place} has {free / 1e9:.1f} GB free; {remedy}"
        )
