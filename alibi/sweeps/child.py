"""Runs a script as Python itself would, and writes its first error message to a file too: child.py FILE SCRIPT FLAGS.

The terminal stays the script's own, progress bars included, and no pipe can break when the
sweep is killed before its run has saved its state.
"""

import pathlib
import runpy
import sys


def main(file: str, script: str, *flags: str) -> None:
    """Runs `script`; the first text on stderr that starts with "error: " is also written to `file`, which is empty."""
    kept, write = pathlib.Path(file), sys.stderr.write

    def write_and_keep(text: str) -> int:
        if text.startswith("error: ") and not kept.stat().st_size:
            kept.write_text(text.removeprefix("error: ").strip(), encoding="utf-8")
        return write(text)

    sys.argv = [script, *flags]
    sys.path[0] = str(pathlib.Path(script).parent)
    sys.stderr.write = write_and_keep  # type: ignore[method-assign]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
