"""results.jsonl: one line a measurement, appended atomically, later lines replacing earlier ones."""

import json
import logging
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, Any]

# What every row holds. `nll_nats` is the sum over the tokens, so rows can be pooled without loss.
ROW_KEYS = (
    "run",
    "position",
    "train_length",
    "eval_length",
    "mode",
    "stride",
    "corpus",
    "split",
    "seed",
    "step",
    "parameters",
    "nll_nats",
    "tokens",
    "words",
    "bytes",
    "perplexity",
    "word_perplexity",
    "bits_per_byte",
    "tokens_per_second",
    "seconds",
    "device",
    "commit",
)

# What a row measures; its other fields are what was found. A run has one value a cell: that of the last row.
CELL_KEYS = ("run", "eval_length", "mode", "stride", "corpus", "split")

# Of the config that defines a run and its evaluation (alibi.runs.evaluation_hash): a name may be used again.
CONFIG_KEY = "config_hash"
# Set where an error is final: the method or the text has no such length, however often it is tried.
LIMIT_KEY = "limit"

_log = logging.getLogger(__name__)


def cell_key(row: Mapping[str, Any]) -> tuple:
    """The cell that `row` measures: run, length, mode, stride, corpus and split."""
    return tuple(row[key] for key in CELL_KEYS)


def row_key(row: Mapping[str, Any]) -> tuple:
    """The cell, the step and the run's config: two rows with equal keys are the same measurement."""
    return (*cell_key(row), row["step"], row.get(CONFIG_KEY))


def append_rows(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends `rows` to the JSONL file `path` in one durable write, so a kill loses all of them or none.

    A number that is not finite becomes null, because JSON has none such; where it is
    `nll_nats`, the row's `error` says so. Raises ValueError for a row without one of `ROW_KEYS`.
    """
    text = "".join(json.dumps(_checked(row), allow_nan=False) + "\n" for row in rows)
    if not text:
        return
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_APPEND: two processes that append at once interleave whole writes, never bytes.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        data = (_separator(descriptor) + text).encode()
        written = os.write(descriptor, data)
        if written != len(data):
            raise OSError(f"{path}: only {written} of {len(data)} bytes could be written; is the disk full?")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(path: str | os.PathLike) -> list[Row]:
    """The rows of the JSONL file `path` in file order; none if it does not exist.

    A line that is no whole row (a process was killed while it wrote) is left out
    and reported by a logged warning: its measurement will be made again.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        row = _parsed(line)
        if row is None:
            _log.warning("%s line %d is no whole row and was left out; a killed process may have cut it", path, number)
        else:
            rows.append(row)
    return rows


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row a cell, in order of first appearance: the last measured one, or the last error where none succeeded.

    Of runs of one name with different configs only the last one's rows count, so that they never mix.
    """
    rows = list(rows)
    configs = {row["run"]: row.get(CONFIG_KEY) for row in rows}
    cells: dict[tuple, Row] = {}
    for row in rows:
        if row.get(CONFIG_KEY) != configs[row["run"]]:
            continue
        key = cell_key(row)
        if key not in cells or is_measured(row) or not is_measured(cells[key]):
            cells[key] = row
    return list(cells.values())


def short_commit(row: Mapping[str, Any]) -> str:
    """Twelve digits of the commit that a row was measured with, and "-dirty" where the files were not the commit's."""
    commit, dirty, _ = str(row["commit"]).partition("-dirty")
    return commit[:12] + dirty


def is_measured(row: Mapping[str, Any]) -> bool:
    """Whether the row holds a result, not an error."""
    return not row.get("error") and row["nll_nats"] is not None


def _checked(row: Mapping[str, Any]) -> Row:
    missing = [key for key in ROW_KEYS if key not in row]
    if missing:
        raise ValueError(f"a result row lacks {', '.join(missing)}; a row holds {', '.join(ROW_KEYS)}")
    infinite = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    checked = {key: None if key in infinite else value for key, value in row.items()}
    if "nll_nats" in infinite and not checked.get("error"):
        checked["error"] = f"nll_nats is {row['nll_nats']}"
    return checked


def _separator(descriptor: int) -> str:
    """A newline if the file ends inside a line, so that what follows does not join it."""
    size = os.fstat(descriptor).st_size
    return "\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else ""


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and all(key in row for key in ROW_KEYS) else None
