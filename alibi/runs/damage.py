"""Damage of checkpoints told from what the machine failed at, and named in one line, whatever Orbax raised for it."""

import contextlib
import errno
import functools
import pathlib
import re
import sys
from collections.abc import Iterator

# What errors say that are not of the checkpoint that is read.
_NO_DAMAGE = (
    *("resource_exhausted", "unavailable", "deadline_exceeded", "permission", "too many open", "no space left"),
    *("timed out", "timeout", "connection", "disconnected", "resolve host"),
)
_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # without an errno where Orbax raises them


def _is_no_damage(error: Exception) -> bool:
    """Whether it was the machine or the network that failed: what lies there may be whole."""
    if isinstance(error, OSError) and not isinstance(error, _NOT_THERE) and error.errno != errno.EIO:
        return True  # errors of the network have no errno
    said = re.sub(r"\S*/\S*", "", str(error)).lower()  # without paths, which may hold any word
    return isinstance(error, MemoryError) or any(word in said for word in _NO_DAMAGE)


@functools.cache
def ignore_closed_loops() -> None:
    """Prints nothing where threads of TensorStore's end after their event loop: reading or saving failed before.

    Of that there is an error; these threads, which go on, would print a traceback for each file, also in its midst.
    """
    others = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            others(unraisable)

    sys.unraisablehook = hook


@contextlib.contextmanager
def item_named(item: str) -> Iterator[None]:
    """Where reading fails, says which item it was."""
    try:
        yield
    except Exception as error:
        if _is_no_damage(error):
            raise
        reason = re.split(r"\n| See full TensorStore| \[", f"{type(error).__name__}: {error}")[0]
        raise ValueError(f"its {item} can't be read, {reason}") from error


@contextlib.contextmanager
def damage_named(place: pathlib.Path) -> Iterator[None]:
    """Orbax raises many kinds of error for what is one thing to its user."""
    try:
        yield
    except Exception as error:
        if _is_no_damage(error):
            raise
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"checkpoint {place} is damaged or of another model ({first_line[:300]}); "
            "use another one, or delete this one and train again from the one before it, if there is one"
        ) from error
