"""Records of a sweep in its work directory: which runs it has, and how each run ended."""

import contextlib
import hashlib
import json
import os

from etils import epath

from alibi.runs import evaluation_hash
from alibi.storage.claims import is_held
from alibi.storage.files import listed, resolve, write_whole
from alibi.sweeps.definition import Run, Sweep

SWEEP_FILE = "sweep.json"  # the fingerprint of each run by name
FAILURES = "failures"  # NAME.txt: why a run failed, until it succeeds
DONE = "done"  # NAME.txt: the fingerprint of a run whose results are complete
TASKS = "tasks"  # NAME/: the claim of the process that is at work on a run


def fingerprint(run: Run) -> str:
    """Returns a hash of the run's config and evaluations, and so of its results."""
    about = f"{evaluation_hash(run.config)} {run.config.train.steps} {run.evaluations}"
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def record_sweep(place: epath.Path, sweep: Sweep, *, replace: bool) -> None:
    """Records the runs of `sweep`, which all tasks must share.

    Args:
      replace: replace the record of another sweep, unless one of its tasks is at work.

    Raises:
      ValueError: the record of another sweep stays.
    """
    before, now = recorded_runs(place), {run.name: fingerprint(run) for run in sweep.runs}
    if before and list(before.items()) != list(now.items()):
        at_work = [name for name in before if is_held(place / TASKS / name)]
        if at_work or not replace:
            names = sorted({name for name, _ in before.items() ^ now.items()})
            raise ValueError(
                f"the runs of the sweep have changed since it began in {place} "
                f"({', '.join(names) or 'their order'}); give the sweep and its config as they were, or another "
                f"--workdir" + (f"; at work are tasks on {', '.join(at_work)}" if at_work else "")
            )
    write_whole(place / SWEEP_FILE, json.dumps({"title": sweep.title, "runs": now}, indent=2) + "\n")


def recorded_runs(place: epath.Path) -> dict[str, str]:
    """Returns the fingerprint of each run of the recorded sweep by name, in order; empty without a whole record."""
    try:
        return dict(json.loads((place / SWEEP_FILE).read_text())["runs"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return {}


def record_end(place: epath.Path, run: Run, failure: str) -> None:
    """Records why `run` failed; with an empty `failure`, its complete results."""
    record = place / FAILURES / f"{run.name}.txt"
    if failure:
        write_whole(record, failure)
        return
    record.unlink(missing_ok=True)
    write_whole(place / DONE / f"{run.name}.txt", fingerprint(run))


def is_done(place: epath.Path, name: str, expected: str) -> bool:
    """Returns whether the run `name` of the fingerprint `expected` has all its results."""
    with contextlib.suppress(FileNotFoundError):
        return (place / DONE / f"{name}.txt").read_text() == expected
    return False


def read_failures(workdir: str | os.PathLike[str]) -> dict[str, str]:
    """Returns why runs failed, by name."""
    failures = {}
    for path in listed(resolve(workdir) / FAILURES):
        with contextlib.suppress(FileNotFoundError):  # another task's run has succeeded meanwhile
            failures[path.name.removesuffix(".txt")] = path.read_text()
    return failures
