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


def agreed(decision: bool) -> bool:
    """The first process's decision, on every process."""
    if jax.process_count() == 1:
        return decision
    return bool(multihost_utils.broadcast_one_to_all(np.array(decision)))


def any_of(*flags: bool) -> tuple[bool, ...]:
    """For each flag whether it is set on any process."""
    if jax.process_count() == 1:
        return flags
    return tuple(bool(flag) for flag in multihost_utils.process_allgather(np.array(flags)).any(axis=0))


def on_first(act: Callable[[], Result]) -> Result | None:
    """What `act` gives on the first process, None on the others.

    Raises:
      UserError: on the others, where `act` raised on the first; that one raises what `act` did.
    """
    result, failure = None, None
    if is_primary():
        try:
            result = act()
        except Exception as error:
            failure = error
    if agreed(failure is not None) and failure is None:
        raise UserError("the first host failed; its message says why")
    if failure is not None:
        raise failure
    return result


def together(step: Callable[[], Result]) -> Result:
    """The result of `step`, which every process calls; if it raises on one, this raises on all.

    Raises:
      ValueError: it was another process that failed; that one raises what `step` did.
    """
    failure, result = None, None
    try:
        result = step()
    except Exception as error:
        failure = error
    succeeded = np.array(failure is None)
    if jax.process_count() > 1:
        succeeded = multihost_utils.process_allgather(succeeded)
    if failure is not None:
        raise failure
    if not np.all(succeeded):
        raise ValueError(f"process {np.flatnonzero(~np.ravel(succeeded))[0]} failed; its messages say why")
    return cast(Result, result)  # which it is where nothing failed
