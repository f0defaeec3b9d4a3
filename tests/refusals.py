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
    **options: Any,
) -> str:
    """Returns the message of the error that the call ends with. It has one line, or a list below it.

    Args:
      names: a regular expression that the message holds.
    """
    try:
        call(*arguments, **options)
    except raised as error:
        message = str(error)
    else:
        raise AssertionError(f"nothing was refused, and the message should hold {names!r}")
    assert re.search(names, message), f"{names!r} is not in {message!r}"
    assert "\n" not in message.partition(":\n")[0], f"more than one line: {message!r}"
    return message
