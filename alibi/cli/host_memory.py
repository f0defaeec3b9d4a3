"""Keeps the memory of a step on CPUs for the next step, in large pages (Linux, GNU C library)."""

import ctypes
import importlib.util
import os
import pkgutil
from importlib.metadata import entry_points

import jax

# Parameters of mallopt(3) and an advice of madvise(2).
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MADV_HUGEPAGE = 14
HUGE_PAGE = 2**21  # bytes
ADVISED = 0.25  # share of the machine's memory: addresses, which cost nothing until they are used


def keep_freed_memory() -> bool:
    """Makes malloc keep freed blocks instead of returning them to the system, and use large pages.

    XLA's CPU client allocates a program's temporary memory anew in each call, as one block. By default
    the C library maps this block and unmaps it after the call, so the kernel has to zero pages in
    each step: 30,000 page faults and a quarter of the time in a step of the quickstart's model on two
    cores.

    The memory of the process stays at its maximum. It can be several such blocks, though only one is
    in use: a block for each step dispatched ahead, and a new one whenever the C library can't reuse a
    freed block. The first steps, which find no block, pay for its pages. Call it before JAX starts
    its threads, so that they share an arena.

    It does nothing if JAX will take an accelerator: the host would keep all memory freed there by
    NumPy and Orbax, such as whole checkpoints.

    Returns:
      True if it was done, on CPUs with a C library that has these functions.
    """
    if not computes_on_cpus():
        return False
    try:
        library = ctypes.CDLL(None)
        mallopt, madvise = library.mallopt, library.madvise
        malloc, free = library.malloc, library.free
    except (AttributeError, OSError, TypeError):  # another C library or system
        return False
    # No mappings and no trimming at all, for any size: a threshold would have to be a C
    # int, below 2 GiB, and larger blocks would still come and go.
    if not all([mallopt(M_ARENA_MAX, 1), mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1)]):
        return False
    # Advice holds for addresses, and the heap keeps the advised block that is freed here.
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.argtypes = [ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = int(ADVISED * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if block := malloc(size):
        start = -(-block // HUGE_PAGE) * HUGE_PAGE
        madvise(start, (block + size - start) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)
        free(block)
    return True


def computes_on_cpus() -> bool:
    """Returns whether JAX will take the CPU, without initializing it."""
    chosen = jax.config.values["jax_platforms"]
    if chosen:  # by the user, or by JAX itself if it has found a TPU
        return chosen.split(",")[0] == "cpu"
    package = importlib.util.find_spec("jax_plugins")
    folders = (package and package.submodule_search_locations) or []
    plugins = [module.name for module in pkgutil.iter_modules(folders)]
    plugins += [entry.value for entry in entry_points(group="jax_plugins")]
    # JAX leaves CUDA's plugin out if the machine has no NVIDIA driver.
    driver = any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")))
    return not any("cuda" not in plugin or driver for plugin in plugins)
