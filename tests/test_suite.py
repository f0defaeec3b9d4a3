"""The suite keeps compiled programs between runs, and a list of slow tests."""

import os
import pathlib
import time

from jax._src.compilation_cache import compress_executable

from tests import slow
from tests.compilations import SETTLED, make_folder, tidy


def test_kept_programs_are_whole_and_the_longest_unused_go_first(tmp_path: pathlib.Path) -> None:
    folder = make_folder(tmp_path)
    assert make_folder(tmp_path) == folder
    other = folder.parent / "of-another-jax"
    other.mkdir()
    content = compress_executable(os.urandom(1000))
    now = time.time()

    def write(path: pathlib.Path, content: bytes, age: float) -> None:
        path.write_bytes(content)
        os.utime(path, (now - age, now - age))

    def left(limit: int) -> set[str]:
        tidy(folder, limit)
        return {path.name.removesuffix("-cache") for path in folder.parent.glob("*/*-cache")}

    write(folder / "in-part-cache", content[:500], age=2 * SETTLED)
    write(folder / "in-the-making-cache", content[:500], age=0)
    assert left(limit=10_000) == {"in-the-making"}
    write(folder / "used-cache", content, age=30)
    write(other / "old-cache", content, age=60)
    write(folder / "unused-cache", content, age=90)
    assert left(limit=10_000) == {"in-the-making", "used", "old", "unused"}
    assert left(limit=500 + 2 * len(content)) == {"in-the-making", "used", "old"}


def test_each_slow_test_is_there() -> None:
    """A test with a new name would be quick again."""
    root = pathlib.Path(__file__).parents[1]
    for name in slow.names():
        file, _, test = name.partition("::")
        assert f"\ndef {test.partition('[')[0]}(" in (root / file).read_text(), name
