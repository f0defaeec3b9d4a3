"""A sweep in tasks, which no process leads: which runs each does, and that all do those of one and the same sweep."""

import hashlib
import json
import re

from alibi.runs import evaluation_hash
from alibi.runs.lease import is_held
from alibi.runs.store import Store
from alibi.sweeps.definition import Run, Sweep
from configs import base

SWEEP_FILE = "sweep.json"  # the runs that tasks do, each with a hash of what it is
TASKS = "tasks"  # NAME/: who is at work on a run


def share_of(sweep: Sweep, task: str) -> tuple[Run, ...]:
    """The runs of `task`: I/N takes every N-th run from the I-th on, counted from 0; a run's name takes that one.

    Raises:
      ValueError: neither of both, or a number beyond the tasks or the runs.
    """
    count = len(sweep.runs)
    if named := [run for run in sweep.runs if run.name == task]:
        return tuple(named)
    found = re.fullmatch(r"(\d+)/(\d+)", task)
    if found is None:
        nearest = base.nearest(task, [run.name for run in sweep.runs])
        raise ValueError(
            f"--task={task} is neither a part of the sweep, such as 0/{count}, nor one of its {count} runs; did you "
            f"mean {nearest!r}? --dry_run lists them"
        )
    number, tasks = map(int, found.groups())
    if number >= tasks:
        raise ValueError(
            f"--task={task}: tasks are counted from 0, so there are 0/{tasks} to {max(tasks - 1, 0)}/{tasks}"
        )
    if number >= count:
        raise ValueError(
            f"--task={task} is beyond the sweep's {count} runs; give --task=0/{count} to {count - 1}/{count}"
        )
    return sweep.runs[number::tasks]


def claim_place(store: Store, run: Run) -> Store:
    """Where a process claims the right to train and evaluate `run`."""
    return store / TASKS / run.name


def pin(store: Store, sweep: Sweep) -> None:
    """Keeps what the sweep is, where nobody has; raises ValueError where the sweep that was kept is another one."""
    if not store.create(SWEEP_FILE, _content(sweep)):
        check_pinned(store, sweep)


def pin_anew(store: Store, sweep: Sweep) -> None:
    """Keeps what the sweep is; raises ValueError where tasks are at work on another one."""
    check_submittable(store, sweep)
    store.write(SWEEP_FILE, _content(sweep))


def check_submittable(store: Store, sweep: Sweep) -> None:
    """Raises ValueError where tasks are at work in `store` on another sweep than this one."""
    at_work = [name for name in _known(store) if is_held(store / TASKS / name)]
    try:
        check_pinned(store, sweep)
    except ValueError as error:
        if at_work:
            raise ValueError(f"{error}; at work are tasks on {', '.join(at_work)}") from None


def check_pinned(store: Store, sweep: Sweep) -> None:
    """Raises ValueError where `store` keeps another sweep than this one; what differs is named."""
    before, now = _known(store), _described(sweep)
    if not before or list(before.items()) == list(now.items()):
        return
    told = {
        "changed": [name for name in now if name in before and now[name] != before[name]],
        "new": [name for name in now if name not in before],
        "gone": [name for name in before if name not in now],
    }
    differing = "; ".join(f"{what}: {', '.join(names)}" for what, names in told.items() if names) or "their order"
    raise ValueError(
        f"the runs of the sweep have changed since tasks began in {store} ({differing}); give the sweep and its config "
        f"as they were, or another --workdir, or, when no task is at work, remove {store}/{SWEEP_FILE}"
    )


def _described(sweep: Sweep) -> dict[str, str]:
    """For each run in order, what its results are of and which they are."""
    return {
        run.name: hashlib.sha256(f"{evaluation_hash(run.config)} {run.evaluations}".encode()).hexdigest()[:12]
        for run in sweep.runs
    }


def _content(sweep: Sweep) -> str:
    return json.dumps({"title": sweep.title, "runs": _described(sweep)}, indent=2) + "\n"


def _known(store: Store) -> dict[str, str]:
    """What `store` keeps; nothing where that is missing or damaged."""
    try:
        return dict(json.loads(store.read(SWEEP_FILE))["runs"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return {}


def known_runs(store: Store) -> list[str]:
    """The names of the runs that tasks do in `store`, in order; none where no task has begun there."""
    return list(_known(store))
