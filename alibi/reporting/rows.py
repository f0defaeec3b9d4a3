"""Rows: a measurement each, and a line in results.jsonl. Later rows replace earlier rows."""

import dataclasses
import functools
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from etils import epath

from alibi.config.fields import without_lists
from alibi.config.override import Override

OLDER = "a row is of an older version, without an evaluator; evaluate again into another directory"
Heading = str | int  # a table's row or column: a text, or a length in tokens


class OlderRowError(ValueError):
    """A row that an older version wrote."""


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning once in a process, which may read a damaged file several times."""
    logging.getLogger(__name__).warning(message)


@dataclasses.dataclass(frozen=True)
class Device:
    """An evaluation's devices: their kind and number."""

    kind: str
    count: int


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement of a run: the run, the text, the evaluator with its cell, and the results.

    Example:
      >>> row = next(row for row in read_rows("results.jsonl") if row.position == "alibi")
      >>> row.evaluator, row.cell, row.results["perplexity"]
      ('perplexity', {'length': 128}, 6.64)
    """

    run: str  # the name of its work directory
    position: str
    train_length: int  # 0 for an n-gram, which has neither train length nor updates
    seed: int
    step: int  # updates of the checkpoint
    parameters: int
    corpus: str
    split: str
    evaluator: str  # its name in `alibi.reporting.measure.EVALUATORS`, or package.module:Class
    cell: Mapping[str, Any]  # the place in the evaluator's table, such as {"length": 512}
    # the evaluator's, which change its results and differ from their defaults
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # by name, in the evaluator's units; empty without a result
    results: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float | None = None  # to measure, without compilation
    device: Device | None = None
    # UTC, such as 2026-11-27T09:30:00Z, before scoring; here and below None if not recorded
    date: str | None = None
    processor: str | None = None  # the model name of the host's CPU
    jax: str | None = None  # the version
    commit: str | None = None
    dtype: str | None = None  # in the evaluation
    # over the run's and the evaluation's config keys, and a position method's files that are not
    # the library's: a run's name may be used again
    config_hash: str | None = None
    seedless_hash: str | None = None  # the same with seed=0
    # the token file, of longppl with the run that chose its tokens: tells texts apart
    tokens_sha256: str | None = None
    text_hash: str | None = None  # the text, in any tokens
    # over the train tokens if they are text files: `config_hash` does not tell their content
    trained_on: str | None = None
    override: Override | None = None  # defaults to none: evaluated as trained, with `position`
    unknown_tokens: int | None = None  # in the text, outside the tokenizer's vocabulary
    # Packed documents don't see each other; positions count from each one's start ("restart") or
    # "through" a window. By default a token sees all documents in its window.
    documents: str | None = None
    # keys of the config's section, of a run that doesn't predict the next token
    objective: Mapping[str, Any] | None = None
    # the values, at the checkpoint, of the config's keys that change over updates
    over_updates: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evaluator_code: str | None = None  # the hash of an evaluator from outside the package
    limit: bool = False  # the error is final: the method or the text has no such cell
    error: str | None = None  # why there is no result

    @property
    def length(self) -> int | None:
        """The evaluation length in tokens, if the cell has one."""
        return self.cell.get("length")

    @property
    def place(self) -> tuple:
        """The identity of the cell: a run has a single value in each, from its last row."""
        return (
            *(self.run, self.corpus, self.split, self.evaluator, frozen(self.options)),
            *(frozen(self.cell), str(self.override or "")),
        )

    @property
    def measurement(self) -> tuple:
        """The cell, checkpoint, texts and config: rows with equal ones repeat the same measurement."""
        checkpoint = self.step, self.tokens_sha256, self.config_hash, self.trained_on
        return self.place, checkpoint, self.evaluator_code

    @property
    def is_trained(self) -> bool:
        """Whether the row is for a model trained with updates, not for an n-gram."""
        return self.train_length > 0

    @property
    def is_measured(self) -> bool:
        """Whether the row holds a result, not an error."""
        return bool(self.results) and not self.error

    @property
    def series(self) -> str:
        """The run's name without its seed, alibi-L128 for alibi-L128-seed0, and then its
        override.
        """
        seed = f"seed=?{self.seed}"
        name = re.sub(rf"^{seed}[-_.]|[-_.]{seed}(?!\d)", "", self.run) or self.run
        return name if self.override is None else f"{name} {self.override}"

    @property
    def training(self) -> tuple[str, str | None]:
        """The config's hash, without a tested method's code, and the train text's."""
        return (self.config_hash or "").partition("+")[0], self.trained_on

    @property
    def tested(self) -> tuple[str, int, str]:
        """The identity of a checkpoint as it is tested: run, step and override."""
        return self.run, self.step, str(self.override or "")

    @property
    def but_seed(self) -> tuple:
        """Config, train text, step and override: equal if runs differ in their seed only.

        Rows without the hash of the config without its seed have the name without it, position,
        train length and parameters.
        """
        named = (self.series, self.position, self.train_length, self.parameters)
        return (self.seedless_hash or named, self.trained_on), *self.tested[1:]

    @property
    def short_commit(self) -> str:
        """Twelve digits of the commit, and "-dirty" if files differed from it."""
        commit, dirty, _ = (self.commit or "").partition("-dirty")
        return commit[:12] + dirty

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Row":
        """Returns the row with a line's content.

        Raises:
          TypeError: a key is missing or unknown.
          OlderRowError: an older version wrote it.
        """
        if "evaluator" not in content and "mode" in content:
            raise OlderRowError(OLDER)
        values = without_lists(content)
        if values.get("device") is not None:
            values["device"] = Device(**values["device"])
        if values.get("override") is not None:
            values["override"] = Override.from_json(values["override"])
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Returns the content for the row's line, without keys that have no value."""
        line = dataclasses.asdict(self)
        if self.override is not None:
            line["override"] = self.override.to_json()
        return {
            key: value
            for key, value in line.items()
            if value is not None and value is not False and value != {}
        }


class Entry(NamedTuple):
    """The piece of a row that stands in one cell of its evaluator's table."""

    row: Row
    labels: tuple[Heading, ...]  # name its line, besides the run's name
    column: Heading
    results: Mapping[str, Any]  # in this cell, empty without a result


def frozen(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns `values` as pairs in the order of their names, to compare and to hash."""
    return tuple(sorted(values.items()))


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Returns the rows in a file with JSON lines, in their order, or none if there is no such file.

    A damaged line is left out, and a logged warning names it: its measurement will be repeated.

    Raises:
      ValueError: an older version wrote the rows.
    """
    file, rows = epath.Path(path), []
    lines = file.read_bytes().split(b"\n") if file.exists() else []
    for line_number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(Row.from_json(json.loads(line)))
            except OlderRowError:
                raise OlderRowError(f"{file}: {OLDER}") from None
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                warn_once(
                    f"{file} line {line_number} is no whole row and was left out; "
                    "a killed process may have cut it"
                )
    return rows


def latest(rows: Iterable[Row]) -> list[Row]:
    """Returns a row per cell, in order of first appearance: the last measured row, else the last error.

    If runs with the same name have different configs or train texts, or different code of a position
    method tests them, only the last one's rows count, so they never mix.
    """
    rows = list(rows)
    trained = {row.run: row.training for row in rows}
    tested = {row.tested[::2]: row.config_hash for row in rows}
    cells: dict[tuple, Row] = {}
    for row in rows:
        before = cells.get(row.place)
        if (row.training, row.config_hash) == (trained[row.run], tested[row.tested[::2]]) and (
            before is None or row.is_measured or not before.is_measured
        ):
            cells[row.place] = row
    return list(cells.values())
