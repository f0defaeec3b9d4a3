"""Where the commands of a sweep run: a launcher runs a command in a place and tells how it ended.

The only one is this machine's, whose places are shares of its processor cores and GPUs. On a
cluster whole tasks of a sweep are spread, by `engines`, and each runs its commands by this one.
"""

import abc
import contextlib
import ctypes
import dataclasses
import functools
import glob
import io
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import IO, TypeVar

from alibi.errors import ERROR_FILE, OF_SWEEP, Interrupted, signals_handled
from alibi.progress import is_terminal, print_line
from alibi.runs import usable_cores
from alibi.sweeps.definition import PROJECT

# Of GPUs and TPUs. Asking JAX would claim them, and the runs need them.
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")
# A run on one core takes the least time of that core, but some runs end later than others.
MOST_JOBS = 4
# For which the last lines of a process are waited for: one that it left behind may hold its stderr open.
LAST_LINES_SECONDS = 5.0
Thing = TypeVar("Thing")
# Loaded here: between fork and exec another thread may hold the loader's lock.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process runs."""

    number: int = 0  # the line of its progress bar among those of the others, on a terminal
    cores: frozenset[int] | None = None  # of the processor, that it may use; None: all
    gpus: tuple[str, ...] = ()  # of NVIDIA, that it alone sees; none: what there is
    lock: int | None = None  # a file descriptor that it holds open too, so that its lock lasts as long as the process
    name: str = ""  # with which each line that it writes to stderr begins, where that is no terminal


@dataclasses.dataclass(frozen=True)
class Command:
    """One of the project's scripts, such as train.py, with its flags."""

    script: str
    flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, negative for a signal, and the first error that it printed, if it did."""

    code: int
    message: str = ""

    def reason(self, what: str) -> str:
        """Why `what` failed; "" where it didn't."""
        return "" if self.code == 0 else self.message or f"{what} {describe_exit(self.code)}"


class Launcher(contextlib.AbstractContextManager):
    """Runs commands, one for each thread that asks; as a context it is ready for them, and not after it."""

    stopped: bool = False  # whether a signal has asked to stop

    @abc.abstractmethod
    def run(self, command: Command, place: Place) -> Ended:
        """Runs `command` in `place` to its end; raises Interrupted where a signal has asked to stop."""

    def __exit__(self, *_: object) -> None:
        return None  # most have nothing to undo


def places(jobs: int) -> list[Place]:
    """One for each of `jobs` processes that run at a time; this process's cores, and GPUs, are dealt out among them.

    GPUs only where there is one for each: fewer are seen by all.

    There must be a core for each, see `check_jobs`.
    """
    if jobs == 1 or not hasattr(os, "sched_getaffinity"):
        return [Place(number) for number in range(jobs)]
    cores, gpus = _dealt(sorted(os.sched_getaffinity(0)), jobs), _dealt(visible_gpus(), jobs)
    alone = all(gpus)
    return [Place(number, frozenset(cores[number]), tuple(gpus[number]) if alone else ()) for number in range(jobs)]


def check_jobs(jobs: int, flag: str) -> None:
    """Raises ValueError where this machine has no core for each of `jobs` processes, which `flag` asked for."""
    most = usable_cores()
    if not 1 <= jobs <= most:
        raise ValueError(f"{flag}={jobs} must be between 1 and {most}, the processor cores of this machine")


def _dealt(things: Sequence[Thing], jobs: int) -> list[Sequence[Thing]]:
    """`things` in `jobs` parts that differ by one at most."""
    bounds = itertools.pairwise(number * len(things) // jobs for number in range(jobs + 1))
    return [things[first:end] for first, end in bounds]


def visible_gpus() -> list[str]:
    """The GPUs of NVIDIA that processes started here see, by number or by name as CUDA_VISIBLE_DEVICES has them."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu.strip() for gpu in given.split(",") if gpu.strip()]
    numbers = [path.removeprefix("/dev/nvidia") for path in glob.glob(ACCELERATORS[0])]
    return sorted(filter(str.isdecimal, numbers), key=int)


def suitable_jobs() -> int:
    """How many small runs this machine does best at a time: one with an accelerator, else one a core, at most four."""
    return min(usable_cores(), MOST_JOBS) if is_on_cpu() else 1


def is_on_cpu() -> bool:
    """Whether runs will have no accelerator."""
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not any(map(glob.glob, ACCELERATORS))


class LocalProcesses(Launcher):
    """Processes of this machine; the signals that ask this one to stop are passed on to each exactly once.

    Those `of_sweep` leave to the sweep what a user is told before and after a run.
    """

    def __init__(self, of_sweep: bool = False) -> None:
        self._of_sweep = {OF_SWEEP: "1"} if of_sweep else {}
        self._running: list[subprocess.Popen] = []
        self._starting = threading.RLock()

    def __enter__(self) -> "LocalProcesses":
        self._signals = signals_handled(self._pass_on)
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.__exit__(None, None, None)

    def run(self, command: Command, place: Place = Place()) -> Ended:
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", prefix="alibi-error-") as file:
            with self._starting:
                if self.stopped:
                    raise Interrupted
                child = self._start(command, place, file.name)
                self._running.append(child)
                if self.stopped:  # the signal came as it started
                    child.send_signal(signal.SIGTERM)
            lines = threading.Thread(target=_pass_lines, args=(child.stderr, place.name), daemon=True)
            lines.start()
            try:
                code = child.wait()
            finally:
                self._running.remove(child)
                lines.join(LAST_LINES_SECONDS)
            if self.stopped:
                raise Interrupted
            return Ended(code, file.read().strip())

    def _start(self, command: Command, place: Place, error_file: str) -> subprocess.Popen:
        path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)} if place.gpus else {}
        with warnings.catch_warnings():
            # JAX warns of forks, which its threads don't survive; this child becomes another program at once.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            # A group of its own: the terminal's Ctrl-C reaches only this process, which passes it on.
            return subprocess.Popen(
                [sys.executable, str(PROJECT / command.script), *command.flags],
                stdin=subprocess.DEVNULL,
                # To a file lines of several processes come whole, and with their names, only through this one.
                stderr=None if is_terminal() else subprocess.PIPE,
                env=os.environ
                | {"PYTHONPATH": path, "TQDM_POSITION": str(place.number), ERROR_FILE: error_file}
                | gpus
                | self._of_sweep,
                pass_fds=[] if place.lock is None else [place.lock],
                process_group=0,
                preexec_fn=functools.partial(_settle, place.cores) if sys.platform == "linux" else None,
            )

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        with self._starting:
            self.stopped = True
            running = list(self._running)
        if not running:
            raise Interrupted
        for child in running:
            # Only of Ctrl-C a second one says more than the first.
            child.send_signal(number if number == signal.SIGINT else signal.SIGTERM)


def _pass_lines(stream: IO[bytes] | None, name: str) -> None:
    """Writes what a child says to this process's stderr, line by line; nothing where the child does so itself."""
    if stream is None:
        return
    for line in io.TextIOWrapper(stream, "utf-8", "replace"):  # a carriage return ends a line too
        if line := line.rstrip():
            print_line(line if not name or line.startswith(name) else f"{name}: {line}")


def _settle(cores: frozenset[int] | None) -> None:
    """In the child: its cores, and SIGTERM when the parent is killed, so that no run goes on unseen."""
    assert LIBC is not None
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if cores is not None:
        os.sched_setaffinity(0, cores)


def describe_exit(code: int) -> str:
    """What a process's exit code says, with the usual reason."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL; most often that means no memory was left"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}; its message stands above"
