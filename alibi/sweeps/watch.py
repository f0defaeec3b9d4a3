"""The state of runs while other processes make them: a line for each, from its directory."""

import concurrent.futures
import dataclasses
import datetime
from collections.abc import Sequence

from etils import epath

from alibi.reporting.report import REPORT_FILE
from alibi.reporting.writers import aligned, format_duration
from alibi.storage.claims import is_held
from alibi.storage.files import listed
from alibi.sweeps.state import (
    SWEEP_FILE,
    TASKS,
    RunState,
    is_complete,
    read_failures,
    read_state,
    recorded_runs,
)

SUBMITTED_FILE = "submitted.json"  # of a single training, submitted to a cluster
RUN_FILES = ("config.json", "status.json", SUBMITTED_FILE)


def holders(directory: epath.Path) -> list[epath.Path]:
    """Returns the directory, if it holds a run or a sweep or runs lie just below it, and the sweeps
    just below it; the directory alone if there is nothing.
    """
    below = [] if _is_run(directory) else listed(directory)
    sweeps = [path for path in below if (path / SWEEP_FILE).exists()]
    alone = not sweeps or any(map(_is_run, below))
    return [directory] * alone + sweeps


def _is_run(path: epath.Path) -> bool:
    return any((path / name).exists() for name in RUN_FILES)


def standings(workdir: epath.Path, now: datetime.datetime) -> list[RunState]:
    """Returns the state of the run in `workdir`, of each run of the sweep in it, waiting runs
    included, or of each run just below it.

    Raises:
      ValueError: there is neither a run nor a sweep.
    """
    expected, begun = recorded_runs(workdir), listed(workdir / "runs")
    names = dict.fromkeys([*expected, *(path.name for path in begun)])
    places = [workdir / "runs" / name for name in names]
    if not places:
        below = [] if _is_run(workdir) else listed(workdir)
        places = list(filter(_is_run, below or [workdir]))
        if not places:
            raise ValueError(
                f"{workdir} holds no run and no sweep; give the --workdir of train.py, sweep.py or submit.py"
            )
    failures = read_failures(workdir)

    def watched(path: epath.Path) -> RunState:
        complete = path.name not in expected or is_complete(workdir, path.name, expected[path.name])
        at_work = is_held(workdir / TASKS / path.name) is True
        recorded, failure = read_state(path, now), failures.get(path.name, "")
        state = recorded.state
        # A run can be complete without a directory: its rows were copied from another machine.
        if state == "finished" or (state == "missing" and complete and path.name in expected):
            state = "finished" if complete else "trained"
            if at_work or failure:
                state = "evaluating" if at_work else "failed"
        elif state in ("missing", "interrupted", "failed"):
            if at_work or is_held(path):
                state = "starting"
            elif failure:
                state = "failed"
            elif state == "missing":
                state = "waiting"
        told = state in ("failed", "interrupted", "damaged")
        return dataclasses.replace(
            recorded, state=state, reason=(recorded.reason or failure) if told else ""
        )

    # at an address each request takes its time
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(watched, places))


def table(standing: Sequence[RunState], now: datetime.datetime) -> str:
    """Returns a line for each run and for each reason of a failure."""
    lines = [["run", "state", "update", "loss", "tokens/s", "time left", "last sign"]]
    for run in standing:
        age = max(0.0, (now - run.updated).total_seconds()) if run.updated else None
        lines.append(
            [
                run.name,
                run.state,
                f"{run.step:,} of {run.steps:,}" if run.steps else "",
                "" if run.train_nll is None else f"{run.train_nll:.4f}",
                "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
                format_duration(run.seconds_left) if run.seconds_left and not run.is_over else "",
                "" if age is None else f"{format_duration(age)} ago",
            ]
        )
    reasons = [f"{run.name}: {' '.join(run.reason.split())}\n" for run in standing if run.reason]
    return aligned(lines, left=(0, 1)) + "".join(reasons)


def summary(workdir: epath.Path, standing: Sequence[RunState]) -> str:
    """Returns the number of runs in each state, and where the report lies, if there is one."""
    states = [run.state for run in standing]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    report = f"; report: {workdir}/{REPORT_FILE}" if (workdir / REPORT_FILE).exists() else ""
    return f"{workdir}: {counts}{report}\n"
