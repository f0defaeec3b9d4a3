"""Files are written whole, rows of a log are found again, and a single process at a time may write
in a place.
"""

import concurrent.futures
import fcntl
import os
import pathlib
import re
import time

import pytest
from etils import epath

from alibi.storage.claims import CLAIMS, LOCK_FILE, Claim, HeldError, LostError, is_held
from alibi.storage.files import (
    append_row,
    check_writable,
    drop_rows,
    is_address,
    listed,
    local_path,
    made_whole,
    read_log,
    resolve,
    write_whole,
)
from tests.refusals import assert_refused
from tests.storage.locks import without_locks


def test_a_file_is_replaced_and_outlives_a_failure(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "deep" / "file"
    write_whole(file, "é")
    assert file.read_text() == "é"
    write_whole(file, memoryview(b"new"))

    def fill_the_disk() -> None:
        with made_whole(file) as partial:
            partial.write_text("half")
            assert file.read_bytes() == b"new"
            raise OSError("full")

    assert_refused("full", fill_the_disk, raised=OSError)
    assert [path.name for path in file.parent.iterdir()] == ["file"]
    assert file.read_bytes() == b"new"


def test_a_directory_replaces_an_empty_one_only(tmp_path: pathlib.Path) -> None:
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


def test_a_folder_is_made_and_listed_without_files_that_are_being_written(
    tmp_path: pathlib.Path,
) -> None:
    folder = epath.Path(tmp_path / "new")
    assert listed(folder) == []
    check_writable(folder)
    assert not folder.exists()
    folder.mkdir()
    for name in ("b", "a~", "a", ".a.1234"):
        (folder / name).write_text("")
    assert [path.name for path in listed(folder)] == ["a", "a~", "b"]
    assert listed(folder / "a") == []


def test_a_log_forgets_the_rows_after_a_step(tmp_path: pathlib.Path) -> None:
    log = epath.Path(tmp_path / "run" / "metrics.jsonl")
    drop_rows(log, 1)
    assert read_log(log) == []
    rows = [
        {"step": step, "value": value}
        for step, value in ((5, 0.5), (5, 0.25), (10, 1.0), (15, 2.0))
    ]
    for row in rows:
        append_row(log, row)
    assert read_log(log) == rows
    with log.open("a") as file:
        file.write('{"step": 15, "val')
    drop_rows(log, 10)
    assert read_log(log) == rows[:3]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        *[(one, one) for one in ("gs:/b/x", "s3:///x", "gs://", "http://host/x", "s3://b/../x")],
        ("gs://user:word@b/x", "gs://***@b/x"),
        ("s3://b/x?versionId=3&X-Amz-Signature=ab", "s3://b/x?versionId=3&X-Amz-Signature=***"),
    ],
)
def test_an_address_that_cannot_be_read_is_named(address: str, shown: str) -> None:
    """Without the secrets in it."""
    assert is_address(address)
    for read, told in (
        (resolve, f"address {shown} can't be read; give gs://BUCKET/PATH, s3://BUCKET/PATH or a"),
        (lambda place: local_path(place, "--log"), f"--log is the address {shown}, where a path"),
    ):
        assert_refused(re.escape(told), read, address)


def test_paths_are_no_addresses() -> None:
    assert not any(map(is_address, ["/a/b", "a", "~/x", "c:", "./gs:/x"]))
    assert str(resolve("~")) == str(pathlib.Path.home())
    assert resolve("./~nobody") == local_path(pathlib.Path.cwd() / "~nobody", "--log")


def test_only_the_pattern_of_a_glob_is_one(tmp_path: pathlib.Path) -> None:
    for name in ("[a]*", "a", "ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.1").touch()
    folder = resolve(tmp_path / "[a]*")
    assert list(folder.glob("file.*")) == [folder / "file.1"]
    assert list((folder / "none").parent.glob("*")) == [folder / "file.1"]


@pytest.fixture
def place(tmp_path: pathlib.Path) -> epath.Path:
    return epath.Path(tmp_path / "place")


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch)


def test_a_lock_lets_one_process_in(place: epath.Path) -> None:
    assert is_held(place) is False
    held = Claim(place, "training")
    assert is_held(place) is True
    named = rf"is training in .* \(process {os.getpid()} on \S+, or one that it started\); wait"
    assert_refused(named, Claim, place, "training", raised=HeldError)
    held.check()
    held.release()
    assert is_held(place) is False
    assert listed(place) == []
    Claim(place, "training").release()
    assert (place / LOCK_FILE).read_text().count("process") == 1, "the last one alone"


def test_a_process_that_only_looks_keeps_nobody_from_a_claim(place: epath.Path) -> None:
    Claim(place, "training").release()
    with open(place / LOCK_FILE) as look, concurrent.futures.ThreadPoolExecutor(1) as pool:
        fcntl.flock(look, fcntl.LOCK_SH)
        claimed = pool.submit(Claim, place, "training")
        time.sleep(0.1)
        look.close()
        claimed.result().release()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_newest_claim_wins(place: epath.Path) -> None:
    older = Claim(place, "training")
    older.check()
    assert is_held(place) is None
    newer = Claim(place, "training")
    newer.check()
    assert_refused(r"started later .* \(00000002-.*stops", older.check, raised=LostError)
    older.release()  # takes nothing from the newer one
    newer.check()
    newer.release()
    assert listed(place / CLAIMS) == []
    assert_refused("ended", older.check, raised=LostError)


@pytest.mark.usefixtures("no_locks")
def test_of_many_claims_at_once_one_is_the_newest(place: epath.Path) -> None:
    def is_newest(claim: Claim) -> bool:
        try:
            claim.check()
        except LostError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: Claim(place, "training"), range(8)))
    assert sum(map(is_newest, claims)) == 1
