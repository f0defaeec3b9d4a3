"""The processes of several hosts: who writes and speaks, and what all of them decide alike.

Each function but `is_primary` must be called by every process at the same place of the program. With one process
they cost nothing.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from alibi.errors import UserError

Result = TypeVar("Result")


def is_primary() -> bool:
    """Whether this is the first process: the one that writes and speaks."""
    return jax.process_index() == 0


def any_of(*flags: bool) -> tuple[bool, ...]:
    """For each flag whether it is set on any process."""
    if jax.process_count() == 1:
        return flags
    return tuple(bool(flag) for flag in multihost_utils.process_allgather(np.array(flags)).any(axis=0))


def on_first(act: Callable[[], Result]) -> Result | None:
    """What `act` gives on the first process, None on the others; raises as `together` does."""
    return together(lambda: act() if is_primary() else None)


def together(act: Callable[[], Result]) -> Result:
    """What `act`, which every process calls, gives here; if it raises on one, this raises on all.

    Raises:
      UserError: it was another process that failed; that one raises what `act` did.
    """
    result, failure = None, None
    try:
        result = act()
    except Exception as error:
        failure = error
    failed = np.array([failure is not None])
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(failed)
    if failure is not None:
        raise failure
    if failed.any():
        raise UserError(f"process {np.flatnonzero(failed)[0]} failed; its messages say why")
    return cast(Result, result)  # which it is where nothing failed
