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

from alibi.atomic import made_whole

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)


def cache_root(cache_dir: str | os.PathLike = "") -> pathlib.Path:
    """`cache_dir`, else $ALIBI_CACHE, else ~/.cache/alibi."""
    return pathlib.Path(cache_dir or os.environ.get("ALIBI_CACHE") or "~/.cache/alibi").expanduser()


def content_key(content: dict[str, Any]) -> str:
    """A directory name that is the same for equal contents only."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()[:32]


def find_or_make(directory: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Makes `directory` by `write(temporary directory)` and one rename, unless it exists.

    Of several processes one writes and the others wait; where the file system
    has no locks, each writes its own and the first rename wins. Raises
    ValueError when there is no space or no permission; nothing is left behind.
    """
    if directory.is_dir():
        return
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory) as alone:
            if alone:
                _remove_stale(directory)
            if not directory.is_dir():
                _write_and_rename(directory, write)
    except OSError as error:
        raise _explained(directory, error) from error


def _write_and_rename(directory: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    try:
        with made_whole(directory) as temporary:
            temporary.mkdir()
            write(temporary)
    except OSError:
        if not directory.is_dir():  # else another process was first, with the same content
            raise


@contextlib.contextmanager
def _lock(directory: pathlib.Path) -> Iterator[bool]:
    """Waits for the only right to make `directory`; yields False where the file system has no locks."""
    with directory.with_name(f".{directory.name}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _remove_stale(directory: pathlib.Path) -> None:
    """Removes what killed processes left: whoever holds the lock knows that nobody is writing."""
    for path in directory.parent.glob(f".{directory.name}.*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _explained(directory: pathlib.Path, error: OSError) -> Exception:
    remedy = "set data.cache_dir or $ALIBI_CACHE to a directory"
    if error.errno in _NO_SPACE:
        return ValueError(f"no space left to write {directory}; free some, or {remedy} on a larger disk")
    if error.errno in _NOT_ALLOWED:
        return ValueError(f"the cache {directory.parent} can't be written ({error.strerror}); {remedy} of your own")
    return error
