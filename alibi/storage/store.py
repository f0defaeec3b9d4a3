"""Where files of runs lie: a directory or an address, gs://BUCKET/PATH or s3://BUCKET/PATH, read and written alike.

Files are named below a store by paths with slashes. Each is written whole or not at all, so that no reader meets a
half one; nothing is appended to. Errors of object stores are OSErrors of one line, as those of files are.
"""

import abc
import contextlib
import copy
import errno
import fcntl
import hashlib
import json
import math
import os
import pathlib
import re
import uuid
from collections.abc import Callable, Sequence
from typing import IO, Any

from alibi.errors import UserError
from alibi.storage.atomic import is_address, made_whole, write_whole

SCHEMES = ("gs", "s3")
Version = dict[str, str]  # what a store knows the content of a file by
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LostError(UserError):
    """Another process writes here by now, thinking this one gone."""


class Store(abc.ABC):
    """A place with files. `str(store)` is what a user calls it: an absolute path or an address."""

    _check: Callable[[], object] = staticmethod(lambda: None)  # called before each write

    def guarded(self, check: Callable[[], object]) -> "Store":
        """The same place, written to only after `check`, which raises where this process may write no more."""
        other = copy.copy(self)
        other._check = check
        return other

    @property
    def name(self) -> str:
        """Its last part."""
        return str(self).rstrip("/").rpartition("/")[2]

    @property
    @abc.abstractmethod
    def path(self) -> pathlib.Path:
        """The directory, for code that reads nothing else; ValueError where it is an address."""

    @abc.abstractmethod
    def __truediv__(self, folder: str) -> "Store":
        """The store of what lies below `folder`."""

    @abc.abstractmethod
    def read_version(self, name: str) -> tuple[bytes, Version]:
        """The content of a file, and what it is known by; FileNotFoundError where there is none."""

    @abc.abstractmethod
    def write(self, name: str, content: str | bytes | memoryview) -> None:
        """Writes a file, text as UTF-8: a reader sees the old one or the new one, never a part."""

    @abc.abstractmethod
    def create(self, name: str, content: str | bytes) -> bool:
        """Writes a file unless there is one of that name: of several processes one does, which is told True."""

    @abc.abstractmethod
    def replace(self, name: str, content: str | bytes, version: Version) -> Version | None:
        """Writes a file that is still the one of `version`; None where it is another one by now, or gone.

        In a directory another process can come between the comparison and the writing.
        """

    @abc.abstractmethod
    def delete(self, name: str) -> None:
        """Removes a file, if it is there."""

    @abc.abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """The names of all files below `folder`, sorted; none where it doesn't exist."""

    @abc.abstractmethod
    def folders(self) -> list[str]:
        """The names of the folders that lie directly in it, sorted."""

    @abc.abstractmethod
    def check_writable(self) -> None:
        """Makes the place if need be; raises OSError where it can't be written."""

    @abc.abstractmethod
    def lock(self, name: str) -> IO[Any] | None:
        """The locked file `name`, whose lock lasts until it is closed; None where there are no file locks.

        Raises BlockingIOError where another process holds it.
        """

    @abc.abstractmethod
    def fetched(self, name: str) -> contextlib.AbstractContextManager[pathlib.Path]:
        """A path of this machine with the file, or the files of the folder `name`, for code that reads nothing else."""

    @abc.abstractmethod
    def made(self, name: str) -> contextlib.AbstractContextManager[pathlib.Path]:
        """A path of this machine for a file or directory to be made at, which becomes `name` if nothing is raised."""

    @abc.abstractmethod
    def filled(self, folder: str) -> contextlib.AbstractContextManager[pathlib.Path]:
        """A directory of this machine for code that goes on writing; its files are in `folder` at the end at last."""

    @abc.abstractmethod
    def log(self, name: str, row: dict[str, Any]) -> None:
        """Adds a row to NAME.jsonl; where nothing can be appended to, to NAME/STEP.jsonl of the row's own "step".

        Raises LostError where that is another process's file.
        """

    @abc.abstractmethod
    def drop_log(self, name: str, step: int) -> None:
        """Removes the rows of `log` that are of a later step, and lines that are no rows."""

    def read_log(self, name: str) -> list[dict[str, Any]]:
        """The rows of `log`, in their order; none where there are none, and without lines that are no rows."""
        files = self.names(f"{name}.jsonl") or self.names(name)
        lines = b"".join(self.read_all(files)).splitlines()
        return [json.loads(line) for line in lines if _step_of(line) < math.inf]

    def read(self, name: str) -> bytes:
        """The content of a file; FileNotFoundError where there is none."""
        return self.read_version(name)[0]

    def read_all(self, names: Sequence[str]) -> list[bytes]:
        """The contents of several files."""
        return [self.read(name) for name in names]

    def exists(self, name: str) -> bool:
        """Whether there is such a file, or one below such a folder."""
        return bool(self.names(name))


class Folder(Store):
    """A directory of a file system."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    @property
    def path(self) -> pathlib.Path:
        return self._path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, folder: str) -> "Folder":
        return Folder(self.path / folder)

    def read_version(self, name: str) -> tuple[bytes, Version]:
        content = (self.path / name).read_bytes()
        return content, {"sha256": hashlib.sha256(content).hexdigest()}

    def write(self, name: str, content: str | bytes | memoryview) -> None:
        write_whole(self._file(name), content)

    def create(self, name: str, content: str | bytes) -> bool:
        path, data = self._file(name), encoded(content)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            temporary.write_bytes(data)
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _write_new(path, data)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def replace(self, name: str, content: str | bytes, version: Version) -> Version | None:
        try:
            if self.read_version(name)[1] != version:
                return None
        except FileNotFoundError:
            return None
        self.write(name, content)
        return {"sha256": hashlib.sha256(encoded(content)).hexdigest()}

    def delete(self, name: str) -> None:
        self._check()
        (self.path / name).unlink(missing_ok=True)

    def names(self, folder: str = "") -> list[str]:
        start = self.path / folder
        if start.is_file():
            return [folder]
        # Names with a dot before them are those of files that are being written.
        files = (pathlib.Path(place, file) for place, _, files in os.walk(start) for file in files if file[0] != ".")
        return sorted(file.relative_to(self.path).as_posix() for file in files)

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("*/"))

    def check_writable(self) -> None:
        probe = self._file(f".writable-{os.getpid()}")
        probe.touch()
        probe.unlink()

    def lock(self, name: str) -> IO[Any] | None:
        file = self._file(name).open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError:
            file.close()
            return None
        return file

    def fetched(self, name: str) -> contextlib.AbstractContextManager[pathlib.Path]:
        return contextlib.nullcontext(self.path / name)

    def made(self, name: str) -> contextlib.AbstractContextManager[pathlib.Path]:
        return made_whole(self._file(name))

    def filled(self, folder: str) -> contextlib.AbstractContextManager[pathlib.Path]:
        return contextlib.nullcontext(self.path / folder)

    def log(self, name: str, row: dict[str, Any]) -> None:
        with self._file(f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def drop_log(self, name: str, step: int) -> None:
        file = self._file(f"{name}.jsonl")
        if file.exists():
            lines = file.read_bytes().splitlines(keepends=True)
            write_whole(file, b"".join(line for line in lines if _step_of(line) <= step))

    def _file(self, name: str) -> pathlib.Path:
        """Where a file is about to be written."""
        self._check()
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _step_of(line: bytes) -> float:
    """The "step" of a line that was logged; infinity for what is no row: a half line, or no JSON."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return math.inf
    step = row.get("step") if isinstance(row, dict) else None
    return step if type(step) is int else math.inf


def _write_new(path: pathlib.Path, content: bytes | memoryview) -> bool:
    """Writes a file unless there is one, where the file system has no links; what a kill leaves is not whole."""
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def open_store(place: "str | os.PathLike[str] | Store") -> Store:
    """The store at a path, which may begin with ~, or at an address; nothing is made or asked.

    Raises:
      ValueError: an address of another kind than gs://BUCKET/PATH and s3://BUCKET/PATH.
    """
    if isinstance(place, Store):
        return place
    text = os.fspath(place)
    if not is_address(text):
        return Folder(pathlib.Path(text).expanduser().absolute())
    found = re.fullmatch(rf"({'|'.join(SCHEMES)})://([^/]+)(?:/(.*))?", text)
    if found is None or {"", ".", ".."} & set((found[3] or "x").rstrip("/").split("/")):
        raise ValueError(f"address {text} can't be read; give gs://BUCKET/PATH, s3://BUCKET/PATH or a directory")
    from alibi.storage.bucket import Bucket, open_bucket  # which is a store too

    return Bucket(open_bucket(found[1], found[2]), f"{found[1]}://{found[2]}", found[3] or "")


def encoded(content: str | bytes | memoryview) -> bytes | memoryview:
    return content.encode() if isinstance(content, str) else content
