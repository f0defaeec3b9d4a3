"""Keeps the memory of one training step on CPUs for the next one, in large pages (Linux with the GNU C library)."""

import ctypes
import importlib.util
import os
import pkgutil
from importlib.metadata import entry_points

import jax

# Parameters of mallopt(3) and an advice of madvise(2).
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
NEVER = -1
MADV_HUGEPAGE = 14
HUGE_PAGE = 2**21  # bytes
# Of drivers: JAX leaves CUDA's plugin out where none of them is there.
NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
ADVISED = 0.25  # of the machine's memory: addresses, which cost nothing until they are used


def keep_freed_memory() -> bool:
    """Makes malloc keep freed blocks instead of giving them back to the system, and use large pages.

    XLA's CPU client allocates the temporary memory of a program anew for each call, in
    one block. By default the C library maps that block and unmaps it after the call, so
    each step begins with pages that the kernel must zero first: 30,000 page faults and a
    quarter of the processors' time in a step of the quickstart's model on two cores.

    The memory that the process holds stays at its largest. That can be several such
    blocks, though only one is in use at a time: one for each step dispatched ahead,
    and a new one whenever the C library can't give a freed block again
    (`posix_memalign` asks for some bytes more than the block that it then cuts out,
    and those may by now be another's). The first steps, which find no block, pay for
    its pages. Call it before JAX starts its threads, which are to share one arena.

    It does nothing where JAX will take an accelerator, as the host would keep for ever
    what NumPy and Orbax free there: whole checkpoints.

    Returns:
      Whether it was done: for CPUs, by a C library that knows how.
    """
    if not computes_on_cpus():
        return False
    try:
        library = ctypes.CDLL(None)
        mallopt, malloc, free, madvise = library.mallopt, library.malloc, library.free, library.madvise
    except (AttributeError, OSError, TypeError):  # another C library or system
        return False
    # No mappings and no trimming at all, for any size: a threshold would have to be a C
    # int, below 2 GiB, and larger blocks would still come and go.
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER))
    done = [mallopt(parameter, value) for parameter, value in settings]  # each, even after one that failed
    if not all(done):
        return False
    # Advice holds for addresses, not for blocks: what is freed here stays the heap's.
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = int(ADVISED * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    block = malloc(size)
    if block:
        start = -(-block // HUGE_PAGE) * HUGE_PAGE
        madvise(start, (block + size - start) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)
        free(block)
    return True


def computes_on_cpus() -> bool:
    """Whether JAX will take the CPU, as it is told or for want of anything else; it is not initialized by this."""
    chosen = jax.config.values["jax_platforms"]
    if chosen:  # by the user, or by JAX itself where it has found a TPU
        return chosen.split(",")[0] == "cpu"
    return all("cuda" in plugin and not any(map(os.path.exists, NVIDIA)) for plugin in _plugins())


def _plugins() -> set[str]:
    """Names of the accelerators' plugins that JAX finds here."""
    package = importlib.util.find_spec("jax_plugins")
    places = package.submodule_search_locations if package else None
    modules = {module.name for module in pkgutil.iter_modules(places)} if places else set()
    return modules | {entry.value for entry in entry_points(group="jax_plugins")}
