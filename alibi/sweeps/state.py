"""The state of a sweep: its records, each run's progress and results, and the commands for the
rest.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
from collections.abc import Sequence

from etils import epath

from alibi.reporting.recorded import find_rows
from alibi.reporting.rows import Row, frozen
from alibi.runs import RunDirectory, evaluation_hash
from alibi.storage.claims import is_held
from alibi.storage.files import listed, resolve, write_whole
from alibi.sweeps.definition import Evaluation, Run, Sweep

Directory = str | os.PathLike[str]  # a sweep's, on disk or at an address

# The records of a sweep in its work directory.
SWEEP_FILE = "sweep.json"  # the fingerprint of each run by name
FAILURES = "failures"  # NAME.txt: why a run failed, until it succeeds
DONE = "done"  # NAME.txt: the fingerprint of a run whose results are complete
TASKS = "tasks"  # NAME/: the claim of the process that trains or evaluates a run
# Without file locks a run counts as running for this long after its last status.
BELIEVED = datetime.timedelta(minutes=5)


def fingerprint(run: Run) -> str:
    """Returns a hash over the run's config and evaluations, so over its results."""
    content = f"{evaluation_hash(run.config)} {run.config.train.steps} {run.evaluations}"
    overrides = [evaluation.override for evaluation in run.evaluations if evaluation.override]
    content += "".join(evaluation_hash(run.config, each).partition("+")[2] for each in overrides)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def record_sweep(workdir: epath.Path, sweep: Sweep, *, replace: bool) -> None:
    """Records the runs of `sweep`, which all tasks must share.

    Args:
      replace: replace the record of another sweep, unless a process works on its runs.

    Raises:
      ValueError: the record of another sweep stays.
    """
    before, now = recorded_runs(workdir), {run.name: fingerprint(run) for run in sweep.runs}
    if before and list(before.items()) != list(now.items()):
        at_work = [name for name in before if is_held(workdir / TASKS / name)]
        if at_work or not replace:
            names = sorted({name for name, _ in before.items() ^ now.items()})
            raise ValueError(
                f"the runs of the sweep have changed since it began in {workdir} "
                f"({', '.join(names) or 'their order'}); give the sweep and its config as they were, or another "
                f"--workdir" + (f"; at work are tasks on {', '.join(at_work)}" if at_work else "")
            )
    write_whole(
        workdir / SWEEP_FILE, json.dumps({"title": sweep.title, "runs": now}, indent=2) + "\n"
    )


def recorded_runs(workdir: epath.Path) -> dict[str, str]:
    """Returns each run's fingerprint in the recorded sweep, under its name, in order. Empty without a whole
    record.
    """
    try:
        return dict(json.loads((workdir / SWEEP_FILE).read_text())["runs"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return {}


def record_end(workdir: epath.Path, run: Run, failure: str) -> None:
    """Records why `run` failed, or with an empty `failure` that its results are complete."""
    record = workdir / FAILURES / f"{run.name}.txt"
    if failure:
        write_whole(record, failure)
    else:
        record.unlink(missing_ok=True)
        write_whole(workdir / DONE / record.name, fingerprint(run))


def is_complete(workdir: epath.Path, name: str, expected: str) -> bool:
    """Returns whether the run `name` with the fingerprint `expected` has all its results."""
    with contextlib.suppress(FileNotFoundError):
        return (workdir / DONE / f"{name}.txt").read_text() == expected
    return False


def read_failures(workdir: Directory) -> dict[str, str]:
    """Returns why each run failed, under its name."""
    failures = {}
    for path in listed(resolve(workdir) / FAILURES):
        with contextlib.suppress(FileNotFoundError):  # another task's run has succeeded meanwhile
            failures[path.name.removesuffix(".txt")] = path.read_text()
    return failures


@dataclasses.dataclass(frozen=True)
class RunState:
    """A run, as its work directory says.

    Attributes:
      state: missing, running, interrupted, failed, finished, imported (from the hub) or damaged.
        `survey` adds conflict (the directory has another config), `alibi.sweeps.watch` waiting,
        starting, trained (results are missing) and evaluating.
      steps: all updates of the run, 0 if unknown.
      reason: why it failed, is damaged or conflicts.
      tokens_left: tokens until the last update.
      train_nll: nats a token, in the last row of metrics.
      updated: the time of the last status.
    """

    name: str
    state: str
    step: int = 0
    steps: int = 0
    reason: str = ""
    tokens_left: int = 0
    tokens_per_second: float | None = None
    train_nll: float | None = None
    updated: datetime.datetime | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen without a command."""
        return self.state in ("finished", "imported", "failed", "damaged")

    @property
    def seconds_left(self) -> float:
        """The time until the last update, at the run's speed, 0 if unknown."""
        return self.tokens_left / self.tokens_per_second if self.tokens_per_second else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweptRun(RunState):
    """A run of a sweep, with the rows of its results.

    Attributes:
      missing: the evaluations without rows.
      failure: why the sweep last gave it up, or "".
      seconds: the time of measuring the existing results, None if unknown.
    """

    run: Run
    directory: RunDirectory
    missing: tuple[Evaluation, ...]
    failure: str
    seconds: float | None

    @property
    def is_trained(self) -> bool:
        return self.state == "finished"

    @property
    def is_done(self) -> bool:
        """Whether training has ended and all results exist."""
        return self.is_trained and not self.missing

    @property
    def results(self) -> int:
        """The number of existing results."""
        return self.run.results - sum(len(evaluation.cells) for evaluation in self.missing)

    def describe(self) -> str:
        """Returns the state in words, such as done or failed at step 200 of 600, and why."""
        if self.is_done:
            return "done"
        text = self.state
        if self.is_trained:
            text = f"trained, {self.results} of {self.run.results} results"
        elif self.step:
            text += f" at step {self.step:,} of {self.steps:,}"
        why = "" if self.state == "running" else self.reason or self.failure
        return f"{text}: {' '.join(why.split())}" if why else text


def run_directory(workdir: Directory, run: Run) -> RunDirectory:
    """Returns a run's work directory.

    Raises:
      ValueError: an address that Orbax can't write.
    """
    return RunDirectory(f"{os.fspath(workdir)}/runs/{run.name}")


def train_command(run: Run, workdir: Directory) -> list[str]:
    """Returns the script and flags to train `run`, from its last checkpoint on."""
    return ["train.py", *run.config_flags, f"--workdir={run_directory(workdir, run)}"]


def seeds_command(runs: Sequence[Run], workdir: Directory) -> list[str]:
    """Returns the script and flags to train `runs`, which differ in their seed only, in one program."""
    seeds = ",".join(str(run.config.seed) for run in runs)
    workdirs = ",".join(str(run_directory(workdir, run)) for run in runs)
    return ["train.py", *runs[0].config_flags, f"--seeds={seeds}", f"--workdir={workdirs}"]


def evaluation_command(run: Run, evaluation: Evaluation, workdir: Directory) -> list[str]:
    """Returns the script and flags for an evaluation's rows."""
    # If the last checkpoint is damaged, no other replaces it.
    return [
        "eval_extrapolation.py",
        f"--workdirs={run_directory(workdir, run)}",
        f"--evaluation={evaluation.to_json()}",
        f"--output_dir={resolve(workdir)}",
        "--noreport",
        f"--checkpoint={run.config.train.steps}",
    ]


def survey(runs: Sequence[Run], workdir: Directory) -> list[SweptRun]:
    """Returns the state of each of `runs`."""
    rows, failures = find_rows(workdir), read_failures(workdir)
    return [_state_of(run, workdir, rows, failures.get(run.name, "")) for run in runs]


def read_state(workdir: Directory, now: datetime.datetime) -> RunState:
    """Returns the state of the run in a work directory, "interrupted" instead of "running" if its
    process has ended.
    """
    name, updates, batch_tokens = epath.Path(workdir).name, 0, 0
    try:
        directory = RunDirectory(workdir)
        status = directory.status()
        updated = datetime.datetime.fromisoformat(status["updated"]) if "updated" in status else now
        if directory.is_imported():
            status |= {"state": "imported", "steps": 0}
        elif status["state"] == "running":
            held = is_held(directory.path)
            if held is None:  # no file locks
                held = now - updated < BELIEVED
            status["state"] = "running" if held else "interrupted"
        if updates := max(0, status["steps"] - status["step"]):
            batch_tokens = directory.config().train.batch_tokens
    except (ValueError, TypeError) as error:
        return RunState(name, "damaged", reason=str(error))
    return RunState(
        name,
        state=status["state"],
        step=status["step"],
        steps=status["steps"],
        reason=status["reason"],
        tokens_left=updates * batch_tokens,
        tokens_per_second=status.get("tokens_per_second"),
        train_nll=status.get("train_nll"),
        updated=updated if "updated" in status else None,
    )


def _state_of(run: Run, workdir: Directory, rows: Sequence[Row], failure: str) -> SweptRun:
    directory, train = run_directory(workdir, run), run.config.train
    recorded, differing = read_state(directory.path, datetime.datetime.now(datetime.UTC)), {}
    state, step, reason = recorded.state, recorded.step, recorded.reason
    try:
        differing = directory.differing(run.config)
    except ValueError as error:
        state, step, reason = "damaged", 0, str(error)
    # Rows can be complete without a work directory, such as on a machine with only a copy of the
    # rows.
    key = run.name, train.steps if state == "missing" else step
    measured = [
        row
        for row in rows
        if (row.run, row.step) == key
        and row.config_hash == evaluation_hash(run.config, row.override)
    ]
    missing = tuple(
        left for evaluation in run.evaluations if (left := still_missing(evaluation, measured))
    )
    if state == "missing" and not missing:
        state = "finished"
    if differing:
        keys = ", ".join(
            f"{key} ({there!r} there, {here!r} in the sweep)"
            for key, (there, here) in differing.items()
        )
        state, reason = "conflict", f"{directory} holds a run of another config; differing: {keys}"
    elif missing:  # a run with all its results needs no checkpoint
        try:
            directory.check_checkpoints()
            saved = directory.saved_steps()
            if state == "finished" and step not in saved:  # its last checkpoint was lost
                state, step = "interrupted", saved[-1]
        except ValueError as error:
            state, reason = "failed", str(error)
    updates = 0 if state == "finished" else max(0, train.steps - step)
    return SweptRun(
        name=run.name,
        state=state,
        step=step,
        steps=train.steps,
        reason=reason,
        tokens_left=updates * train.batch_tokens,
        tokens_per_second=recorded.tokens_per_second,
        run=run,
        directory=directory,
        missing=missing,
        failure=failure,
        seconds=sum(row.seconds for row in measured if row.seconds is not None) or None,
    )


def still_missing(evaluation: Evaluation, rows: Sequence[Row]) -> Evaluation | None:
    """Returns `evaluation` with the cells that have no row in `rows`, all from the same run, or None if all
    have rows.
    """
    # A limit is final; any other error may be gone when it is tried again.
    done = {
        (row.evaluator, row.evaluator_code, row.split, frozen(row.options), frozen(row.cell))
        for row in rows
        if (row.is_measured or row.limit) and row.override == evaluation.override
    }
    cells = tuple(
        (one, cell)
        for one, cell in evaluation.cells
        if (
            *(one.name(), one.code(), one.row_split),
            *(frozen(one.options), frozen(cell)),
        )
        not in done
    )
    return dataclasses.replace(evaluation, cells=cells) if cells else None
