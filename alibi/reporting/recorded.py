"""The rows of a directory: a file for each, rows/RUN/KEY.json, written once, and results.jsonl, made of them.

Nothing is appended to and nobody waits: evaluations that run at the same time write files of different names, or the
same row, of which there is one. Directories of before, which have only results.jsonl, are read as they are.
"""

import concurrent.futures
import datetime
import hashlib
import json
import logging
import os
import re
from typing import Any

from etils import epath

from alibi.reporting.rows import Row, parse_rows
from alibi.storage.files import listed, resolve, write_whole

ROWS_FILE = "results.jsonl"  # what people read
FOLDER = "rows"
BEFORE = f"{FOLDER}/before.jsonl"  # the lines of a results.jsonl that is older than the folder

_log = logging.getLogger(__name__)


def find_rows(directory: str | os.PathLike[str]) -> list[Row]:
    """Returns all rows of a directory or address, the oldest first, and warns of damaged ones, which are left out."""
    return _find(resolve(directory))[0]


def record_row(directory: str | os.PathLike[str], row: Row) -> bool:
    """Writes `row`, unless its measurement has a row with a result or the same error; returns whether it did."""
    folder = resolve(directory)
    if (folder / ROWS_FILE).exists() and not (folder / FOLDER).exists():
        write_whole(folder / BEFORE, (folder / ROWS_FILE).read_bytes())
    file = folder / _name(row)
    if file.exists() and _parse(file):
        return False
    about: dict[str, Any] = {"written": datetime.datetime.now(datetime.UTC).isoformat(), "row": row.to_json()}
    write_whole(file, json.dumps(about | {"sha256": _sha256(about)}, indent=1, allow_nan=False) + "\n")
    return True


def merge_rows(directory: str | os.PathLike[str]) -> list[Row]:
    """Writes results.jsonl with all rows, and returns them."""
    folder = resolve(directory)
    rows, files = _find(folder)
    while files:
        write_whole(folder / ROWS_FILE, "".join(json.dumps(row.to_json(), allow_nan=False) + "\n" for row in rows))
        before = files
        rows, files = _find(folder)
        # Whoever writes the file last has seen the rows of all who wrote it before.
        if files == before:
            break
    return rows


def _find(folder: epath.Path) -> tuple[list[Row], list[epath.Path]]:
    """Returns the rows of a directory and their files; no files if results.jsonl alone has the rows."""
    files = [file for run in listed(folder / FOLDER) for file in listed(run) if file.suffix == ".json"]
    if not files:
        return _lines(folder / ROWS_FILE), []
    with concurrent.futures.ThreadPoolExecutor(16) as pool:  # at an address each file takes its time
        recorded = sorted(filter(None, pool.map(_parse, files)), key=lambda pair: pair[0])
    return _lines(folder / BEFORE) + [row for _, row in recorded], files


def _lines(file: epath.Path) -> list[Row]:
    return parse_rows(file.read_bytes(), str(file)) if file.exists() else []


def _name(row: Row) -> str:
    """Returns the file of `row`: one for each measurement with a result, and for each of its errors."""
    key = hashlib.sha256(repr((row.measurement, not row.is_measured and row.error)).encode()).hexdigest()[:16]
    return f"{FOLDER}/{re.sub(r'[^-.=@+A-Za-z0-9_]', '_', row.run)}/{row.eval_length}-{key}.json"


def _parse(file: epath.Path) -> tuple[str, Row] | None:
    """Returns the time at which a row was written, and the row; None, with a warning, if the file is damaged."""
    try:
        about = json.loads(file.read_bytes())
        if about.pop("sha256") != _sha256(about):
            raise ValueError("its SHA-256 is another")
        return about["written"], Row.from_json(about["row"])
    except (ValueError, KeyError, TypeError, AttributeError):
        _log.warning("%s is damaged and was left out: evaluate again, and it is made anew", file)
        return None


def _sha256(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
