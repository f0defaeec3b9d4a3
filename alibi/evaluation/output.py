"""An output directory: rows, NLL dumps, and the report that is made of the rows."""

import os
import pathlib
from collections.abc import Callable

import jax

from alibi.errors import UserError
from alibi.evaluation.dumps import Dump, write_dump
from alibi.reporting.report import ROWS_FILE, write_report
from alibi.reporting.rows import Row, append_rows, latest, read_rows, row_key

# Besides the keys of every row: the hash of the token file that was scored, and that of its text.
TOKENS_KEY = "tokens_sha256"
TEXT_KEY = "text_hash"


class OutputError(UserError):
    """The output directory can't be written."""


class Output:
    """An output directory; of several processes only the first writes.

    Raises:
      OutputError: it can't be made or written; when it is made, and at each writing.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._guard(self._claim)
        self.rows = read_rows(directory / ROWS_FILE)

    def find(self, row: Row) -> list[Row]:
        """The rows that exist of the measurement that `row` is about: same cell, step, config and text."""
        return [
            found for found in self.rows if row_key(found) == row_key(row) and found.get(TOKENS_KEY) == row[TOKENS_KEY]
        ]

    def name_text(self, name: str, split: str, text_hash: str) -> str:
        """What rows call a text: as rows of it do already, else `name`, or a longer one where another text has that.

        A user's own text, of the split "file", is always known by its `name`.
        """
        of_split = [found for found in self.rows if found["split"] == split]
        before = [found["corpus"] for found in of_split if split != "file" and found.get(TEXT_KEY) == text_hash]
        others = (found for found in latest(self.rows) if found["split"] == split)
        taken = {found["corpus"] for found in others if found.get(TEXT_KEY, text_hash) != text_hash}
        free = (one for one in [*before, name] if one not in taken)
        return next(free, f"{name}#{text_hash[:6]}")

    def append(self, row: Row) -> None:
        self._guard(lambda: append_rows(self.directory / ROWS_FILE, [row]))
        self.rows.append(row)

    def dump(self, path: pathlib.Path, dump: Dump) -> None:
        self._guard(lambda: write_dump(path, dump))

    def report(self) -> None:
        self._guard(lambda: print(write_report(self.directory)))

    def _claim(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        probe = self.directory / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()

    def _guard(self, write: Callable[[], object]) -> None:
        if jax.process_index() != 0:
            return
        try:
            write()
        except OSError as error:
            raise OutputError(
                f"output directory {self.directory} can't be written ({error.strerror or error}); "
                "make space or choose another --output_dir; rows written so far are kept"
            ) from error
