"""The state of runs while other processes make them: a line for each, from its directory."""

import concurrent.futures
import dataclasses
import datetime
from collections.abc import Sequence

from etils import epath

from alibi.reporting.report import REPORT_FILE
from alibi.reporting.writers import aligned, format_duration
from alibi.runs import RunDirectory
from alibi.storage.claims import is_held
from alibi.storage.files import listed
from alibi.sweeps.state import (
    SWEEP_FILE,
    TASKS,
    is_complete,
    read_failures,
    read_status,
    recorded_runs,
)

SUBMITTED_FILE = "submitted.json"  # of a single training, submitted to a cluster
RUN_FILES = ("config.json", "status.json", SUBMITTED_FILE)


@dataclasses.dataclass(frozen=True)
class Standing:
    """The state of a run; None for unknown values.

    Attributes:
      state: waiting, starting, running, trained (results are missing), evaluating, interrupted,
        failed, finished, imported (from the hub) or damaged.
      train_nll: nats a token, of the last row of metrics.
      seconds_left: until its last update.
      sign: the time of its last status.
    """

    name: str
    state: str
    step: int = 0
    steps: int | None = None
    train_nll: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    sign: datetime.datetime | None = None
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing will change by itself."""
        return self.state in ("finished", "imported", "failed", "damaged")


def holders(directory: epath.Path) -> list[epath.Path]:
    """Returns the directory, if it holds a run or a sweep or runs lie just below it, and the sweeps
    just below it; the directory alone if there is nothing.
    """
    below = [] if _is_run(directory) else listed(directory)
    sweeps = [place for place in below if (place / SWEEP_FILE).exists()]
    alone = not sweeps or any(map(_is_run, below))
    return [directory] * alone + sweeps


def _is_run(place: epath.Path) -> bool:
    return any((place / name).exists() for name in RUN_FILES)


def standings(workdir: epath.Path, now: datetime.datetime) -> list[Standing]:
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

    def standing(place: epath.Path) -> Standing:
        name = place.name
        complete = is_complete(workdir, name, expected[name]) if name in expected else None
        at_work = is_held(workdir / TASKS / name) is True
        return _standing(place, now, failures.get(name, ""), complete=complete, at_work=at_work)

    # at an address each request takes its time
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(standing, places))


def _standing(
    place: epath.Path,
    now: datetime.datetime,
    failure: str,
    *,
    complete: bool | None,
    at_work: bool,
) -> Standing:
    """Returns the state of a run.

    Args:
      complete: whether all results exist; None: no sweep knows the run.
      at_work: whether a sweep trains or evaluates it.
    """
    try:
        directory = RunDirectory(place)
        if directory.is_imported():
            imported = datetime.datetime.fromisoformat(directory.status()["updated"])
            return Standing(place.name, "imported", sign=imported)
        status = read_status(directory, now)
        rate = status.get("tokens_per_second")
        sign = datetime.datetime.fromisoformat(status["updated"]) if "updated" in status else None
        updates = status["steps"] - status["step"]
        seconds = updates * directory.config().train.batch_tokens / rate if rate else None
    except (ValueError, TypeError) as error:
        return Standing(place.name, "damaged", reason=str(error))
    state = status["state"]
    # A run can be complete without a directory: its rows were copied from another machine.
    if state == "finished" or (state == "missing" and complete):
        state = "trained" if complete is False else "finished"
        if at_work or failure:
            state = "evaluating" if at_work else "failed"
    elif state != "running" and (at_work or is_held(place)):
        state = "starting"
    elif state in ("missing", "interrupted"):
        unbegun = "waiting" if state == "missing" else state
        state = "failed" if failure else unbegun
    return Standing(
        name=place.name,
        state=state,
        step=status["step"],
        steps=status["steps"] or None,
        train_nll=status.get("train_nll"),
        tokens_per_second=rate,
        seconds_left=seconds,
        sign=sign,
        reason=status["reason"] or failure if state in ("failed", "interrupted") else "",
    )


def table(standing: Sequence[Standing], now: datetime.datetime) -> str:
    """Returns a line for each run and for each reason of a failure."""
    lines = [["run", "state", "update", "loss", "tokens/s", "time left", "last sign"]]
    for run in standing:
        age = max(0.0, (now - run.sign).total_seconds()) if run.sign else None
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


def summary(workdir: epath.Path, standing: Sequence[Standing]) -> str:
    """Returns the number of runs in each state, and where the report lies, if there is one."""
    states = [run.state for run in standing]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    report = f"; report: {workdir}/{REPORT_FILE}" if (workdir / REPORT_FILE).exists() else ""
    return f"{workdir}: {counts}{report}\n"
