"""What a cache at an address holds of token files and tokenizers: put there by who makes them, fetched by the others.

The files of a directory KIND/KEY are objects KIND/KEY/SHA-256/FILE, and KIND/KEY.json, which is created when all of
them are there, lists their SHA-256. What a killed process left has no list: it counts for nothing, and is written
again. Of two that put a directory there at once, which may tell otherwise where its text lay, the first one's counts.
"""

import concurrent.futures
import hashlib
import json
import logging
import os
import pathlib

from alibi.data.cache import find_or_make
from alibi.storage.atomic import is_address
from alibi.storage.store import Store, open_store

_AT_A_TIME = 4  # files that are fetched, each of which is in memory as a whole

_log = logging.getLogger(__name__)


class SharedCache:
    """The cache that data.cache_dir names, if that is an address; else one that is empty and stays so.

    Directories are those of the local cache, and found here by their last two names.

    Raises:
      ValueError: an address of another kind than gs://BUCKET/PATH and s3://BUCKET/PATH.
    """

    def __init__(self, cache_dir: str | os.PathLike[str]):
        self._store: Store | None = open_store(cache_dir) if is_address(cache_dir) else None

    def __bool__(self) -> bool:
        return self._store is not None

    def has(self, directory: pathlib.Path) -> bool:
        return self._store is not None and self._store.exists(_list_of(directory))

    def fetch(self, directory: pathlib.Path) -> None:
        """Makes a directory that isn't there, if it is here; ValueError, and no directory, where it is damaged."""
        if self._store is not None and not directory.is_dir() and self.has(directory):
            store = self._store
            find_or_make(directory, lambda folder: _fetch(store, directory, folder))

    def publish(self, directory: pathlib.Path) -> None:
        """Puts a directory here, unless it is; a warning where that can't be written."""
        try:
            if self._store is not None and not self.has(directory):
                _put(self._store, directory)
        except OSError as error:
            _log.warning("%s can't be written (%s): other hosts will make these tokens themselves", self._store, error)


def _put(store: Store, directory: pathlib.Path) -> None:
    listed = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        content, file = path.read_bytes(), path.relative_to(directory).as_posix()
        listed[file] = hashlib.sha256(content).hexdigest()
        store.write(_object(directory, file, listed[file]), content)
    store.create(_list_of(directory), json.dumps(listed, indent=1) + "\n")


def _fetch(store: Store, directory: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the files of `directory` to `folder`."""

    def fetch_file(file: str, sha256: str) -> None:
        content = store.read(_object(directory, file, sha256))
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"the SHA-256 of {file} is another")
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)

    try:
        listed = json.loads(store.read(_list_of(directory)))
        with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as pool:
            list(pool.map(fetch_file, listed.keys(), listed.values()))
    except (ValueError, TypeError, AttributeError, FileNotFoundError) as error:
        place = f"{store}/{_name(directory)}"
        raise ValueError(
            f"{place} is damaged ({error}); delete {place}.json, and the next run puts it there anew"
        ) from error


def _name(directory: pathlib.Path) -> str:
    return f"{directory.parent.name}/{directory.name}"


def _object(directory: pathlib.Path, file: str, sha256: str) -> str:
    return f"{_name(directory)}/{sha256}/{file}"


def _list_of(directory: pathlib.Path) -> str:
    return f"{_name(directory)}.json"
