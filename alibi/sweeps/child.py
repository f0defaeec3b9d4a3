"""Runs a script as Python itself would, and writes its first error message to a file too: child.py FILE SCRIPT FLAGS.

The terminal stays the script's own, progress bars included, and no pipe can break when the
sweep is killed before its run has saved its state.
"""

import pathlib
import runpy
import sys
from typing import Any


class Stderr:
    """`stream`, of which the first text that starts with "error: " is also written to `file`."""

    def __init__(self, stream: Any, file: pathlib.Path):
        self._stream, self._file = stream, file
        self._found = False

    def write(self, text: str) -> int:
        if not self._found and text.startswith("error: "):
            self._found = True
            self._file.write_text(text.removeprefix("error: ").strip(), encoding="utf-8")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(file: str, script: str, *flags: str) -> None:
    sys.argv = [script, *flags]
    sys.path[0] = str(pathlib.Path(script).parent)
    sys.stderr = Stderr(sys.stderr, pathlib.Path(file))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
