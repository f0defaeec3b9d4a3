"""Where a sweep stands: each run's state, which results exist, and how long the rest will take."""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from alibi.flops import CPU_FLOPS_PER_SECOND, training_flops
from alibi.reporting.rows import CONFIG_KEY, LIMIT_KEY, Row, is_measured, read_rows
from alibi.runs import RunDirectory, evaluation_hash
from alibi.sweeps.children import is_on_cpu
from alibi.sweeps.definition import Evaluation, Run, Sweep
from alibi.sweeps.failures import read_failures

# Of one process, training or evaluation: imports and compilation, before the first token.
START_SECONDS = 15.0


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
        cells = f"{self.results} of {sum(len(one.lengths) for one in self.run.evaluations)} results"
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


def run_directory(workdir: pathlib.Path, run: Run) -> RunDirectory:
    return RunDirectory(workdir / "runs" / run.name)


def survey(sweep: Sweep, workdir: pathlib.Path, *, in_progress: bool = False) -> list[RunState]:
    """The state of every run; `in_progress`: another process is at work, so "running" is to be believed."""
    rows = read_rows(workdir / "results.jsonl")
    return [state_of(run, workdir, rows, in_progress=in_progress) for run in sweep.runs]


def state_of(run: Run, workdir: pathlib.Path, rows: Sequence[Row], *, in_progress: bool = False) -> RunState:
    """The state of one run; `rows` are those of results.jsonl."""
    directory = run_directory(workdir, run)
    # A run that fails before its first update has no speed to record.
    status: dict[str, Any] = {"state": "failed", "step": 0, "reason": "", "tokens_per_second": None}
    try:
        status |= directory.status()
        differing = [
            f"{key} ({there!r} there, {here!r} in the sweep)"
            for key, (there, here) in directory.differing(run.config).items()
        ]
    except ValueError as error:
        status |= {"state": "failed", "reason": str(error)}
        differing = []
    key = (run.name, status["step"], evaluation_hash(run.config))
    found = [row for row in rows if (row["run"], row["step"], row.get(CONFIG_KEY)) == key]
    missing = tuple(left for one in run.evaluations if (left := _still_missing(one, found)))
    if differing:
        reason = f"{directory.path} holds a run of another config; differing: {', '.join(differing)}"
        status |= {"state": "conflict", "reason": reason}
    elif status["state"] == "running" and not in_progress:
        status["state"] = "interrupted"
    if missing and not differing:  # a run that has all its results needs no checkpoint
        status |= _lost(directory)
    seconds = [row["seconds"] for row in found if row["seconds"] is not None]
    return RunState(
        run=run,
        state=status["state"],
        step=status["step"],
        reason=status["reason"],
        tokens_per_second=status["tokens_per_second"],
        directory=directory,
        results=sum(len(one.lengths) for one in run.evaluations) - sum(len(one.lengths) for one in missing),
        missing=missing,
        failure=read_failures(workdir).get(run.name, ""),
        seconds=sum(seconds) if seconds else None,
    )


def _lost(directory: RunDirectory) -> dict[str, Any]:
    """What differs from a run's status where checkpoints were lost: it has failed, or is back at an earlier step."""
    try:
        directory.check_checkpoints()
        if directory.status()["state"] != "finished" or directory.is_finished():
            return {}
    except ValueError as error:
        return {"state": "failed", "reason": str(error)}
    return {"state": "interrupted", "step": directory.saved_steps()[-1]}


@dataclasses.dataclass(frozen=True)
class Speed:
    """What the finished runs of a sweep took; None where none has shown it."""

    tokens_per_second: float | None
    evaluation_seconds: float | None  # of all of a run's results

    @classmethod
    def of(cls, states: Sequence[RunState]) -> "Speed":
        rates = [state.tokens_per_second for state in states if state.tokens_per_second]
        evaluations = [state.seconds for state in states if state.seconds and not state.missing]
        return cls(*(statistics.median(values) if values else None for values in (rates, evaluations)))

    def seconds_left(self, states: Sequence[RunState], jobs: int = 1, *, rough: bool = False) -> float | None:
        """An estimate for what is left of `states`, `jobs` at a time; None where the speed is not known.

        `rough`: a run whose speed is not known trains at `CPU_FLOPS_PER_SECOND`.
        """
        training = [state for state in states if not state.is_trained]
        rates = [self.tokens_per_second or (rough_rate(state) if rough else None) for state in training]
        if None in rates:
            return None
        seconds = sum(
            START_SECONDS + state.tokens_left / rate for state, rate in zip(training, rates, strict=True) if rate
        )
        evaluating = sum(bool(state.missing) for state in states)
        seconds += evaluating * (START_SECONDS + (self.evaluation_seconds or 0.0))
        left = sum(not state.is_trained or bool(state.missing) for state in states)
        return seconds / max(1, min(jobs, left))


def rough_rate(state: RunState) -> float | None:
    """Tokens a second of its training on CPUs, from the operations of a token; None while the vocabulary is unknown."""
    vocab_size = _vocab_size(state.run)
    return CPU_FLOPS_PER_SECOND / training_flops(state.run.config, vocab_size) if vocab_size else None


def format_duration(seconds: float | None) -> str:
    """45 s, 12 min, 3.5 h; "unknown" for None."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plan_table(states: Sequence[RunState], jobs: int = 1) -> str:
    """What --dry_run prints: each run's parameters, tokens to train on, estimated time left and state."""
    speed = Speed.of(states)
    # Accelerators differ a thousandfold.
    rough = speed.tokens_per_second is None and is_on_cpu()
    lines = [["run", "parameters", "tokens", "time left", "state"]]
    for state in states:
        train = state.run.config.train
        count = _parameters(state.directory, state.run)
        parameters = f"{count:,}" if count else "not known yet"
        seconds = speed.seconds_left([state], rough=rough)
        time = ("~" if rough and seconds else "") + format_duration(seconds)
        lines.append([state.run.name, parameters, f"{train.steps * train.batch_tokens:,}", time, state.describe()])
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    text = "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, 4)), line[4]])
        for line in lines
    )
    return f"{text}\n\ntime left in all: {_total(speed.seconds_left(states, jobs, rough=rough), rough)}\n"


def _total(seconds: float | None, rough: bool) -> str:
    if seconds is None:
        return "unknown until one run has shown the speed"
    if not rough:
        return f"about {format_duration(seconds)}"
    rate = f"{CPU_FLOPS_PER_SECOND / 1e9:.0f} GFLOP/s a run"
    return f"~{format_duration(seconds)} (~: rough, training at {rate}, until one run has shown the speed)"


def _still_missing(evaluation: Evaluation, rows: Sequence[Row]) -> Evaluation | None:
    """The part of `evaluation` that `rows`, all of this run at its step, do not have."""
    known = {
        (row["eval_length"], row["stride"], row["split"])
        for row in rows
        # A limit is final; any other error may be gone when it is tried again.
        if is_measured(row) or row.get(LIMIT_KEY)
    }
    lengths = tuple(
        length for length in evaluation.lengths if (length, evaluation.stride or length, evaluation.split) not in known
    )
    return dataclasses.replace(evaluation, lengths=lengths) if lengths else None


def _parameters(directory: RunDirectory, run: Run) -> int | None:
    """As the run recorded them, else counted without allocating; None while the vocabulary is not known."""
    try:
        return directory.provenance()["parameters"]
    except (ValueError, KeyError):
        vocab_size = _vocab_size(run)
    if vocab_size is None:
        return None
    from alibi.model import build_model, count_parameters

    return count_parameters(build_model(run.config, vocab_size))


def _vocab_size(run: Run) -> int | None:
    """As far as the config alone tells."""
    data = run.config.data
    if data.tokenizer == "bytes":
        return 256
    return data.bpe_vocab_size if data.tokenizer == "bpe" and not data.tokenizer_file else None
