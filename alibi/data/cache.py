"""Directories that are made once, found again by content, and never seen half-written."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from alibi.config import DataConfig
from alibi.errors import NO_SPACE
from alibi.storage.files import local_path, made_whole

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)


def cache_root(cache_dir: str | os.PathLike = "") -> pathlib.Path:
    """Returns `cache_dir` if it is given, else $ALIBI_CACHE, else ~/.cache/alibi; raises ValueError for an address."""
    if cache_dir:
        return local_path(cache_dir, "data.cache_dir")
    return local_path(os.environ.get("ALIBI_CACHE") or "~/.cache/alibi", "$ALIBI_CACHE")


def check_paths(data: DataConfig) -> None:
    """Raises ValueError if a key of the config's section `data` names an address."""
    for key, value in vars(data).items():
        if isinstance(value, str):
            local_path(value, f"data.{key}")


def content_key(content: dict[str, Any]) -> str:
    """A directory name that is the same for equal contents only."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()[:32]


def file_sha256(path: str | os.PathLike) -> str:
    """SHA-256 of a file's content."""
    with epath.Path(path).expanduser().open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find_or_make(directory: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Makes `directory` by `write(temporary directory)` and one rename, unless it exists; else as `claimed`."""
    if directory.is_dir():
        return
    with claimed(directory) as alone:
        if alone:  # so nobody is writing: what is there was left by processes that were killed
            for stale in filter(pathlib.Path.is_dir, directory.parent.glob(f".{directory.name}.*")):
                shutil.rmtree(stale, ignore_errors=True)
        if not directory.is_dir():
            with made_whole(directory) as temporary:
                temporary.mkdir()
                write(temporary)


@contextlib.contextmanager
def claimed(directory: pathlib.Path, part: str = "") -> Iterator[bool]:
    """Holds the lock under which `directory`, or a `part` of it, is made: one process does, the others wait.

    Yields False where the file system has no locks: then each makes its own, and the first rename wins. Raises
    ValueError when there is no space or no permission.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory.with_name(f".{directory.name}{part}.lock")) as alone:
            yield alone
    except OSError as error:
        if directory.is_dir():  # another process was first, with the same content
            return
        remedy = "set data.cache_dir or $ALIBI_CACHE to a directory"
        if error.errno in NO_SPACE:
            raise ValueError(f"no space left to write {directory}; free some, or {remedy} on a larger disk") from error
        if error.errno in _NOT_ALLOWED:
            raise ValueError(
                f"the cache {directory.parent} can't be written ({error.strerror}); {remedy} of your own"
            ) from error
        raise


@contextlib.contextmanager
def _lock(path: pathlib.Path) -> Iterator[bool]:
    """Waits for the only right to what `path` stands for; yields False where the file system has no locks."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
