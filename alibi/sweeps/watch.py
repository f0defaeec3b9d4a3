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
from alibi.sweeps.state import TASKS, is_done, read_failures, recorded_runs

# Without file locks a run counts as running for this long after its last status.
BELIEVED = datetime.timedelta(minutes=5)
SUBMITTED_FILE = "submitted.json"  # of a single training, submitted to a cluster


@dataclasses.dataclass(frozen=True)
class Standing:
    """The state of a run; None for unknown values.

    Attributes:
      state: waiting, starting, running, trained (results are missing), evaluating, interrupted,
        failed, finished or damaged.
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
        return self.state in ("finished", "failed", "damaged")


def standings(workdir: epath.Path, now: datetime.datetime) -> list[Standing]:
    """Returns the state of the run in `workdir`, or of each run of the sweep in it, waiting runs
    included.

    Raises:
      ValueError: there is neither a run nor a sweep.
    """
    expected = recorded_runs(workdir)
    names = [
        *expected,
        *(path.name for path in listed(workdir / "runs") if path.name not in expected),
    ]
    if not names:
        if not any(
            (workdir / name).exists() for name in ("config.json", "status.json", SUBMITTED_FILE)
        ):
            raise ValueError(
                f"{workdir} holds no run and no sweep; give the --workdir of train.py, sweep.py or submit.py"
            )
        return [_standing(workdir, evaluated=False, complete=None, failure="", now=now)]
    failures = read_failures(workdir)

    def standing(name: str) -> Standing:
        complete = is_done(workdir, name, expected[name]) if name in expected else None
        evaluated, failure = is_held(workdir / TASKS / name) is True, failures.get(name, "")
        return _standing(
            workdir / "runs" / name,
            evaluated=evaluated,
            complete=complete,
            failure=failure,
            now=now,
        )

    # at an address each request takes its time
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(standing, names))


def _standing(
    place: epath.Path,
    *,
    evaluated: bool,
    complete: bool | None,
    failure: str,
    now: datetime.datetime,
) -> Standing:
    """Returns the state of a run; `complete`: whether all results exist, None: no sweep knows the
    run.
    """
    directory, held = RunDirectory(place), is_held(place)
    try:
        status = directory.status()
        state, rate = status["state"], status.get("tokens_per_second")
        sign = datetime.datetime.fromisoformat(status["updated"]) if "updated" in status else None
        left = (
            (status["steps"] - status["step"]) * directory.config().train.batch_tokens
            if rate
            else 0
        )
    except (ValueError, TypeError) as error:
        return Standing(place.name, "damaged", reason=str(error))
    if state == "running":
        unknown = held is None and sign is not None and now - sign < BELIEVED
        state = "running" if held or unknown else "interrupted"
    # its rows were copied from another machine
    elif state == "finished" or (state == "missing" and complete):
        state = (
            "evaluating"
            if evaluated
            else "failed"
            if failure
            else "trained"
            if complete is False
            else "finished"
        )
    elif held or evaluated:
        state = "starting"
    elif failure:
        state = "failed"
    elif state == "missing":
        state = "waiting"
    return Standing(
        name=place.name,
        state=state,
        step=status["step"],
        steps=status["steps"] or None,
        train_nll=status.get("train_nll"),
        tokens_per_second=rate,
        seconds_left=left / rate if rate else None,
        sign=sign,
        reason=status["reason"] or failure if state in ("failed", "interrupted") else "",
    )


def table(standing: Sequence[Standing], now: datetime.datetime) -> str:
    """Returns a line for each run and for each reason of a failure."""
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
                ""
                if one.sign is None
                else f"{format_duration(max(0.0, (now - one.sign).total_seconds()))} ago",
            ]
        )
    reasons = [f"{one.name}: {' '.join(one.reason.split())}\n" for one in standing if one.reason]
    return aligned(lines, left=(0, 1)) + "".join(reasons)


def summary(workdir: epath.Path, standing: Sequence[Standing]) -> str:
    """Returns the number of runs in each state, and where the report lies, if there is one."""
    states = [one.state for one in standing]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    report = f"; report: {workdir}/{REPORT_FILE}" if (workdir / REPORT_FILE).exists() else ""
    return f"{workdir}: {counts}{report}\n"
