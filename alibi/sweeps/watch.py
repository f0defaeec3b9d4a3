"""How runs stand while others make them: a line for each, from what their directories say."""

import concurrent.futures
import dataclasses
import datetime
from collections.abc import Sequence

from etils import epath

from alibi.reporting.recorded import find_rows
from alibi.reporting.report import REPORT_FILE
from alibi.reporting.writers import aligned, format_duration
from alibi.runs import RunDirectory
from alibi.storage.claims import is_held
from alibi.storage.files import listed
from alibi.sweeps.state import read_failures
from alibi.sweeps.tasks import TASKS, pinned

# Without file locks a run is believed to be at work for this long after its last sign of life.
BELIEVED = datetime.timedelta(minutes=5)
SUBMITTED_FILE = "submitted.json"  # of one training: it was given to an engine, which starts it some time


@dataclasses.dataclass(frozen=True)
class Standing:
    """How one run stands; None where something isn't known.

    Attributes:
      state: waiting, starting, running, trained (results are missing), evaluating, interrupted, failed, finished or
        damaged.
      train_nll: nats a token, of the last row of metrics.
      seconds_left: until its last update.
      sign: when it was last heard of.
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
        return self.state in ("finished", "failed", "damaged")


def standings(store: epath.Path, now: datetime.datetime) -> list[Standing]:
    """How the run in `store` stands, or each run of the sweep in it, those included that have not begun.

    Raises:
      ValueError: there is neither a run nor a sweep.
    """
    known = pinned(store)
    runs = [*known, *(folder.name for folder in listed(store / "runs") if folder.name not in known)]
    if runs:
        failures, rows = read_failures(store), find_rows(store)

        def standing(name: str) -> Standing:
            complete = known[name].has_all(name, rows) if name in known else None
            return _standing(store / "runs" / name, store / TASKS / name, failures.get(name, ""), complete, now)

        with concurrent.futures.ThreadPoolExecutor(16) as pool:  # at an address each question takes its time
            return list(pool.map(standing, runs))
    if not any((store / name).exists() for name in ("config.json", "status.json", SUBMITTED_FILE)):
        raise ValueError(f"{store} holds no run and no sweep; give the --workdir of train.py, sweep.py or submit.py")
    return [_standing(store, store / TASKS, "", None, now)]


def _standing(
    place: epath.Path, task: epath.Path, failure: str, complete: bool | None, now: datetime.datetime
) -> Standing:
    """How one run stands, of which a sweep says why it failed, and has all results or not (None: there is no sweep)."""
    directory = RunDirectory(str(place))
    held, evaluated = is_held(place), is_held(task)
    try:
        status = directory.status()
        sign = datetime.datetime.fromisoformat(status["updated"]) if "updated" in status else None
        state, rate = status["state"], status.get("tokens_per_second")
        left = (status["steps"] - status["step"]) * directory.config().train.batch_tokens if rate else None
    except (ValueError, TypeError) as error:
        return Standing(place.name, "damaged", reason=str(error))
    if state == "running":
        believed = held is None and sign and now - sign < BELIEVED
        state = "running" if held or believed else "interrupted"
    elif state == "finished" or (state == "missing" and complete):  # of rows that came from elsewhere
        done = "trained" if complete is False else "finished"
        state = "evaluating" if evaluated else "failed" if failure else done
    elif held or evaluated:
        state = "starting"
    elif failure:
        state = "failed"
    return Standing(
        place.name,
        "waiting" if state == "missing" else state,
        status["step"],
        status["steps"] or None,
        status.get("train_nll"),
        rate,
        left / rate if rate and left is not None else None,
        sign,
        status["reason"] or failure if state in ("failed", "interrupted") else "",
    )


def table(standing: Sequence[Standing], now: datetime.datetime) -> str:
    """A line for each run, and one for each reason of a failure."""
    lines = [["run", "state", "update", "loss", "tokens/s", "time left", "last sign"]]
    for one in standing:
        lines.append(
            [
                one.name,
                one.state,
                f"{one.step:,} of {one.steps:,}" if one.steps else "",
                "" if one.train_nll is None else f"{one.train_nll:.4f}",
                "" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
                "" if one.is_over or not one.seconds_left else format_duration(one.seconds_left),
                "" if one.sign is None else f"{format_duration(max(0.0, (now - one.sign).total_seconds()))} ago",
            ]
        )
    reasons = [f"{one.name}: {' '.join(one.reason.split())}\n" for one in standing if one.reason]
    return aligned(lines, left=(0, 1)) + "".join(reasons)


def summary(store: epath.Path, standing: Sequence[Standing]) -> str:
    """How many runs are in which state, and where the report lies, if there is one."""
    states = [one.state for one in standing]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    report = f"; report: {store}/{REPORT_FILE}" if (store / REPORT_FILE).exists() else ""
    return f"{store}: {counts}{report}\n"
