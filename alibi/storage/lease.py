"""Who may write in a place: one process at a time, by a file lock, or by a lease where there are no file locks.

A lease is a file that says which process holds it. Its holder writes it anew every few seconds, each time on
condition that it is still the one that it wrote; one that stays the same for a minute is of a process that is gone.
So the holder knows by its clock for how long nobody can have taken it over: while that is so it writes without asking,
and later only after a sign of life that arrived.
"""

import contextlib
import datetime
import json
import os
import pathlib
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import IO, Any

from alibi.storage.store import LostError, Store, Version

LOCK_FILE, LEASE_FILE = ".lock", "lease.json"
BEAT_SECONDS, STALE_SECONDS = 10.0, 60.0
POLL_SECONDS = 2.0
LOOKS, LOOK_SECONDS = 3, 0.1  # `is_held` takes a lock for the moment in which it looks


class HeldError(ValueError):
    """Another process holds the place; `fact` says which."""

    def __init__(self, fact: str):
        super().__init__(f"{fact}; wait for it, or stop it")
        self.fact = fact


class Claim:
    """The right of this process to write in `store`, from its making to `release`.

    Args:
      store: the place.
      doing: what a process does that holds it, for messages.
      beat, stale: seconds between two signs of life, and after which a holder without one is taken for gone.
      quiet: say nothing while the sign of life of another process is waited for.

    Attributes:
      store: the place, whose writes raise LostError where another process may have taken it over.

    Raises:
      HeldError: another process holds it. Where there are only leases, this is known after a sign of life, and a
        holder that was killed on another machine is waited for until its lease is stale, which is said.
    """

    def __init__(
        self,
        store: Store,
        doing: str,
        *,
        beat: float = BEAT_SECONDS,
        stale: float = STALE_SECONDS,
        quiet: bool = False,
    ):
        self.store = store
        self._lease: _Lease | None = None
        self.file: IO[Any] | None = None
        self.file = _locked(store, doing)
        if self.file is not None:
            with contextlib.suppress(OSError):  # a full disk
                self.file.truncate(0)
                self.file.write(_machine())
                self.file.flush()
        else:
            self._lease = _Lease(store, doing, beat, stale, quiet)
            self.store = store.guarded(self._lease.check_by_clock)

    def check(self) -> None:
        """Raises LostError where another process has taken the place over, thinking this one gone; asks the store."""
        if self._lease is not None:
            self._lease.renew()

    def release(self) -> None:
        """Gives the place back."""
        if self.file is not None:
            self.file.close()
        if self._lease is not None:
            self._lease.release()


def _locked(store: Store, doing: str) -> IO[Any] | None:
    """The lock file, None where there are no locks; HeldError where another process has it for longer than to look."""
    for _ in range(LOOKS):
        with contextlib.suppress(BlockingIOError):
            return store.lock(LOCK_FILE)
        time.sleep(LOOK_SECONDS)
    raise HeldError(f"another process is {doing} in {store}")


def awaited(store: Store, doing: str, say: Callable[[str], None]) -> Claim:
    """The claim of `store` when whoever holds it has given it back, of which `say` is told once."""
    told = False
    while True:
        try:
            return Claim(store, doing, quiet=told)
        except HeldError as held:
            if not told:
                say(f"{held.fact}; waiting until it ends (Ctrl-C to leave)")
            told = True
            time.sleep(POLL_SECONDS)


def is_held(store: Store) -> bool:
    """Whether a process holds `store`, as far as it can be seen at once; nothing is written."""
    with contextlib.suppress(OSError):  # what can't be written can't be locked
        if store.exists(LOCK_FILE):
            try:
                file = store.lock(LOCK_FILE)
            except BlockingIOError:
                return True
            if file is not None:
                file.close()
                return False
    try:
        lease = _read(store.read(LEASE_FILE))
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(lease["time"])
    except (FileNotFoundError, LookupError, TypeError, ValueError):
        return False
    return age.total_seconds() < STALE_SECONDS and not _is_gone(lease)


def was_held_here(store: Store) -> bool:
    """Whether a process of this machine was the last one to lock `store`, so that its lock could be seen here."""
    with contextlib.suppress(FileNotFoundError):
        return bool(here := _machine()) and store.read(LOCK_FILE).decode() == here
    return False


def last_sign(store: Store) -> datetime.datetime | None:
    """When the holder of a lease gave its last sign of life; None where there is no lease, such as for a file lock."""
    with contextlib.suppress(FileNotFoundError, LookupError, TypeError, ValueError):
        return datetime.datetime.fromisoformat(_read(store.read(LEASE_FILE))["time"])
    return None


class _Lease:
    """The lease file of a place, taken and renewed by a thread of its own until `release`."""

    def __init__(self, store: Store, doing: str, beat: float, stale: float, quiet: bool):
        self._store, self._doing, self._beat, self._stale, self._quiet = store, doing, beat, stale, quiet
        self._token = uuid.uuid4().hex
        self._renewed = _clock()  # when the request of the last sign of life that arrived was sent, at the latest
        self._version = self._take()
        self._lost = False
        self._one_at_a_time = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_often, name=f"lease of {store}", daemon=True)
        self._thread.start()

    def _content(self) -> str:
        now = datetime.datetime.now(datetime.UTC).isoformat()  # its fractions tell one sign of life from the next
        about = {"host": socket.gethostname(), "process": os.getpid(), "machine": _machine(), "time": now}
        return json.dumps(about | {"doing": self._doing, "token": self._token}, indent=2) + "\n"

    def _take(self) -> Version:
        while not self._store.create(LEASE_FILE, self._content()):
            with contextlib.suppress(FileNotFoundError):  # given back by now
                content, version = self._store.read_version(LEASE_FILE)
                if self._is_ours(content):  # our own first try, whose answer was lost on the way
                    break
                self._wait_until_stale(content, version)
                self._renewed = _clock()
                self._store.replace(LEASE_FILE, self._content(), version)
                time.sleep(min(1.0, self._beat))  # in a directory two may have replaced it: the last one has it
                break
        content, version = self._store.read_version(LEASE_FILE)
        if not self._is_ours(content):
            raise self._held(content)
        return version

    def _wait_until_stale(self, content: bytes, version: Version) -> None:
        """Returns when the holder shows no life any more; raises HeldError when it does."""
        holder, start = _read(content), time.monotonic()
        if _is_gone(holder):
            return
        wait = f"{_who(holder)} was {self._doing} here; waiting up to {self._stale:.0f} s for a sign of it"
        if not self._quiet:
            print(f"{self._store}: {wait}", file=sys.stderr)
        while time.monotonic() - start < self._stale:
            time.sleep(self._beat / 4)
            now, new_version = self._store.read_version(LEASE_FILE)
            if new_version != version:
                raise self._held(now)

    def _renew_often(self) -> None:
        while not self._ended.wait(self._beat):
            with contextlib.suppress(OSError):  # no connection now; who writes asks again
                try:
                    self.renew()
                except LostError:
                    return

    def renew(self) -> None:
        """Gives a sign of life; raises LostError where the lease is another's by now, or gone."""
        with self._one_at_a_time:
            if self._ended.is_set():
                return
            now = _clock()
            version = self._store.replace(LEASE_FILE, self._content(), self._version)
            if version is None:  # or it was replaced, but the answer was lost
                version = self._version_of_ours()
            self._version, self._renewed = version, now

    def _version_of_ours(self) -> Version:
        try:
            content, version = self._store.read_version(LEASE_FILE)
        except FileNotFoundError:
            content, version = b"", {}
        if self._is_ours(content):
            return version
        self._lost = True
        by = f"{_who(_read(content))} has taken it over" if content else "it was removed"
        raise LostError(
            f"the lease of {self._store} was lost: {by}; this process stops, so that only one is {self._doing} "
            "there; what it saved before is whole"
        )

    def check_by_clock(self) -> None:
        """`renew`, where it is lost or so old that another process may take it over while something is written.

        The other half of the time is for the write, which obstore gives up after 30 s.
        """
        if self._lost or _clock() - self._renewed > self._stale / 2:
            self.renew()

    def release(self) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # it becomes stale
            if self._is_ours(self._store.read(LEASE_FILE)):
                self._store.delete(LEASE_FILE)

    def _is_ours(self, content: bytes) -> bool:
        return _read(content).get("token") == self._token

    def _held(self, content: bytes) -> HeldError:
        return HeldError(f"another process is {self._doing} in {self._store}: {_who(_read(content))}")


def _read(content: bytes) -> dict[str, Any]:
    """What a lease says; nothing where it is damaged."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _who(lease: dict[str, Any]) -> str:
    return f"process {lease.get('process', '?')} on {lease.get('host', '?')} (at {lease.get('time', '?')})"


def _clock() -> float:
    """Seconds that also go by while the machine sleeps, where the system counts those."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _machine() -> str:
    """What is the same only for processes that see each other's ids; "" where that isn't told (not Linux)."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _is_gone(lease: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that has ended."""
    if not lease.get("machine") or lease["machine"] != _machine():
        return False
    try:
        os.kill(int(lease["process"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError):
        pass
    return False
