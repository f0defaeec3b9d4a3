"""What the processes of several hosts decide together, so that none waits for one that went another way."""

from collections.abc import Callable
from typing import TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

Result = TypeVar("Result")


def is_primary() -> bool:
    """Whether this is the first process: the one that writes and speaks."""
    return jax.process_index() == 0


def agreed(decision: bool) -> bool:
    """The first process's decision, on every process."""
    if jax.process_count() == 1:
        return decision
    return bool(multihost_utils.broadcast_one_to_all(np.array(decision)))


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
