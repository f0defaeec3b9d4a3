"""Errors that entry points print as one line."""

import contextlib
import errno
from collections.abc import Iterator

# Exit codes of the entry points.
FAILED = 1  # the user must mend something, or we: to start again is no use
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: stopped with what was done saved; the same command goes on
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class UserError(RuntimeError):
    """Something that the user can mend: the message says what, got, needed and how to fix it."""


@contextlib.contextmanager
def disk_errors_named(place: object) -> Iterator[None]:
    """Turns a full disk, met by Python or by a library's own code, into a UserError that says what to do."""
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in NO_SPACE
        if not full and "no space left" not in str(error).lower():
            raise
        raise UserError(
            f"no space left to write {place}; what was saved before is whole: make space and repeat the command"
        ) from error
