"""Directories of the cache: made once, named after their content, and never seen half-written."""

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from alibi.errors import NO_SPACE, cause
from alibi.storage.files import check_path, digest, local_path, made_whole

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
    """Returns `cache_dir`, or $ALIBI_CACHE, or ~/.cache/alibi.

    Raises:
      ValueError: an address, or a path that a library would misread.
    """
    named = "data.cache_dir" if cache_dir else "$ALIBI_CACHE"
    root = local_path(cache_dir or os.environ.get("ALIBI_CACHE") or "~/.cache/alibi", named)
    check_path(str(root))
    return root


def content_key(content: dict[str, Any]) -> str:
    """Returns a directory name that only equal contents share."""
    return digest(content)[:32]


def file_sha256(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of a file's content."""
    with epath.Path(path).expanduser().open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find_or_make(directory: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Makes `directory` if it is missing: `write` fills a temporary directory, which is renamed.
    Raises the errors of `claimed`.
    """
    if directory.is_dir():
        return
    with claimed(directory) as alone:
        # no other process writes here: these are left from killed ones
        for stale in directory.parent.glob(f".{directory.name}.*") if alone else ():
            shutil.rmtree(stale, ignore_errors=True)
        if not directory.is_dir():
            with made_whole(directory) as temporary:
                temporary.mkdir()
                write(temporary)


@contextlib.contextmanager
def claimed(directory: pathlib.Path) -> Iterator[bool]:
    """Locks `directory` while it is made. Other processes wait.

    Yields False if the file system has no locks. Then each process makes the directory, and the
    first rename wins.

    Raises:
      ValueError: there is no space, or no permission.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_name(f".{directory.name}.lock").open("w") as file:
            locked = False
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
                locked = True
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
