"""Directories of the cache: made once, found again by content, and never seen half-written."""

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

from alibi.errors import NO_SPACE, cause
from alibi.storage.files import check_path, local_path, made_whole

_UNWRITABLE = (
    *NO_SPACE,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOENT,
)


def cache_root(cache_dir: str | os.PathLike = "") -> pathlib.Path:
    """Returns `cache_dir` if it is given, else $ALIBI_CACHE, else ~/.cache/alibi; raises ValueError
    for an address, or a path that a library would misread.
    """
    named = "data.cache_dir" if cache_dir else "$ALIBI_CACHE"
    root = local_path(cache_dir or os.environ.get("ALIBI_CACHE") or "~/.cache/alibi", named)
    check_path(str(root))
    return root


def content_key(content: dict[str, Any]) -> str:
    """Returns a directory name that is the same for equal contents only."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()[:32]


def file_sha256(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of a file's content."""
    with epath.Path(path).expanduser().open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find_or_make(directory: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Makes `directory`, unless it exists, by `write(temporary directory)` and one rename; raises
    as `claimed`.
    """
    if directory.is_dir():
        return
    with claimed(directory) as alone:
        if alone:  # no other process writes here: these are left from killed ones
            for stale in filter(pathlib.Path.is_dir, directory.parent.glob(f".{directory.name}.*")):
                shutil.rmtree(stale, ignore_errors=True)
        if not directory.is_dir():
            with made_whole(directory) as temporary:
                temporary.mkdir()
                write(temporary)


@contextlib.contextmanager
def claimed(directory: pathlib.Path) -> Iterator[bool]:
    """Holds the lock for making `directory`; other processes wait for it.

    Yields False if the file system has no locks: then each process makes its own, and the first
    rename wins.

    Raises:
      ValueError: there is no space, or no permission.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_name(f".{directory.name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                locked = True
            except OSError:
                locked = False
            yield locked
    except OSError as error:
        if directory.is_dir():  # another process was first, with the same content
            return
        if error.errno not in _UNWRITABLE:
            raise
        raise ValueError(
            f"the cache {directory.parent} can't be written ({cause(error)}); make space, or set data.cache_dir or "
            "$ALIBI_CACHE to another directory of your own"
        ) from error
