"""A sweep's commands as processes on this machine, each on its share of the cores and GPUs."""

import contextlib
import ctypes
import dataclasses
import functools
import glob
import io
import itertools
import os
import pathlib
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
from alibi.sweeps.definition import PROJECT

# GPUs and TPUs. Asking JAX would claim them, and the runs need them.
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")
LAST_LINES_SECONDS = 5.0  # a grandchild may hold the pipe of stderr open for longer
# Loaded here: between fork and exec another thread may hold the loader's lock.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Slot:
    """A share of this machine for one process.

    Attributes:
      number: the line of its progress bar on a terminal.
      cores: its processor cores, or None for all.
      gpus: the NVIDIA GPUs it alone sees, or () for all.
      locks: inherited file descriptors: the locks last as long as the process.
      name: written before each line on its stderr, unless stderr is a terminal.
    """

    number: int = 0
    cores: frozenset[int] | None = None
    gpus: tuple[str, ...] = ()
    locks: tuple[int, ...] = ()
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a command: its exit code, negative for a signal, and its first error message."""

    code: int
    message: str = ""

    def reason(self, step: str) -> str:
        """Returns why `step`, such as "training", failed, or ""."""
        if self.code == 0:
            return ""
        if self.message:
            return self.message
        if self.code == -signal.SIGKILL:
            return f"{step} was killed by SIGKILL; most often that means no memory was left"
        if self.code < 0:
            return f"{step} was ended by {signal.Signals(-self.code).name}"
        return f"{step} ended with exit code {self.code}; its message stands above"


def make_slots(jobs: int) -> list[Slot]:
    """Returns a slot for each process, with equal shares of this process's cores and GPUs.

    With fewer GPUs than processes, all processes see all GPUs.
    """
    if jobs == 1 or not hasattr(os, "sched_getaffinity"):
        return [Slot(index) for index in range(jobs)]
    cores, gpus = _shares(sorted(os.sched_getaffinity(0)), jobs), _shares(visible_gpus(), jobs)
    alone = all(gpus)
    return [
        Slot(index, frozenset(cores[index]), tuple(gpus[index]) if alone else ())
        for index in range(jobs)
    ]


def _shares(items: Sequence[Item], jobs: int) -> list[Sequence[Item]]:
    """Returns `items` in `jobs` parts of nearly equal size."""
    bounds = itertools.pairwise(index * len(items) // jobs for index in range(jobs + 1))
    return [items[first:end] for first, end in bounds]


def visible_gpus() -> list[str]:
    """Returns the visible NVIDIA GPUs, named as in CUDA_VISIBLE_DEVICES."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    numbers = [path.removeprefix("/dev/nvidia") for path in glob.glob(ACCELERATORS[0])]
    return sorted(filter(str.isdecimal, numbers), key=int)


def is_on_cpu() -> bool:
    """Returns whether runs will have no accelerator."""
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not any(map(glob.glob, ACCELERATORS))


def _program(script: str) -> list[str]:
    """Returns Python's words for a script of the project, which an installed package has as a
    module.
    """
    if (PROJECT / script).exists():
        return [str(PROJECT / script)]
    return ["-m", f"alibi.cli.{pathlib.Path(script).stem}"]


class LocalProcesses(contextlib.ExitStack):
    """Runs commands, in each thread that calls `run`. As a context it passes signals on to them.

    Attributes:
      stopped: whether a signal has asked to stop.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False
        self._running: list[subprocess.Popen] = []
        self._starting = threading.RLock()

    def __enter__(self) -> "LocalProcesses":
        self.enter_context(signals_handled(self._pass_on))
        return self

    def run(self, command: Sequence[str], slot: Slot = Slot()) -> Ended:
        """Runs `command`, a script of the project and its flags, in `slot` to its end.

        Raises:
          Interrupted: a signal has asked to stop.
        """
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", prefix="alibi-error-") as file:
            with self._starting:
                if self.stopped:
                    raise Interrupted
                child = self._start(command, slot, file.name)
                self._running.append(child)
                if self.stopped:  # the signal came as it started
                    child.send_signal(signal.SIGTERM)
            lines = threading.Thread(
                target=_pass_lines, args=(child.stderr, slot.name), daemon=True
            )
            lines.start()
            try:
                code = child.wait()
            finally:
                self._running.remove(child)
                lines.join(LAST_LINES_SECONDS)
            if self.stopped:
                raise Interrupted
            return Ended(code, file.read().strip())

    def _start(self, command: Sequence[str], slot: Slot, error_file: str) -> subprocess.Popen:
        path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
        added = {
            "PYTHONPATH": path,
            "TQDM_POSITION": str(slot.number),
            ERROR_FILE: error_file,
            OF_SWEEP: "1",
        }
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)} if slot.gpus else {}
        with warnings.catch_warnings():
            # JAX warns of forks, which its threads don't survive; this child becomes another
            # program at once.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            # A group of its own: the terminal's Ctrl-C reaches only this process, which passes it
            # on.
            return subprocess.Popen(
                [sys.executable, *_program(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                # To a file lines of several processes come whole, and with their names, only
                # through this process.
                stderr=None if is_terminal() else subprocess.PIPE,
                env=os.environ | added | gpus,
                pass_fds=slot.locks,
                process_group=0,
                preexec_fn=functools.partial(_settle, slot.cores)
                if sys.platform == "linux"
                else None,
            )

    def _pass_on(self, signal_number: int, frame: FrameType | None) -> None:
        with self._starting:
            self.stopped = True
            running = list(self._running)
        if not running:
            raise Interrupted
        for child in running:
            # A second Ctrl-C ends a process at once; no other signal has a stronger second one.
            child.send_signal(signal_number if signal_number == signal.SIGINT else signal.SIGTERM)


def _pass_lines(stream: IO[bytes] | None, name: str) -> None:
    """Writes each line of a child's stderr to this process's, with `name` before it."""
    if stream is None:
        return
    for line in io.TextIOWrapper(stream, "utf-8", "replace"):  # a carriage return ends a line too
        if line := line.rstrip():
            print_line(line if not name or line.startswith(name) else f"{name}: {line}")


def _settle(cores: frozenset[int] | None) -> None:
    """Runs in the child: sets its cores, and SIGTERM if the parent is killed: no run goes on
    unseen.
    """
    assert LIBC is not None
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if cores is not None:
        os.sched_setaffinity(0, cores)
