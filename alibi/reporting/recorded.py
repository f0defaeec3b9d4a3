"""The rows of a directory: a file for each, rows/RUN/KEY.json, written once, and results.jsonl, made of them.

Nothing is appended to and nobody waits: evaluations that run at the same time write files of different names, or the
same row, of which there is one. Directories of before, which have only results.jsonl, are read as they are.
"""

import datetime
import hashlib
import json
import logging
import os
import re
from typing import Any

from alibi.reporting.rows import Row, parse_rows
from alibi.storage.store import Store, open_store

ROWS_FILE = "results.jsonl"  # what people read
FOLDER = "rows"
BEFORE = f"{FOLDER}/before.jsonl"  # the lines of a results.jsonl that is older than the folder

_log = logging.getLogger(__name__)


def find_rows(directory: str | os.PathLike[str] | Store) -> list[Row]:
    """All rows of a directory or address, the oldest first; a damaged one is left out, with a logged warning."""
    return _find(open_store(directory))[0]


def record_row(directory: str | os.PathLike[str] | Store, row: Row) -> bool:
    """Writes `row`, unless there is one that says the same of its measurement; whether it was written.

    A row with a result is the only one of its measurement; one with an error, the only one with that.
    """
    store, name = open_store(directory), _name(row)
    if store.exists(ROWS_FILE) and not store.exists(FOLDER):
        store.create(BEFORE, store.read(ROWS_FILE))
    about: dict[str, Any] = {"written": datetime.datetime.now(datetime.UTC).isoformat(), "row": row.to_json()}
    content = json.dumps(about | {"sha256": _sha256(about)}, indent=1, allow_nan=False) + "\n"
    if store.create(name, content):
        return True
    there, version = store.read_version(name)
    if _parse(store, name, there):
        return False
    return store.replace(name, content, version) is not None  # a damaged one; another process may have done so


def merge_rows(directory: str | os.PathLike[str] | Store) -> list[Row]:
    """Writes results.jsonl with all rows, and returns them."""
    store = open_store(directory)
    rows, names = _find(store)
    while names:
        store.write(ROWS_FILE, "".join(json.dumps(row.to_json(), allow_nan=False) + "\n" for row in rows))
        before = names
        rows, names = _find(store)
        # Whoever writes the file last has seen the rows of all who wrote it before.
        if names == before:
            break
    return rows


def _find(store: Store) -> tuple[list[Row], list[str]]:
    """The rows of a directory and the names of their files, none where results.jsonl has them all."""
    names = store.names(FOLDER)
    if not names:
        return _lines(store, ROWS_FILE), []
    known = [name for name in names if name.endswith(".json")]
    found = [_parse(store, name, content) for name, content in zip(known, store.read_all(known), strict=True)]
    recorded = sorted((pair for pair in found if pair), key=lambda pair: pair[0])
    return _lines(store, BEFORE) + [row for _, row in recorded], names


def _lines(store: Store, name: str) -> list[Row]:
    try:
        return parse_rows(store.read(name), f"{store}/{name}")
    except FileNotFoundError:
        return []


def _name(row: Row) -> str:
    """Returns the file of `row`: one for each measurement with a result, and for each of its errors."""
    key = hashlib.sha256(repr((row.measurement, not row.is_measured and row.error)).encode()).hexdigest()[:16]
    return f"{FOLDER}/{re.sub(r'[^-.=@+A-Za-z0-9_]', '_', row.run)}/{row.eval_length}-{key}.json"


def _parse(store: Store, name: str, content: bytes) -> tuple[str, Row] | None:
    """When a row was written, and the row; None where its file is damaged, which is said."""
    try:
        about = json.loads(content)
        if about.pop("sha256") != _sha256(about):
            raise ValueError("its SHA-256 is another")
        return about["written"], Row.from_json(about["row"])
    except (ValueError, KeyError, TypeError, AttributeError):
        _log.warning("%s/%s is damaged and was left out: evaluate again, and it is made anew", store, name)
        return None


def _sha256(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
