"""Errors that entry points print as one line."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

# Exit codes of the entry points.
FAILED = 1  # the user must mend something, or we: to start again is no use
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: stopped with what was done saved; the same command goes on
ERROR_FILE = "ALIBI_ERROR_FILE"  # in the environment: the file of `tell`
OF_SWEEP = "ALIBI_OF_SWEEP"  # in the environment: set where a sweep started the process
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


def is_watched() -> bool:
    """Whether a sweep started this process and waits for it: then what it says stands among what others say."""
    return OF_SWEEP in os.environ


def tell(reason: str) -> None:
    """Says on stderr why something failed; the first time also in the file that who started this process waits for."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    if file := os.environ.pop(ERROR_FILE, None):
        with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as kept:
            kept.write(reason)


def explained(error: Exception) -> str | None:
    """The line that tells a user of `error` what to mend; None where nothing that a user did explains it."""
    said = str(error)
    if "too many open files" in said.lower():
        return f"no more files can be opened; allow more (ulimit -n 4096) and repeat the command: {_first_line(said)}"
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return f"{said}: make space and repeat the command; what was written before is whole"
    if isinstance(error, BrokenPipeError):
        return "what read the output has ended before all was printed; all files are written"
    if "Unable to initialize backend" in said or "No visible" in said:
        wanted = os.environ.get("JAX_PLATFORMS", "")
        return (
            f"JAX_PLATFORMS={wanted} names a platform that isn't here; unset it for what is, set it to cpu, or install "
            f"JAX for that platform: {_first_line(said)}"
        )
    return said if isinstance(error, ValueError | OSError | UserError) else None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
