"""Files that a reader may open at any time."""

import os
import pathlib


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes the file `path`, text as UTF-8: a reader sees the old one or the new one, never a part."""
    path = pathlib.Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
