"""Second starts of what is under way: of a training or a sweep, on file systems with and without locks."""

import os

from faults.trial import HUNG_SECONDS

STARTS = ("train", "sweep", "train without locks", "sweep without locks")
# What Python runs first in each process, those that a sweep starts included: a file system without locks.
NO_LOCKS = """
import errno
import fcntl


def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")


fcntl.flock = flock
"""


def second_start(test, start: str) -> None:
    """Two at once: the second waits, finds all done, or is told of the first in a line; the results are as of one.

    Args:
      test: the `FaultTest`, which counts them and gathers what went wrong.
      start: one of `STARTS`.
    """
    kind, what = start.partition(" ")[0], f"second starts of {start}"
    trial = test.before(kind)
    if start.endswith("without locks"):
        folder = test.folder / "no-locks"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(NO_LOCKS)
        trial.environment["PYTHONPATH"] = f"{folder}{os.pathsep}{trial.environment['PYTHONPATH']}"
    for process in [trial.start(kind) for _ in range(2)]:
        said = process.communicate(timeout=HUNG_SECONDS)[1]
        if process.returncode:
            test.told(process.returncode, said, what)
    if what not in test.survived:  # else it was refused, and counted
        test.count(what)
    test.finish(trial, what)
