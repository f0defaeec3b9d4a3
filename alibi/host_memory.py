"""Keeps the memory of one training step for the next one (Linux with the GNU C library)."""

import ctypes

# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST = 2**31 - 1  # bytes; they are C ints


def keep_freed_memory() -> bool:
    """Makes malloc keep large freed blocks instead of giving them back to the system.

    XLA's CPU client allocates the temporary memory of a program anew for each call, in
    one block. By default the C library maps that block and unmaps it after the call, so
    each step begins with pages that the kernel must zero first: 37,000 page faults and a
    fifth of the time of a step of the quickstart's model on two cores. The memory that
    the process holds stays at its largest. Call it before JAX starts its threads, which
    are to share one arena; it changes nothing on an accelerator.

    Returns:
      Whether the C library knows how.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library or system
        return False
    settings = ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, LARGEST))
    done = [mallopt(parameter, value) for parameter, value in settings]  # each, even after one that failed
    return all(done)
