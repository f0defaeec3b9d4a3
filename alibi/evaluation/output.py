"""The output directory of evaluations: rows and the report."""

import contextlib
import dataclasses
import datetime
import os
import shlex
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from alibi import progress
from alibi.config import flatten
from alibi.errors import UserError, cause
from alibi.parallel.hosts import is_primary
from alibi.reporting.equivalence import Reference
from alibi.reporting.recorded import WORKDIR_FILE, find_rows, merge_rows, record_row, run_folder
from alibi.reporting.report import RunSource, write_report
from alibi.reporting.rows import Row, latest
from alibi.runs import RunDirectory, git_commit, processor
from alibi.storage.files import check_writable, resolve

Written = TypeVar("Written")


class OutputError(UserError):
    """The output directory can't be written."""


class Output:
    """The rows and the report in an output directory or at an address, and the files that evaluators
    write. Only the first process writes.

    Raises:
      OutputError: it can't be made or written, now or later.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.folder = resolve(directory)
        self.guard(lambda: check_writable(self.folder))
        self.rows = find_rows(self.folder)
        self._workdirs: dict[str, str] = {}  # by the name of the run

    def check_name(self, workdir: str) -> None:
        """Raises ValueError if rows here belong to another run with the name of `workdir`, and that run's
        work directory still exists.
        """
        run = RunDirectory(workdir)
        self._workdirs[run.name] = workdir
        file = run_folder(self.folder, run.name) / WORKDIR_FILE
        other = file.read_text() if file.exists() else workdir
        if other != workdir and RunDirectory(other).differing(run.config()):
            raise ValueError(same_name(other, workdir))

    def find(self, row: Row) -> list[Row]:
        """Returns the existing rows of the same measurement: same cell, step, config and text."""
        return [other for other in self.rows if other.measurement == row.measurement]

    def is_done(self, row: Row) -> bool:
        """Returns whether the measurement of `row` has a result."""
        return any(other.is_measured for other in self.find(row))

    def name_text(self, name: str, split: str, text_hash: str) -> str:
        """Returns a text's name in rows: the name in existing rows, else `name`, longer if another text has
        it.

        A user's own text, split "file", has `name`, too, with a hash if another text has it: texts with
        the same tokens and other documents differ by this alone. Characters that can't be drawn become
        U+FFFD.
        """
        name = "".join(one if one.isprintable() and one != "\\" else "\ufffd" for one in name)
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
        self.guard(lambda: record_row(self.folder, row, self._workdirs.get(row.run)))
        self.rows.append(row)

    def add_error(self, row: Row, title: str, error: str) -> None:
        """Prints why the measurement `title` has no result, and writes its row."""
        print_once(f"{title}: {error}")
        self.add(dataclasses.replace(row, error=error))

    def finish(
        self, *, report: bool, workdirs: Sequence[str], reference: Reference | None = None
    ) -> None:
        """Writes results.jsonl. With `report` also writes and prints the report, which describes `workdirs`
        and compares them with `reference`.
        """
        if not report:
            self.guard(lambda: merge_rows(self.folder))
            return
        sources = _run_sources(workdirs)
        if text := self.guard(lambda: write_report(self.folder, runs=sources, reference=reference)):
            print(text)  # outside of the guard: a closed pipe is no failure of the directory

    def guard(self, write: Callable[[], Written]) -> Written | None:
        """Calls `write` on the first process, and returns its result.

        Raises:
          OutputError: the disk refuses.
        """
        if not is_primary():
            return None
        try:
            return write()
        except OSError as error:
            raise OutputError(
                f"output directory {self.folder} can't be written ({cause(error)}); "
                "make space or choose another --output_dir; rows written so far are kept"
            ) from error


def same_name(first: str, second: str) -> str:
    """Returns the error for two runs with one name."""
    return (
        f"{first} and {second} have the same name, and rows are known by it; rename one, or evaluate them into two "
        "output directories"
    )


def _run_sources(workdirs: Sequence[str]) -> list[RunSource]:
    """Returns config and command of each run for the report, without runs that can't be read."""
    sources = []
    for directory in map(RunDirectory, workdirs):
        with contextlib.suppress(ValueError):
            config, words = flatten(directory.config()), directory.provenance().get("command", [])
            command = f"python {shlex.join(words)}" if words else ""
            sources.append(RunSource(directory.name, config, command, directory.path))
    return sources


def print_once(message: str) -> None:
    """Prints a line to stderr on the first process."""
    if is_primary():
        progress.print_line(message)


def made_here() -> dict[str, Any]:
    """Returns the fields of a row that tell when, where and with which code it is made."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "processor": processor(),
        "commit": git_commit(),
    }
