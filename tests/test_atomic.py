"""What is written is seen whole or not at all, and nothing of a failure stays."""

import pathlib

import pytest

from alibi.storage.atomic import made_whole, write_whole


def test_a_file_is_replaced_and_what_was_there_outlives_a_failure(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    write_whole(file, "é")
    write_whole(file, memoryview(b"new"))
    assert file.read_bytes() == b"new"

    def fill_the_disk() -> None:
        with made_whole(file) as partial:
            partial.write_text("half")
            assert file.read_bytes() == b"new"
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fill_the_disk()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"new"


def test_a_directory_takes_the_place_of_an_empty_one_only(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "folder"
    for _ in range(2):
        with made_whole(folder) as partial:
            partial.mkdir()
            (partial / "file").touch()
        assert [path.name for path in folder.iterdir()] == ["file"]
        (folder / "file").unlink()
    (folder / "other").touch()
    with pytest.raises(OSError, match="not empty"), made_whole(folder) as partial:
        partial.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert [path.name for path in folder.iterdir()] == ["other"]
