"""How tests say that a call is refused: by the flag or field to change, not by the wording."""

import re
from collections.abc import Callable
from typing import Any


def assert_refused(
    names: str,
    call: Callable[..., Any],
    /,
    *arguments: Any,
    raised: type[Exception] | tuple[type[Exception], ...] = ValueError,
    listed: bool = False,
    **options: Any,
) -> str:
    """Returns the message of the error that the call ends with. It has one line.

    Args:
      names: a regular expression that the message holds.
      listed: a list stands below the line.
    """
    try:
        call(*arguments, **options)
    except raised as error:
        message = str(error)
    else:
        raise AssertionError(f"nothing was refused, and the message should hold {names!r}")
    assert re.search(names, message), f"{names!r} is not in {message!r}"
    line, colon, _ = message.partition(":\n")
    assert bool(colon) is listed, f"a list, or none: {message!r}"
    assert "\n" not in line, f"more than one line: {message!r}"
    return message
