"""Files and directories that a reader sees whole or not at all."""

import contextlib
import os
import pathlib
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
