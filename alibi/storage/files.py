"""Files in directories and at the addresses gs://BUCKET/PATH and s3://BUCKET/PATH, read and written
through epath.

A reader sees a file as it was or as it is now, never a part: local files are renamed into place,
and object stores replace an object at once.
"""

import contextlib
import errno
import glob
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec.config
from etils import epath

from alibi.errors import masked
from alibi.extras import needs

SHA256 = "sha256"  # key of a JSON file for the digest of the rest
PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}  # by which fsspec, and so epath, reads addresses
# TensorStore takes a backslash for a slash and names in UTF-8 alone, Orbax gs:/ for an address, and
# epath the first folder. A control character spoils lines, tables and figures.
_MISREAD = re.compile(
    r"[\\\x00-\x1f\x7f-\x9f\ud800-\udfff]|(?<=/)[^/]*gs:(?=/|$)|^/(?:gs|s3|az|hf)(?=/|$)"
)


class ExactPath(epath.gpath.PosixGPath):
    """A path whose `glob` takes *, ? and brackets of the pattern alone: Orbax would find no arrays
    below a folder [a], and save none.
    """

    def glob(self, pattern: str) -> Iterator[epath.Path]:
        return epath.Path(glob.escape(os.fspath(self))).glob(pattern)


def is_address(place: str | os.PathLike[str]) -> bool:
    """Returns whether `place` is an address such as gs://BUCKET, also if a path library has merged
    its slashes.
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(place)) is not None


def resolve(place: str | os.PathLike[str]) -> epath.Path:
    """Returns the absolute path of a directory or file, ~ expanded, or of an address; reads and
    makes nothing.

    Raises:
      ValueError: an address of another kind, or a path that a library would misread.
      MissingPackageError: the package of the address is not installed.
    """
    text = os.fspath(place)
    if is_address(text):
        # fsspec would take a password or a query as part of a name, which stands in every row and log
        found = re.fullmatch(r"(gs|s3)://[^/@?]+(/[^?]*)?", text)
        if found is None or {".", ".."} & set(text.split("/")):
            raise ValueError(
                f"address {masked(text)} can't be read; give gs://BUCKET/PATH, s3://BUCKET/PATH or a directory"
            )
        scheme = found[1]
        needs(f"the address {text}", PACKAGES[scheme])
        # Otherwise a process lists the files that it saw first.
        for protocol in ("gcs", "s3"):
            fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False
    else:
        text = str(pathlib.Path(os.path.expanduser(text)).absolute())
    check_path(text)
    return ExactPath(text)


def check_path(path: str) -> None:
    """Raises ValueError for a character or folder that one of the libraries would misread."""
    if found := _MISREAD.search(path):
        raise ValueError(
            f"{path!r} can't be used: the libraries that write files misread {found[0]!r} in a path; choose another, "
            "or rename the folder"
        )


def local_path(place: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Returns `place` as a local path, ~ expanded; raises ValueError with `name` if it is an
    address.
    """
    if is_address(place):
        raise ValueError(
            f"{name} is the address {masked(os.fspath(place))}, where a path of this machine is needed; copy or mount "
            "it"
        )
    return pathlib.Path(os.path.expanduser(place))


def listed(folder: epath.Path) -> list[epath.Path]:
    """Returns the finished entries of a folder, sorted by name; none without a folder."""
    try:
        # epath's own list lacks local names with a ~ at their end
        entries = (
            folder.iterdir() if is_address(folder) else map(folder.joinpath, os.listdir(folder))
        )
        return sorted(path for path in entries if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def made_whole(place: str | os.PathLike[str], *, parents: bool = True) -> Iterator[pathlib.Path]:
    """Yields a local path for a new file or directory, which replaces `place` at the end of the
    block.

    If the block raises, nothing is left of the new one and `place` stays as it was. At an address
    the files are written in turn.

    Args:
      parents: makes the folders above `place` if they are missing.
    """
    if is_address(place):
        with tempfile.TemporaryDirectory() as folder:
            made = pathlib.Path(folder, "made")
            yield made
            for path in (made, *sorted(made.rglob("*"))):
                if path.is_file():
                    (epath.Path(place) / path.relative_to(made)).write_bytes(path.read_bytes())
        return
    path = pathlib.Path(place)
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def write_whole(
    place: str | os.PathLike[str], content: str | bytes | memoryview, *, parents: bool = True
) -> None:
    """Writes a file, text as UTF-8, in which a byte of a name that is no UTF-8 becomes an escape; see
    `made_whole`.
    """
    with made_whole(place, parents=parents) as temporary:
        temporary.write_bytes(
            content.encode(errors="backslashreplace") if isinstance(content, str) else content
        )


def digest(content: dict[str, Any]) -> str:
    """Returns the SHA-256 of JSON content: one bit may make another number, which JSON can't tell."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_writable(folder: epath.Path) -> None:
    """Raises OSError if no file can be written in the folder; makes no folder if it is missing."""
    if not is_address(folder) and not folder.exists():
        above = next(place for place in folder.parents if place.exists())
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(above))
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{above} is read-only for you")
        return
    probe = folder / f".writable-{os.getpid()}"
    write_whole(probe, "")
    probe.unlink()


def append_row(log: epath.Path, row: dict[str, Any]) -> None:
    """Adds `row`, which has a "step", to the JSON lines of the file `log`.

    Objects can't grow, so at an address each row is a file of its own, in the folder named as `log`
    without its suffix.
    """
    line = json.dumps(row) + "\n"
    if is_address(log):
        (log.with_suffix("") / f"{row['step']:010d}-{time.time_ns()}.jsonl").write_text(line)
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(line)


def read_rows(log: epath.Path) -> list[dict[str, Any]]:
    """Returns the rows of `append_row` in their order, without damaged lines; none if nothing was
    written.
    """
    files = [log] if log.exists() else listed(log.with_suffix(""))
    lines = [line for file in files for line in file.read_bytes().splitlines()]
    return [json.loads(line) for line in lines if _step_of(line) < math.inf]


def drop_rows(log: epath.Path, step: int) -> None:
    """Removes the rows of later steps than `step`, and damaged lines."""
    if is_address(log):
        for file in listed(log.with_suffix("")):
            if int(file.name.partition("-")[0]) > step:
                file.unlink()
    elif log.exists():
        lines = log.read_bytes().splitlines(keepends=True)
        write_whole(log, b"".join(line for line in lines if _step_of(line) <= step))


def _step_of(line: bytes) -> float:
    """Returns the "step" of a row's line; infinity for a damaged line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return math.inf
    step = row.get("step") if isinstance(row, dict) else None
    return step if type(step) is int else math.inf
