"""The end of a process whose peers are lost: within two minutes, in one line, with a code that says what to do.

JAX's coordination service learns by heartbeats that a process died or its machine stands still, and then aborts the
others with a C++ stack trace. Here that abort becomes a line. Two things it does not learn: that a process failed, for
which there is a word in its key-value store, and that one is alive but never comes to the next update, for which there
is a limit of time. Processes whose work is done end together, however long one of them still works: it would be
aborted where another one left before it.
"""

import atexit
import contextlib
import ctypes
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
from jax._src import distributed  # of its store nothing is public

from alibi.errors import REQUEUE, tell

JOIN_SECONDS = 300  # that a process waits for all others to come
HEARTBEAT_SECONDS = 60  # without one a process is lost
UPDATE_SECONDS = 100.0  # that an update may take, or ten times the longest so far
WATCH_SECONDS = 1.0  # between two looks at what the others say
END_SECONDS = 15.0  # that a thread waits for another one that ends the process
ENDED, DONE = "alibi/ended", "alibi/done"
# What a collective raises where a connection ends.
BROKEN = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe|timed? ?out|unavailable|coordination", re.I)
# Of absl's log: where a C++ program begins to tell why it aborts.
FATAL = re.compile(r"^(F\d{4} |\*\*\* |terminate called|E\d{4} .*coordination_service)", re.M)


class _Process:
    """What this process knows of its own end."""

    joined = False  # all processes have come
    code: int | None = None  # set: it ends, whatever happens on the way
    on_lost: Callable[[str, int], None] | None = None
    aborted: Any = None  # the handler of SIGABRT; ctypes keeps no reference
    preempted: Callable[[int], None] | None = None  # JAX's handler of SIGTERM, which tells all processes of it
    came: float | None = None  # the last update, by the monotonic clock; None where the next is not expected
    longest = 0.0  # seconds that an update took
    done = threading.Event()  # all have come to their ends: there is nothing more to watch


def join(address: str | None, count: int | None, number: int | None) -> None:
    """Connects to the other processes; the arguments are those of `jax.distributed.initialize`.

    Ends this process, in one line and with code REQUEUE, where not all of them come within `JOIN_SECONDS`.

    Raises:
      ValueError: an address, a count or a number is missing, and no cluster tells it.
    """
    devices = local_devices(os.environ)
    ours = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # while it waits for them in C++, Python would answer none
    handler, library = ctypes.CFUNCTYPE(None, ctypes.c_int), ctypes.CDLL(None)
    library.signal.restype = handler
    text = _divert_stderr()
    # Before it connects: where it waits in vain JAX aborts too.
    _Process.aborted = handler(lambda _: lost(_who(text()) if _Process.joined else _absent(text())))
    library.signal(signal.SIGABRT, _Process.aborted)
    jax.distributed.initialize(
        address,
        count,
        number,
        devices,
        initialization_timeout=JOIN_SECONDS,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    _Process.joined = True
    # JAX has taken SIGTERM, which it answers only where updates are made.
    _Process.preempted = library.signal(signal.SIGTERM, None)
    signal.signal(signal.SIGTERM, ours)
    watch = threading.Thread(target=_watch, daemon=True)
    watch.start()
    atexit.register(_leave, watch)  # after JAX's own, and so called before it


def local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """The GPUs, of those that it sees, that a task of Slurm's computes on; None: as JAX chooses.

    JAX takes one for each task. Here one task a node takes all of the node's, and tasks that Slurm
    has bound to GPUs of their own take these.
    """
    gpus = len([gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()])
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if not gpus or not tasks or "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    of_node, of_task = (
        int((re.findall(r"\d+", environment.get(name, "")) or [0])[-1])  # "4", or "a100:4"
        for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK")
    )
    if gpus < of_node or gpus == of_task:
        return list(range(gpus))
    each = gpus // int(tasks[0])
    first = int(environment["SLURM_LOCALID"]) * each
    return list(range(first, first + each)) if each else list(range(gpus))


def announce_preemption() -> None:
    """Has JAX tell all processes that this one is to stop: see `multihost_utils.reached_preemption_sync_point`."""
    if _Process.preempted:
        _Process.preempted(signal.SIGTERM)


@contextlib.contextmanager
def when_lost(act: Callable[[str, int], None] | None = None) -> Iterator[None]:
    """While entered, `act` gets reason and exit code before this process ends for a peer.

    That is also where a collective, or what asks the coordination service, fails for it.
    """
    before, _Process.on_lost = _Process.on_lost, act or _Process.on_lost
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if distributed.global_state.client is not None and BROKEN.search(str(error)):
            lost("another process was lost: its connection ended")
        raise
    finally:
        _Process.on_lost = before


def expect_update(expected: bool = True) -> None:
    """An update has come, and the next is expected; or none is, as during a validation.

    This process ends where the next one takes far longer than those before.
    """
    now = time.monotonic()
    if _Process.came is not None:
        _Process.longest = max(_Process.longest, now - _Process.came)
    _Process.came = now if expected else None


def lost(reason: str, code: int = REQUEUE) -> NoReturn:
    """Ends this process, which can do nothing without its peers."""
    if _Process.code is not None:
        time.sleep(END_SECONDS)  # another thread ends it, and may still write why
        os._exit(_Process.code)
    _Process.code = code
    with contextlib.suppress(Exception):
        if _Process.on_lost:
            _Process.on_lost(reason, code)
        hint = "; what was saved is whole, and the same command goes on from there" if code == REQUEUE else ""
        tell(f"{reason}{hint}")
    os._exit(code)


def end(reason: str, code: int) -> NoReturn:
    """Ends this process, which has said why, and within seconds its peers; those that end too, by themselves."""
    _Process.code, client = code, _client()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(ENDED, f"{code} process {distributed.global_state.process_id} {reason}", True)
        client.wait_at_barrier("alibi/end", 10_000)
    sys.stderr.flush()
    os._exit(code)


def _client() -> Any:
    return distributed.global_state.client


def awaited(key: str, seconds: float = math.inf) -> str:
    """The value of `key` in the store, once there is one; in short waits, between which Python answers signals.

    Raises:
      TimeoutError: there is none after so many seconds.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return _client().blocking_key_value_get(key, 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() > end:
                raise TimeoutError(f"{key} was not set within {seconds:.0f} s") from None


def _leave(watch: threading.Thread) -> None:
    """Waits until all processes are done, then ends the `watch`.

    After this JAX disconnects. A thread that asks the store meanwhile crashes the process.
    """
    state = distributed.global_state
    if state.client is None:
        return
    try:
        if state.process_id == 0:
            for other in range(1, state.num_processes):
                awaited(f"{DONE}/{other}")
            state.client.key_value_set(DONE, "all")
        else:
            state.client.key_value_set(f"{DONE}/{state.process_id}", "")
            awaited(DONE)
    except jax.errors.JaxRuntimeError:
        pass  # JAX aborts this process, which then says who was lost
    finally:
        _Process.done.set()
        watch.join()


def _watch() -> None:
    while _Process.code is None and not _Process.done.wait(WATCH_SECONDS):
        limit = max(UPDATE_SECONDS, 10 * _Process.longest)
        # Not before two updates have come: how long one takes isn't known.
        if _Process.longest and (came := _Process.came) is not None and time.monotonic() > came + limit:
            lost(f"no update for {limit:.0f} s: another process hangs, or the text of this one can't be read")
        with contextlib.suppress(Exception):  # the store may end before this thread does
            code, _, reason = _client().key_value_try_get(ENDED).partition(" ")
            time.sleep(5)  # in which this process may end by itself, with a message of its own
            if _Process.code is None:
                lost(reason, int(code))


def _divert_stderr() -> Callable[[], str]:
    """C++ writes to a file from now on, which is copied to stderr every second; a function that gives the file's text.

    What tells of an abort is not copied.
    """
    file, real = tempfile.TemporaryFile(), os.dup(2)  # noqa: SIM115 - open to the end
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    os.dup2(file.fileno(), 2)
    shown = 0

    def text() -> str:
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")

    def copy() -> None:
        nonlocal shown
        content = text()
        fatal = FATAL.search(content)
        end = fatal.start() if fatal else len(content)
        os.write(real, content[shown:end].encode())
        shown = max(shown, end)

    def copy_often() -> None:
        while True:
            time.sleep(1)
            copy()

    atexit.register(copy)
    threading.Thread(target=copy_often, daemon=True).start()
    return text


def _absent(text: str) -> str:
    """What a process says that the others did not come to, by what JAX said."""
    if "DEADLINE_EXCEEDED" not in text:
        fatal = FATAL.search(text)
        return f"the processes did not come together: {text[fatal.start() :].splitlines()[0] if fatal else 'aborted'}"
    count, address = distributed.global_state.num_processes, distributed.global_state.coordinator_address
    return (
        f"not all {count} processes came to {address} within {JOIN_SECONDS} s: see whether each was started, with the "
        "same address and number of processes, and can reach the first one"
    )


def _who(text: str) -> str:
    """What the coordination service said of the process that it lost."""
    tasks = re.search(r"stopped sending heartbeats\):\s*(\d+)", text)
    return f"process {tasks[1]} was lost: no heartbeat" if tasks else "the first process was lost, or the network"
