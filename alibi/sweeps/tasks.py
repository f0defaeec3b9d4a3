"""A sweep in tasks, which no process leads: which runs each does, and that all do those of one and the same sweep."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from alibi.config.fields import nearest
from alibi.config.override import Override
from alibi.reporting.rows import Row
from alibi.runs import evaluation_hash
from alibi.storage.claims import is_held
from alibi.storage.files import write_whole
from alibi.sweeps.definition import Evaluation, Run, Sweep
from alibi.sweeps.state import missing_of

SWEEP_FILE = "sweep.json"  # the runs of the sweep, each with what its results are of and which they are
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
        meant = nearest(task, [run.name for run in sweep.runs])
        raise ValueError(
            f"--task={task} is neither a part of the sweep, such as 0/{count}, nor one of its {count} runs; did you "
            f"mean {meant!r}? --dry_run lists them"
        )
    number, tasks = map(int, found.groups())
    if not tasks:
        raise ValueError(f"--task={task}: N of I/N must be at least 1, such as --task=0/{count}")
    if number >= tasks:
        raise ValueError(f"--task={task}: tasks are counted from 0, so there are 0/{tasks} to {tasks - 1}/{tasks}")
    if number >= count:
        raise ValueError(
            f"--task={task} is beyond the sweep's {count} runs; give --task=0/{count} to {count - 1}/{count}"
        )
    return sweep.runs[number::tasks]


def claim_place(store: epath.Path, run: Run) -> epath.Path:
    """Where a process claims the right to train and evaluate `run`."""
    return store / TASKS / run.name


@dataclasses.dataclass(frozen=True)
class Pinned:
    """A run as the work directory keeps it: the hash of its config, its updates, and the results that it is to have."""

    config: str
    steps: int
    evaluations: tuple[Evaluation, ...]

    @classmethod
    def of(cls, run: Run) -> "Pinned":
        return cls(evaluation_hash(run.config), run.config.train.steps, run.evaluations)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Pinned":
        return cls(content["config"], content["steps"], tuple(map(_evaluation, content["evaluations"])))

    def has_all(self, name: str, rows: Sequence[Row]) -> bool:
        """Whether nothing is missing of the results of the run `name`."""
        return not missing_of(self.evaluations, rows, (name, self.steps, self.config))


def pin(store: epath.Path, sweep: Sweep) -> None:
    """Keeps what the sweep is, where nobody has; raises ValueError where the sweep that was kept is another one."""
    check_pinned(store, sweep)
    if not pinned(store):  # missing or damaged
        write_whole(store / SWEEP_FILE, _content(sweep))
        check_pinned(store, sweep)  # another task may have written at the same time


def pin_anew(store: epath.Path, sweep: Sweep) -> None:
    """Keeps what the sweep is; raises ValueError where tasks are at work on another one."""
    try:
        check_pinned(store, sweep)
    except ValueError as error:
        if at_work := [name for name in pinned(store) if is_held(store / TASKS / name)]:
            raise ValueError(f"{error}; at work are tasks on {', '.join(at_work)}") from None
    write_whole(store / SWEEP_FILE, _content(sweep))


def check_pinned(store: epath.Path, sweep: Sweep) -> None:
    """Raises ValueError where `store` keeps another sweep than this one; what differs is named."""
    before, now = pinned(store), {run.name: Pinned.of(run) for run in sweep.runs}
    if not before or list(before.items()) == list(now.items()):
        return
    told = {
        "changed": [name for name in now if name in before and now[name] != before[name]],
        "new": [name for name in now if name not in before],
        "gone": [name for name in before if name not in now],
    }
    differing = "; ".join(f"{what}: {', '.join(names)}" for what, names in told.items() if names) or "their order"
    raise ValueError(
        f"the runs of the sweep have changed since it began in {store} ({differing}); give the sweep and its config "
        f"as they were, or another --workdir, or, when no task is at work, remove {store}/{SWEEP_FILE}"
    )


def pinned(store: epath.Path) -> dict[str, Pinned]:
    """The runs of the sweep in `store` by name, in order; none where it keeps none, or what it keeps is damaged."""
    try:
        runs = json.loads((store / SWEEP_FILE).read_bytes())["runs"]
        return {name: Pinned.from_json(content) for name, content in runs.items()}
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _content(sweep: Sweep) -> str:
    runs = {run.name: _fields(Pinned.of(run)) for run in sweep.runs}
    return json.dumps({"title": sweep.title, "runs": runs}, indent=2) + "\n"


def _fields(value: Any) -> Any:
    """`value` for JSON; of what is a dataclass the fields that are not at their defaults, so that one may be added."""
    if isinstance(value, Override):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        told = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
        return {name: _fields(one) for name, (one, default) in told.items() if one != default}
    return [*map(_fields, value)] if isinstance(value, tuple) else value


def _evaluation(content: Mapping[str, Any]) -> Evaluation:
    override = Override.from_json(content["override"]) if "override" in content else None
    return Evaluation(**{**content, "lengths": tuple(content["lengths"]), "override": override})
