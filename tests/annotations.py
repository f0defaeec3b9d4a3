"""How annotations of arrays are checked at each call."""

from typing import Any

import beartype


def check(function: Any) -> Any:
    """Returns the function or class, which checks its arguments and result.

    A function inside another is not checked: beartype would compile the check again at each call of
    the outer one, a tenth of the time of tests that trace models.
    """
    return function if "<locals>" in function.__qualname__ else beartype.beartype(function)
