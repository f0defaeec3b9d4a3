"""Where a sweep stands: each run's state, which results exist, what failed, and the commands for the rest."""

import contextlib
import csv
import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from alibi.data.books import distances
from alibi.reporting.recorded import find_rows
from alibi.reporting.rows import Row
from alibi.runs import RunDirectory, evaluation_hash
from alibi.storage.claims import is_held
from alibi.storage.files import listed, resolve, write_whole
from alibi.sweeps.definition import Evaluation, Run, Sweep
from alibi.sweeps.launchers import Command

Directory = str | os.PathLike[str]  # of a sweep: a directory or an address
FAILURES = "failures"  # NAME.txt: why a run was last given up, until it succeeds


@dataclasses.dataclass(frozen=True)
class RunState:
    """One run of a sweep as its work directory and the result rows show it."""

    run: Run
    state: str  # missing, running, interrupted, failed, finished, or conflict: a work directory of another config
    step: int
    reason: str
    tokens_per_second: float | None
    directory: RunDirectory
    results: int  # cells that exist
    missing: tuple[Evaluation, ...]  # what is still to be evaluated
    failure: str  # why the sweep last gave it up, if it did
    seconds: float | None  # that the existing results took to measure

    @property
    def is_trained(self) -> bool:
        return self.state == "finished"

    @property
    def tokens_left(self) -> int:
        train = self.run.config.train
        return 0 if self.is_trained else max(0, train.steps - self.step) * train.batch_tokens

    def describe(self) -> str:
        """The state in words: done, at step 200 of 600, missing, or failed and why."""
        cells = f"{self.results} of {self.run.results} results"
        failed = f"failed: {' '.join((self.reason or self.failure).split())}"
        match self.state:
            case "finished" if not self.missing:
                return "done"
            case "finished":
                return f"trained, {cells}" + (f"; {failed}" if self.failure else "")
            case "missing":
                return failed if self.failure else "missing"
            case "failed" | "conflict":
                return failed
            case "running":
                return f"running, {self._progress()}"
            case _:
                return self._progress() + (f"; {failed}" if self.failure else "")

    def _progress(self) -> str:
        return f"at step {self.step:,} of {self.run.config.train.steps:,}"


def run_directory(workdir: Directory, run: Run) -> RunDirectory:
    """Where a run lies; ValueError where that is an address that can't hold checkpoints."""
    return RunDirectory(f"{os.fspath(workdir)}/runs/{run.name}")


def train_command(run: Run, workdir: Directory) -> Command:
    """What trains `run`, from where it stands."""
    return Command("train.py", (*run.config_flags(), f"--workdir={run_directory(workdir, run)}"))


def evaluation_command(run: Run, evaluation: Evaluation, workdir: Directory) -> Command:
    """What makes the rows of `evaluation`, of a trained run."""
    flags = [f"--workdirs={run_directory(workdir, run)}", f"--lengths={','.join(map(str, evaluation.lengths))}"]
    if evaluation.stride is not None:
        flags.append(f"--stride={evaluation.stride}")
    if evaluation.context_use:
        flags.append("--context_use")
    if override := evaluation.override:
        if override.position is not None:
            flags.append(f"--position={override.position}")
        if override.options:
            told = io.StringIO()  # absl reads lists as a line of CSV, so that a tuple's commas are quoted
            csv.writer(told, lineterminator="").writerow(f"{name}={one}" for name, one in override.options)
            flags.append(f"--position_options={told.getvalue()}")
        flags += [f"--{key}={value}" for key, value in override.model.items()]
    flags += [] if evaluation.passkey else [f"--split={evaluation.split}"]
    flags += [f"--output_dir={resolve(workdir)}", "--noreport"]
    flags.append(f"--checkpoint={run.config.train.steps}")  # where it is damaged, no other stands in for it
    return Command("scripts/passkey.py" if evaluation.passkey else "eval_extrapolation.py", tuple(flags))


def survey(sweep: Sweep, workdir: Directory) -> list[RunState]:
    """The state of every run."""
    rows, failures = find_rows(workdir), read_failures(workdir)
    return [_state_of(run, run_directory(workdir, run), rows, failures.get(run.name, "")) for run in sweep.runs]


def _state_of(run: Run, directory: RunDirectory, rows: Sequence[Row], failure: str) -> RunState:
    # A run that fails before its first update has no speed to record.
    status: dict[str, Any] = {"state": "failed", "step": 0, "reason": "", "tokens_per_second": None}
    differing: dict[str, tuple[Any, Any]] = {}
    try:
        status |= directory.status()
        differing = directory.differing(run.config)
    except ValueError as error:
        status |= {"state": "failed", "reason": str(error)}
    # Where there is no work directory, such as on a machine that was given the rows alone, they can still be complete.
    step = run.config.train.steps if status["state"] == "missing" else status["step"]
    key = (run.name, step, evaluation_hash(run.config))
    missing = missing_of(run.evaluations, rows, key)
    if status["state"] == "missing" and not missing:
        status |= {"state": "finished", "step": step}
    if differing:
        told = ", ".join(f"{key} ({there!r} there, {here!r} in the sweep)" for key, (there, here) in differing.items())
        status |= {"state": "conflict", "reason": f"{directory} holds a run of another config; differing: {told}"}
    elif status["state"] == "running" and not is_held(directory.path):  # its process was killed
        status["state"] = "interrupted"
    if missing and not differing:  # a run that has all its results needs no checkpoint
        status |= _lost(directory, status)
    seconds = [row.seconds for row in rows if _key(row) == key and row.seconds is not None]
    return RunState(
        run=run,
        state=status["state"],
        step=status["step"],
        reason=status["reason"],
        tokens_per_second=status["tokens_per_second"],
        directory=directory,
        results=run.results - sum(len(one.lengths) for one in missing),
        missing=missing,
        failure=failure,
        seconds=sum(seconds) if seconds else None,
    )


def _lost(directory: RunDirectory, status: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from a run's status where checkpoints were lost: it has failed, or is back at an earlier step."""
    try:
        directory.check_checkpoints()
    except ValueError as error:
        return {"state": "failed", "reason": str(error)}
    saved = directory.saved_steps()
    if status["state"] != "finished" or status["step"] in saved:
        return {}
    return {"state": "interrupted", "step": saved[-1]}


def missing_of(
    evaluations: Sequence[Evaluation], rows: Sequence[Row], key: tuple[str, int, str]
) -> tuple[Evaluation, ...]:
    """What of `evaluations` there are no rows of, for the run whose name, step and `evaluation_hash` are `key`."""
    found = [row for row in rows if _key(row) == key]
    return tuple(left for one in evaluations if (left := _still_missing(one, found)))


def _key(row: Row) -> tuple[str, int, str | None]:
    return row.run, row.step, row.config_hash


def _still_missing(evaluation: Evaluation, rows: Sequence[Row]) -> Evaluation | None:
    """The part of `evaluation` that `rows`, all of this run at its step, do not have."""
    # A limit is final; any other error may be gone when it is tried again.
    known = [row for row in rows if (row.is_measured or row.limit) and row.override == evaluation.override]
    known = [row for row in known if row.split == evaluation.split]
    if evaluation.passkey:
        keys = {(row.eval_length, row.passkey.distance) for row in known if row.passkey is not None}
        asked = {length: {(length, distance) for distance in distances(length)} for length in evaluation.lengths}
        lengths = [length for length in evaluation.lengths if not asked[length] <= keys]
        return dataclasses.replace(evaluation, lengths=tuple(lengths)) if lengths else None
    windows = {(row.eval_length, row.stride) for row in known if row.context_use is None and row.passkey is None}
    lengths = [length for length in evaluation.lengths if (length, evaluation.stride or length) not in windows]
    if evaluation.context_use:
        scored = {row.eval_length for row in known if row.is_measured and row.context_use is None}
        measured = scored & {*evaluation.lengths}
        shortest, longest = min(measured, default=0), max(measured, default=0)
        uses = [(row.eval_length, row.context_use) for row in known if row.context_use]
        gains = {at for at, use in uses if use.from_length == shortest and use.longest == longest}
        if lengths or (len(measured) > 1 and not measured <= gains):
            # All: gains are counted from the shortest, and by the longest it is known which tokens to score.
            lengths = list(evaluation.lengths)
    return dataclasses.replace(evaluation, lengths=tuple(lengths)) if lengths else None


def read_failures(workdir: Directory) -> dict[str, str]:
    """Returns the reason for which each run was given up, by the run's name."""
    failures = {}
    for file in listed(resolve(workdir) / FAILURES):
        with contextlib.suppress(FileNotFoundError):  # another task's run has succeeded meanwhile
            failures[file.name.removesuffix(".txt")] = file.read_text()
    return failures


def write_failure(workdir: Directory, run: str, reason: str) -> None:
    """Writes the reason for which `run` failed to a file of its own; an empty `reason` removes the file."""
    file = resolve(workdir) / FAILURES / f"{run}.txt"
    if reason:
        write_whole(file, reason)
    else:
        file.unlink(missing_ok=True)
