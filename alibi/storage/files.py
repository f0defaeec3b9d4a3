"""Files in directories and at the addresses gs://BUCKET/PATH and s3://BUCKET/PATH, read and written
through epath.

A reader never sees a part of a file: local files are renamed into place, and object stores replace
an object at once.
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
PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}  # fsspec, and so epath, reads addresses with them
# TensorStore takes a backslash for a slash and names in UTF-8 alone, Orbax gs:/ for an address, and
# epath the first folder. A control character spoils lines, tables and figures.
_MISREAD = re.compile(
    r"[\\\x00-\x1f\x7f-\x9f\ud800-\udfff]|(?<=/)[^/]*gs:(?=/|$)|^/(?:gs|s3|az|hf)(?=/|$)"
)


class ExactPath(epath.gpath.PosixGPath):
    """A path with a `glob` that takes *, ? and brackets in the path itself literally. Otherwise Orbax
    finds and saves no arrays below a folder named [a].
    """

    def glob(self, pattern: str) -> Iterator[epath.Path]:
        return epath.Path(glob.escape(os.fspath(self))).glob(pattern)


def is_address(place: str | os.PathLike[str]) -> bool:
    """Returns whether `place` is an address such as gs://BUCKET, or gs:/BUCKET as path libraries
    write it.
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(place)) is not None


def resolve(place: str | os.PathLike[str]) -> epath.Path:
    """Returns the absolute path, ~ expanded, or the address. Touches no file.

    Raises:
      ValueError: another kind of address, or a path that a library would misread.
      MissingPackageError: the address needs a package that is not installed.
    """
    text = os.fspath(place)
    if is_address(text):
        # fsspec would take a password or a query as part of a name, which stands in every row and log
        address = re.fullmatch(r"(gs|s3)://[^/@?]+(/[^?]*)?", text)
        if address is None or {".", ".."} & set(text.split("/")):
            raise ValueError(
                f"address {masked(text)} can't be read; give gs://BUCKET/PATH, s3://BUCKET/PATH or a directory"
            )
        needs(f"the address {text}", PACKAGES[address[1]])
        # Otherwise a process lists the files that it saw first.
        for protocol in ("gcs", "s3"):
            fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False
    else:
        text = str(pathlib.Path(os.path.expanduser(text)).absolute())
    check_path(text)
    return ExactPath(text)


def check_path(path: str) -> None:
    """Raises ValueError for a character or folder that a library misreads."""
    if misread := _MISREAD.search(path):
        raise ValueError(
            f"{path!r} can't be used: the libraries that write files misread {misread[0]!r} in a path; choose another, "
            "or rename the folder"
        )


def local_path(place: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Returns a local path, ~ expanded. Raises ValueError, naming `name`, for an address."""
    if is_address(place):
        raise ValueError(
            f"{name} is the address {masked(os.fspath(place))}, where a path of this machine is needed; copy or mount "
            "it"
        )
    return pathlib.Path(os.path.expanduser(place))


def listed(folder: epath.Path) -> list[epath.Path]:
    """Returns a folder's entries, sorted, without hidden ones, or [] if it is missing."""
    try:
        # epath's own list lacks local names with a ~ at their end
        entries = (
            folder.iterdir() if is_address(folder) else map(folder.joinpath, os.listdir(folder))
        )
        return sorted(path for path in entries if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def made_whole(place: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a local path for a new file or directory, which replaces `place` after the block.

    If the block raises, `place` stays as it was. Missing folders above it are made. At an address the
    files are written in turn.
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


def write_whole(place: str | os.PathLike[str], content: str | bytes | memoryview) -> None:
    """Writes a file with `made_whole`. Text is written in UTF-8, with escapes for what UTF-8 lacks."""
    with made_whole(place) as temporary:
        temporary.write_bytes(
            content.encode(errors="backslashreplace") if isinstance(content, str) else content
        )


def digest(content: dict[str, Any]) -> str:
    """Returns the SHA-256 of JSON content, in which a flipped bit may be valid JSON too."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_writable(folder: epath.Path) -> None:
    """Raises OSError if no file can be written in the folder, or a missing folder can't be made."""
    if not is_address(folder) and not folder.exists():
        above = next(path for path in folder.parents if path.exists())
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(above))
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{above} is read-only for you")
        return
    probe = folder / f".writable-{os.getpid()}"
    write_whole(probe, "")
    probe.unlink()


def append_row(log: epath.Path, row: dict[str, Any]) -> None:
    """Appends `row`, which has a "step", to the JSON lines of `log`.

    Objects can't grow: at an address each row is a file in a folder, named like `log` without its
    suffix.
    """
    line = json.dumps(row) + "\n"
    if is_address(log):
        (log.with_suffix("") / f"{row['step']:010d}-{time.time_ns()}.jsonl").write_text(line)
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(line)


def read_log(log: epath.Path) -> list[dict[str, Any]]:
    """Returns the rows of `append_row` in order, without damaged lines."""
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
    """Returns the "step" of a line, infinity for a damaged line."""
    step = None
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        step = json.loads(line)["step"]
    return step if type(step) is int else math.inf
