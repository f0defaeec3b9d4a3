"""The output directory of evaluations: rows, NLL dumps and the report."""

import dataclasses
import os
import shlex
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from alibi import progress
from alibi.config import flatten
from alibi.errors import UserError
from alibi.evaluation.dumps import Dump, find_name, read_scoring, write_dump
from alibi.evaluation.windows import Windows
from alibi.parallel.hosts import gather, is_primary
from alibi.reporting.recorded import find_rows, merge_rows, record_row
from alibi.reporting.report import RunSource, write_report
from alibi.reporting.rows import Device, Documents, Row, Scoring, latest
from alibi.runs import RunDirectory, evaluation_hash, git_commit
from alibi.runs.trained import TrainedRun
from alibi.storage.files import check_writable, resolve

Found = TypeVar("Found")

ALIKE_SECONDS = 60  # if one process runs out of memory, all must do so within this time


class OutputError(UserError):
    """The output directory can't be written."""


class Output:
    """The rows, NLL dumps and report in an output directory or at an address; only the first
    process writes.

    Raises:
      OutputError: it can't be made or written, now or later.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.folder = resolve(directory)
        self._guard(lambda: check_writable(self.folder))
        self.rows = find_rows(self.folder)

    def find(self, row: Row) -> list[Row]:
        """Returns the existing rows of the same measurement: same cell, step, config and text."""
        return [found for found in self.rows if found.measurement == row.measurement]

    def name_text(self, name: str, split: str, text_hash: str) -> str:
        """Returns the name of a text in rows: that of existing rows, else `name`, longer if another
        text has it.

        A user's own text, of the split "file", is always called `name`.
        """
        before = [
            row.corpus
            for row in self.rows
            if row.split == split != "file" and row.text_hash == text_hash
        ]
        others = (row for row in latest(self.rows) if row.split == split)
        taken = {row.corpus for row in others if row.text_hash not in (None, text_hash)}
        free = (candidate for candidate in [*before, name] if candidate not in taken)
        return next(free, f"{name}#{text_hash[:6]}")

    def add(self, row: Row) -> None:
        """Writes a row, unless the same measurement has a result already, or the same error."""
        if any(
            old.is_measured if row.is_measured else old.error == row.error for old in self.find(row)
        ):
            return
        self._guard(lambda: record_row(self.folder, row))
        self.rows.append(row)

    def add_error(self, row: Row, title: str, error: str) -> None:
        """Prints why the measurement `title` has no result, and writes its row."""
        print_once(f"{title}: {error}")
        self.add(dataclasses.replace(row, error=error))

    def try_score(self, row: Row, title: str, score: Callable[[], Found]) -> Found | None:
        """Returns the result of `score`; None if memory does not suffice, which becomes a row."""
        try:
            return score()
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            try:
                gather(None, seconds=ALIKE_SECONDS)
            # this process fails alone: the others wait for it in the computation
            except jax.errors.JaxRuntimeError:
                raise error from None
            message = (
                f"out of memory at {row.eval_length} tokens; try fewer batch_tokens or more devices"
            )
            self.add_error(row, title, message)
            return None

    def write_dump(self, dump: Dump) -> None:
        """Writes an NLL dump."""
        self._guard(lambda: write_dump(find_name(self.folder, dump.of), dump))

    def has_dump(self, scoring: Scoring) -> bool:
        """Returns whether there is a whole dump of `scoring`."""
        return read_scoring(find_name(self.folder, scoring)) == scoring

    def finish(self, *, report: bool, workdirs: Sequence[str] = ()) -> None:
        """Writes results.jsonl; with `report` also writes and prints the report, which describes
        the `workdirs`.
        """
        shown: list[str] = []

        def write() -> None:
            runs = [source for workdir in workdirs if (source := _run_source(workdir))]
            shown.append(write_report(self.folder, runs=runs))

        self._guard(write if report else lambda: merge_rows(self.folder))
        for text in shown:  # outside of the guard: a closed pipe is no failure of the directory
            print(text)

    def _guard(self, write: Callable[[], object]) -> None:
        """Calls `write` on the first process; raises OutputError if it fails."""
        if not is_primary():
            return
        try:
            write()
        except OSError as error:
            raise OutputError(
                f"output directory {self.folder} can't be written ({error.strerror or error}); "
                "make space or choose another --output_dir; rows written so far are kept"
            ) from error


def _run_source(workdir: str) -> RunSource | None:
    """Returns the config and command of the run in `workdir` for the report; None if they can't be
    read.
    """
    directory = RunDirectory(workdir)
    try:
        config, words = flatten(directory.config()), directory.provenance().get("command", [])
    except ValueError:
        return None
    return RunSource(
        directory.name, config, f"python {shlex.join(words)}" if words else "", directory.path
    )


def print_once(message: str) -> None:
    """Prints a line to stderr on the first process."""
    if is_primary():
        progress.print_line(message)


def row_of(
    run: TrainedRun, *, windows: Windows, corpus: str, split: str, tokens_sha256: str | None
) -> Row:
    """Returns the row of `run` in these windows of a text, without results."""
    config = run.config
    return Row(
        run=run.name,
        position=config.position,
        train_length=config.train_length,
        eval_length=windows.length,
        mode=windows.mode,
        stride=windows.stride,
        corpus=corpus,
        split=split,
        seed=config.seed,
        step=run.step,
        parameters=run.num_parameters,
        device=Device(jax.devices()[0].device_kind, jax.device_count()),
        commit=git_commit(),
        dtype=config.eval.dtype,
        config_hash=evaluation_hash(config),
        tokens_sha256=tokens_sha256,
        override=run.override,
        documents=Documents(positions) if (positions := config.data.isolate_documents) else None,
    )
