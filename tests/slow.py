"""The tests that are slow, as measured: python -m tests.slow LOG [SECONDS]

Writes tests/slow.txt from what `pytest --durations=0 -m ""` printed: tests of at least SECONDS, 2 if not
given. Tests that start processes, browsers or installations are marked in their files.
"""

import pathlib
import re
import sys

FILE = pathlib.Path(__file__).with_name("slow.txt")


def names() -> set[str]:
    """Returns the node ids in the list."""
    return {*FILE.read_text().splitlines()}


def main(log: str, seconds: str = "2") -> None:
    calls = re.findall(r"^([\d.]+)s call +(\S.*?)\s*$", pathlib.Path(log).read_text(), re.MULTILINE)
    slow = {name for taken, name in calls if float(taken) >= float(seconds)}
    FILE.write_text("".join(f"{name}\n" for name in sorted(slow)))


if __name__ == "__main__":
    main(*sys.argv[1:])
