"""Claims: which process may write in a place.

With file locks, one process at a time holds the lock. Without them, as at addresses, the process
that started last may write: each start adds a claim with a name that sorts last, and a process stops
before its next write if its claim is no longer the last.
"""

import contextlib
import fcntl
import os
import re
import socket
import time
import uuid
from typing import IO

from etils import epath

from alibi.errors import UserError
from alibi.storage.files import is_address, listed, write_whole

LOCK_FILE, CLAIMS = ".lock", "claims"
ATTEMPTS, ATTEMPT_SECONDS = 3, 0.1  # `is_held` takes the lock for a moment


class HeldError(ValueError):
    """Another process holds a place's lock, and the lock's file names it."""

    def __init__(self, doing: str, place: epath.Path):
        named = (place / LOCK_FILE).read_text()
        super().__init__(f"another process is {doing} in {place}{named}; wait for it, or stop it")


class LostError(UserError):
    """A process that started later writes here now."""


class Claim:
    """This process's right to write in `place`, until `release`.

    Args:
      place: a directory, made if missing, or an address.
      doing: the activity in messages, such as "training".

    Attributes:
      file: the locked file, which child processes may inherit, or None without file locks.

    Raises:
      HeldError: another process holds the lock.
    """

    def __init__(self, place: epath.Path, doing: str):
        self._place, self._doing = place, doing
        self.file = _lock(place, doing)
        self._name = "" if self.file else _add_claim(place)

    def check(self) -> None:
        """Raises LostError if another process has claimed the place since. Call it before a write."""
        claims = [path.name for path in listed(self._place / CLAIMS)] if self._name else []
        if (newest := max(claims, default="")) != self._name:
            raise LostError(
                f"a process that started later is {self._doing} in {self._place} ({newest or 'and has ended'}); "
                "this one stops; all that it saved before is whole"
            )

    def release(self) -> None:
        """Gives the place back."""
        if self.file:
            self.file.close()
        if self._name:
            (self._place / CLAIMS / self._name).unlink(missing_ok=True)


def is_held(place: epath.Path) -> bool | None:
    """Returns whether a process holds a place's lock, or None (unknown) without file locks."""
    if is_address(place):
        return None
    try:
        with open(place / LOCK_FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    except OSError:
        return None
    return False


def remove_left(place: epath.Path) -> None:
    """Removes temporary directories of `made_whole` at `place` that no living process has locked."""
    name = re.compile(rf"\.{re.escape(place.name[:40])}\.[0-9a-f]{{32}}")
    for left in () if is_address(place) else place.parent.glob(".*"):
        if name.fullmatch(left.name) and left.is_dir() and is_held(left) is False:
            left.rmtree()


def _lock(place: epath.Path, doing: str) -> IO[str] | None:
    """Returns the locked file, or None without file locks."""
    if is_address(place):
        return None
    place.mkdir(parents=True, exist_ok=True)
    file = open(place / LOCK_FILE, "a")  # noqa: SIM115, open until the release
    for _ in range(ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            holder = f" (process {os.getpid()} on {socket.gethostname()}, or one that it started)"
            with contextlib.suppress(OSError):  # a full disk
                file.truncate(0)
                os.write(file.fileno(), holder.encode())
            return file
        except BlockingIOError:
            time.sleep(ATTEMPT_SECONDS)
        except OSError:
            file.close()
            return None
    file.close()
    raise HeldError(doing, place)


def _add_claim(place: epath.Path) -> str:
    """Writes a claim newer than all others, removes the others, and returns its name."""
    before = listed(place / CLAIMS)
    last = max((int(path.name.partition("-")[0]) for path in before), default=0)
    name = f"{last + 1:08d}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    write_whole(place / CLAIMS / name, f"{name}\n")
    for path in before:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return name
