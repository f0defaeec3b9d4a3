"""A directory's rows: a file for each, rows/RUN/KEY.json, and results.jsonl, made from these files.

Concurrent evaluations write different files, or equal files. A directory with results.jsonl alone
is read too. The first new row moves its lines to rows/before.jsonl.
"""

import concurrent.futures
import datetime
import hashlib
import json
import os
import re

from etils import epath

from alibi.reporting.rows import OLDER, OlderRowError, Row, read_rows, warn_once
from alibi.storage.files import SHA256, digest, listed, resolve, write_whole

ROWS_FILE = "results.jsonl"  # for readers
FOLDER = "rows"
WORKDIR_FILE = "workdir"  # beside a run's rows: its path, which tells two runs of one name apart
_UNSAFE = re.compile(r"^\.|[^-.=@+A-Za-z0-9_]")  # a hidden folder would not be listed
BEFORE = f"{FOLDER}/before.jsonl"


def find_rows(directory: str | os.PathLike[str]) -> list[Row]:
    """Returns all rows in a directory or at an address, the oldest first. Leaves out damaged rows, with a
    warning.
    """
    return _find(resolve(directory))[0]


def run_folder(directory: epath.Path, run: str) -> epath.Path:
    """Returns the folder for the rows of a run."""
    return directory / FOLDER / _UNSAFE.sub("_", run)


def record_row(directory: str | os.PathLike[str], row: Row, workdir: str | None = None) -> bool:
    """Writes `row`, unless its measurement has a row with a result or the same error, and the path
    `workdir` of its run. Returns whether it did.
    """
    folder = resolve(directory)
    if (folder / ROWS_FILE).exists() and not (folder / FOLDER).exists():
        write_whole(folder / BEFORE, (folder / ROWS_FILE).read_bytes())
    key = hashlib.sha256(
        repr((row.measurement, not row.is_measured and row.error)).encode()
    ).hexdigest()[:16]
    named = "-".join(map(str, [row.evaluator.rpartition(":")[2], *row.cell.values()]))
    file = run_folder(folder, row.run) / f"{_UNSAFE.sub('_', named)[:80]}-{key}.json"
    if file.exists() and _parse(file):
        return False
    content = {"written": datetime.datetime.now(datetime.UTC).isoformat(), "row": row.to_json()}
    content |= {SHA256: digest(content)}
    write_whole(file, json.dumps(content, indent=1, allow_nan=False) + "\n")
    if workdir:
        write_whole(file.with_name(WORKDIR_FILE), workdir)
    return True


def merge_rows(directory: str | os.PathLike[str]) -> list[Row]:
    """Writes results.jsonl with all rows, and returns them."""
    folder = resolve(directory)
    rows, files = _find(folder)
    while files:
        write_whole(
            folder / ROWS_FILE,
            "".join(json.dumps(row.to_json(), allow_nan=False) + "\n" for row in rows),
        )
        before = files
        rows, files = _find(folder)
        # Thus the last process to write the file has seen the rows of all others.
        if files == before:
            break
    return rows


def _find(folder: epath.Path) -> tuple[list[Row], list[epath.Path]]:
    """Returns a directory's rows and their files, or no files if results.jsonl alone has the rows."""
    files = [
        file for run in listed(folder / FOLDER) for file in listed(run) if file.suffix == ".json"
    ]
    lines = folder / (BEFORE if files else ROWS_FILE)
    # at an address each file takes its time
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        recorded = sorted(filter(None, pool.map(_parse, files)), key=lambda pair: pair[0])
    return read_rows(lines) + [row for _, row in recorded], files


def _parse(file: epath.Path) -> tuple[str, Row] | None:
    """Returns the time at which a row was written, and the row. Warns and returns None if the file is
    damaged.
    """
    try:
        content = json.loads(file.read_bytes())
        if content.pop(SHA256, None) not in (
            None,
            digest(content),
        ):  # rows of an older version have none
            raise ValueError("it was altered")
        return content["written"], Row.from_json(content["row"])
    except OlderRowError:
        raise OlderRowError(f"{file}: {OLDER}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        warn_once(f"{file} is damaged and was left out: evaluate again, and it is made anew")
        return None
