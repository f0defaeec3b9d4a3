"""Files and directories of this machine that a reader sees whole or not at all."""

import contextlib
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterator


@contextlib.contextmanager
def made_whole(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Gives a name beside `path` for a file or directory to be made by, which then takes the place of `path`.

    Where making it raises, nothing of it stays, and what `path` was before does.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: str | bytes | memoryview) -> None:
    """Writes the file `path`, text as UTF-8: a reader sees the old one or the new one, never a part."""
    with made_whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def is_address(place: str | os.PathLike[str]) -> bool:
    """Whether this names a place elsewhere, such as gs://BUCKET, also where a path library took one of its slashes."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(place)) is not None


def local_path(place: str | os.PathLike[str], what: str) -> pathlib.Path:
    """The path, ~ resolved; ValueError where `what` names an address, of which a path would be a local folder."""
    if is_address(place):
        raise ValueError(f"{what} is the address {place}, where a path of this machine is needed; copy or mount it")
    return pathlib.Path(place).expanduser()
