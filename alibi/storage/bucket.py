"""Files in an object store, Google's or Amazon's: each is an object, put whole, created or replaced on condition."""

import concurrent.futures
import contextlib
import datetime
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

from alibi.storage.atomic import local_path
from alibi.storage.store import LostError, Store, Version, encoded

_MANY = 16  # files that are read at a time
_NO_BUCKET = "the bucket does not exist"


class Bucket(Store):
    """What lies below `prefix` of an object store: one of obstore's, whose bucket is called `root`."""

    def __init__(self, store: Any, root: str, prefix: str = ""):
        self._store, self._root, self._prefix = store, root, prefix.strip("/")
        self._logged = ("", b"")  # the last segment of a log that this process wrote, and its content

    def __str__(self) -> str:
        return f"{self._root}/{self._prefix}".rstrip("/")

    @property
    def path(self) -> pathlib.Path:
        return local_path(str(self), "this")

    def __truediv__(self, folder: str) -> "Bucket":
        return Bucket(self._store, self._root, self._key(folder))

    def read_version(self, name: str) -> tuple[bytes, Version]:
        with self._named(name):
            found = self._store.get(self._key(name))
            return bytes(found.bytes()), _version(found.meta)

    def read_all(self, names: Sequence[str]) -> list[bytes]:
        with concurrent.futures.ThreadPoolExecutor(_MANY) as pool:
            return list(pool.map(self.read, names))

    def write(self, name: str, content: str | bytes | memoryview) -> None:
        self._check()
        with self._named(name):
            self._store.put(self._key(name), encoded(content))

    def create(self, name: str, content: str | bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        self._check()
        with self._named(name):
            try:
                self._store.put(self._key(name), encoded(content), mode="create")
            except AlreadyExistsError:
                return False
            return True

    def replace(self, name: str, content: str | bytes, version: Version) -> Version | None:
        from obstore.exceptions import PreconditionError

        self._check()
        with self._named(name):
            try:
                return _version(self._store.put(self._key(name), encoded(content), mode=version))
            except (PreconditionError, FileNotFoundError):
                return None

    def delete(self, name: str) -> None:
        self._check()
        with contextlib.suppress(FileNotFoundError), self._named(name):
            self._store.delete(self._key(name))

    def names(self, folder: str = "") -> list[str]:
        start = self._key(folder)
        with self._named(folder):
            # Of a listing, prefixes are whole parts of paths; a file itself it leaves out.
            found = [entry["path"] for entry in self._store.list(start or None).collect()]
            if not found and folder and self._is_file(start):
                found = [start]
        cut = len(self._prefix) + 1 if self._prefix else 0
        return sorted(path[cut:] for path in found)

    def folders(self) -> list[str]:
        with self._named(""):
            found = self._store.list_with_delimiter(self._prefix or None)["common_prefixes"]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def _is_file(self, key: str) -> bool:
        try:
            self._store.head(key)
        except FileNotFoundError:
            return False
        return True

    def check_writable(self) -> None:
        probe = f".writable-{os.urandom(4).hex()}"
        self.write(probe, "")
        self.delete(probe)

    def lock(self, name: str) -> IO[Any] | None:
        return None

    @contextlib.contextmanager
    def fetched(self, name: str) -> Iterator[pathlib.Path]:
        with tempfile.TemporaryDirectory(prefix="alibi-fetched-") as directory:
            names = self.names(name)
            for file, content in zip(names, self.read_all(names), strict=True):
                path = pathlib.Path(directory, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            yield pathlib.Path(directory, name)

    @contextlib.contextmanager
    def made(self, name: str) -> Iterator[pathlib.Path]:
        with tempfile.TemporaryDirectory(prefix="alibi-made-") as directory:
            made = pathlib.Path(directory, "made")
            yield made
            self._upload(made, name)

    @contextlib.contextmanager
    def filled(self, folder: str) -> Iterator[pathlib.Path]:
        with tempfile.TemporaryDirectory(prefix="alibi-filled-") as directory:
            try:
                yield pathlib.Path(directory)
            finally:
                self._upload(pathlib.Path(directory), folder)

    def _upload(self, made: pathlib.Path, name: str) -> None:
        for path in (made, *sorted(made.rglob("*"))):
            if path.is_file():
                self.write((pathlib.PurePosixPath(name) / path.relative_to(made)).as_posix(), path.read_bytes())

    def log(self, name: str, row: dict[str, Any]) -> None:
        segment, line = f"{name}/{row['step']:010d}.jsonl", json.dumps(row).encode() + b"\n"
        before = self._logged[1] if self._logged[0] == segment else b""
        if not self._extended(segment, before, before + line):
            raise LostError(f"{self}/{segment} was written by another process; this one stops: start only one")
        self._logged = segment, before + line

    def _extended(self, name: str, before: bytes, after: bytes) -> bool:
        """Writes a file that is `before`, or empty and not there; False where it is, or becomes, something else."""
        if not before:
            return self.create(name, after) or self.read(name) == after  # of which the answer was lost
        try:
            there, version = self.read_version(name)
        except FileNotFoundError:
            return False
        return there == before and (self.replace(name, after, version) is not None or self.read(name) == after)

    def drop_log(self, name: str, step: int) -> None:
        self._logged = ("", b"")
        for segment in self.names(name):
            if int(pathlib.PurePosixPath(segment).stem) > step:
                self.delete(segment)

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self._prefix, name)))

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Errors of the object store, which are pages long, in one line with what they are about."""
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError as error:
            missing = _NO_BUCKET if "NoSuchBucket" in str(error) else "it is missing"
            raise FileNotFoundError(f"{self._root}/{self._key(name)}: {missing}") from None
        except BaseError as error:
            first_line = _NO_BUCKET if "NoSuchBucket" in str(error) else str(error).strip().splitlines()[0]
            raise OSError(f"{self._root}/{self._key(name)}: {first_line[:300]}") from None


def open_bucket(scheme: str, bucket: str) -> Any:
    """A bucket, by the credentials and the emulator that the environment names as for each vendor's own programs."""
    from obstore.store import GCSStore, S3Store

    # Its own patience is three minutes and ten tries.
    options: dict[str, Any] = {"retry_config": {"max_retries": 5, "retry_timeout": datetime.timedelta(seconds=30)}}
    endpoint = os.environ.get("AWS_ENDPOINT_URL" if scheme == "s3" else "STORAGE_EMULATOR_HOST", "")
    if endpoint.startswith("http:"):
        options["client_options"] = {"allow_http": True}
    if scheme == "s3":
        return S3Store(bucket, **options)
    if endpoint:
        nobody: dict[str, Any] = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        options["service_account_key"] = json.dumps(nobody | {"gcs_base_url": endpoint, "disable_oauth": True})
    return GCSStore(bucket, **options)


def _version(meta: Any) -> Version:
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key)}
