"""Evaluates trained runs: work directories -> rows, and the report."""

import dataclasses
import os
import traceback
from collections.abc import Callable, Sequence

import jax

from alibi.config.override import Override
from alibi.errors import UserError, print_error
from alibi.evaluation.base import Cell, Evaluator, NoResultError
from alibi.evaluation.output import Output, OutputError, print_once, same_name
from alibi.evaluation.perplexity import Perplexity
from alibi.evaluation.subject import Subject, memory_limits
from alibi.extras import MissingPackageError, needs
from alibi.parallel.hosts import broadcast, check_alike, is_primary
from alibi.reporting.equivalence import Reference
from alibi.runs import RunDirectory, process_facts
from alibi.runs.trained import TrainedRun, check_checkpoint
from alibi.storage.files import resolve

__all__ = ["EvaluationOptions", "OutputError", "evaluate_runs"]


@dataclasses.dataclass(frozen=True)
class LengthOptions:
    """The options that n-grams have too."""

    # or an address: for rows/, results.jsonl, nll/, report.md and figures
    output_dir: str | os.PathLike[str]
    # in tokens, defaults to `multiples` times each run's train_length
    lengths: tuple[int, ...] = ()
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16)
    report: bool = True  # write tables and figures at the end
    reference: Reference | None = None  # the run that the report compares the others with

    def lengths_of(self, train_length: int) -> list[int]:
        """Returns the lengths for a run, ascending, each once."""
        return sorted({*(self.lengths or (train_length * multiple for multiple in self.multiples))})

    def look(self, workdir: str) -> object:
        """Raises ValueError if there is no run in `workdir`. Takes no time."""
        return RunDirectory(workdir).config()


@dataclasses.dataclass(frozen=True)
class EvaluationOptions(LengthOptions):
    """The options of an evaluation.

    Raises:
      ValueError: an impossible value.

    Example:
      >>> options = EvaluationOptions("compared", multiples=(1, 2), evaluators=(Perplexity(), ContextUse()))
      >>> failures = evaluate_runs(["workdirs/alibi", "workdirs/rotary"], options)
    """

    evaluators: tuple[Evaluator, ...] = (Perplexity(),)
    checkpoint: str = "latest"  # latest, best or a step
    # inputs per device and batch, defaults to the run's eval.batch_tokens
    batch_tokens: int | None = None
    # replaces the position method, its options or the window of each run
    override: Override | None = None

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint)
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ValueError(f"batch_tokens={self.batch_tokens} must be at least 1")

    def trained(self, workdir: str) -> TrainedRun:
        """Returns the run in `workdir` at `checkpoint`, with `override`."""
        return TrainedRun(
            workdir, self.checkpoint, batch_tokens=self.batch_tokens, override=self.override
        )

    look = trained  # at the checkpoint and the override too


def evaluate_runs(
    workdirs: Sequence[str | os.PathLike[str]], options: EvaluationOptions
) -> list[str]:
    """Evaluates each work directory, writes each row when it is known, then the report. Returns the
    failures.

    A cell becomes a row with `error`, and is no failure, if the position method does not support it,
    the text is shorter, or memory does not suffice. A text too short for all supported cells is a
    failure. See also `evaluate_each`.
    """
    return evaluate_each(
        workdirs,
        options,
        lambda workdir, output: evaluate_run(Subject(options.trained(workdir), output), options),
    )


def evaluate_each(
    workdirs: Sequence[str | os.PathLike[str]],
    options: LengthOptions,
    evaluate: Callable[[str, Output], None],
) -> list[str]:
    """Calls `evaluate` with each work directory and the common output, then writes the report. Returns
    the failures.

    It looks at all work directories before it evaluates the first. If one can't be evaluated, it
    evaluates the others all the same. It writes no report if the only work directory failed without a
    row.

    Raises:
      ValueError: two work directories have the same name, which identifies rows, or processes
        differ.
      OutputError: the output directory can't be written.
      MissingPackageError: the report needs a package.
    """
    paths = list(dict.fromkeys(str(resolve(workdir)) for workdir in workdirs))
    alike = {
        "workdirs": list(map(str, workdirs)),
        "output_dir": str(options.output_dir),
        "evaluators": list(map(str, getattr(options, "evaluators", ()))),
    }
    check_alike(process_facts(options) | alike)
    named: dict[str, str] = {}
    for path in paths:
        if (other := named.setdefault(os.path.basename(path), path)) != path:
            raise ValueError(same_name(other, path))
    if options.report:
        needs("the report, which --noreport leaves out,", "vl_convert")
    output = Output(options.output_dir)
    failures: dict[str, str] = {}
    rows_before = len(output.rows)
    for work in (options.look, output.check_name, lambda path: evaluate(path, output)):
        for path in [path for path in paths if path not in failures]:
            try:
                work(path)
            except OutputError:
                raise
            except Exception as error:
                if jax.distributed.is_initialized():
                    raise  # the other processes may not have met the error, and would wait for this one
                if not isinstance(error, ValueError | OSError | UserError | MissingPackageError):
                    print_once(traceback.format_exc().rstrip())
                reason = str(error) or type(error).__name__
                failures[path] = reason if path in reason else f"{path}: {reason}"
                if is_primary():
                    print_error(failures[path])
    nothing = len(paths) == len(failures) == 1 and len(output.rows) == rows_before
    shown = options.report and not nothing
    broadcast(lambda: output.finish(report=shown, workdirs=paths, reference=options.reference))
    return list(failures.values())


def evaluate_run(subject: Subject, options: EvaluationOptions) -> None:
    """Measures the cells that a run lacks.

    Raises:
      ValueError: the text is too short for all cells.
    """
    run, config = subject.run, subject.run.config
    lengths = options.lengths_of(config.train_length)
    for evaluator in options.evaluators:
        evaluator.check(config, lengths)
    state, steps = run.directory.status()["state"], config.train.steps
    if options.checkpoint == "latest" and run.step < steps and state not in ("finished", "missing"):
        print_once(f"{run.name}: update {run.step:,} of {steps:,}, its training is {state}")
    limits: list[str | None] = []
    for evaluator in options.evaluators:
        if note := evaluator.note(config):
            print_once(f"{subject.run.name}: {note}")
        cells = evaluator.cells(config, lengths)
        if not cells:
            print_once(f"{subject.run.name}: {evaluator.name()} measures nothing at {lengths}")
        limits += [_evaluate_cell(subject, evaluator, cell) for cell in cells]
    # what the method doesn't have is no failure of the text
    of_text = [limit for limit in limits if limit is not None]
    if of_text and all(of_text):
        raise ValueError(f"no length can be measured: {of_text[0]}")


def _evaluate_cell(subject: Subject, evaluator: Evaluator, cell: Cell) -> str | None:
    """Measures a cell, unless its row is there.

    Returns why the text has no such cell, "" if it has, None if the method has none.
    """
    run, output = subject.run, subject.output
    text, title = evaluator.text(subject, cell), f"{run.title} {evaluator.title(cell)}"
    check_alike({"the text's sha256": text.tokens_sha256})
    row = subject.row(evaluator, text, cell)
    undefined = evaluator.undefined(subject, cell)
    limit = "" if undefined else evaluator.limit(subject, text, cell)
    if undefined or limit:
        row = dataclasses.replace(row, limit=True)
        output.add_error(row, title, undefined or limit)
        return None if undefined else limit
    if broadcast(lambda: output.is_done(row) and evaluator.is_done(subject, row)):
        print_once(f"{title}: done before")
        return ""
    _ = run.params  # a failure to load them is no limit of this measurement
    # another step, if the checkpoint was replaced or is damaged
    row, subject.seconds = dataclasses.replace(row, step=run.step), 0.0
    try:
        with memory_limits(evaluator.title(cell)):
            results = evaluator.measure(subject, text, row)
    except NoResultError as error:
        output.add_error(row, title, str(error))
        return ""
    row = dataclasses.replace(row, results=results, seconds=subject.seconds or None)
    print_once(f"{title}: {evaluator.summary(row)} ({subject.seconds:.1f} s)")
    output.add(row)
    return ""
