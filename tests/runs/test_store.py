"""Stores: a directory, a bucket in memory and one of an S3 server do the same; leases let one process in."""

import concurrent.futures
import contextlib
import errno
import fcntl
import functools
import json
import pathlib
import subprocess
import sys
import time
import uuid

import pytest
from obstore.store import MemoryStore

from alibi.errors import UserError
from alibi.storage.atomic import is_address
from alibi.storage.bucket import Bucket
from alibi.storage.lease import LEASE_FILE, Claim, HeldError, awaited, is_held
from alibi.storage.store import Folder, LostError, Store, open_store


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Store:
    if request.param == "folder":
        return open_store(tmp_path / "place")
    if request.param == "memory":
        return Bucket(MemoryStore(), "memory://bucket", "place")
    return open_store(f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4().hex}")


def test_files_are_read_as_they_were_written(store: Store) -> None:
    assert store.names() == []
    store.write("b/c ü=1.json", "text ü")
    store.write("a", b"bytes")
    assert store.names() == ["a", "b/c ü=1.json"]
    assert store.names("b") == ["b/c ü=1.json"]
    assert store.read("b/c ü=1.json").decode() == "text ü"
    assert store.read_all(["b/c ü=1.json", "a"]) == ["text ü".encode(), b"bytes"]
    assert (store / "b").names() == ["c ü=1.json"]
    assert [store.exists(name) for name in ("a", "b", "b/c", "c")] == [True, True, False, False]
    store.delete("a")
    store.delete("a")
    assert store.names() == ["b/c ü=1.json"]
    with pytest.raises(FileNotFoundError, match="a"):
        store.read("a")


def test_of_many_writers_one_creates(store: Store) -> None:
    store.check_writable()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda number: store.create("rows/row.json", str(number)), range(16)))
    assert sum(won) == 1
    assert store.read("rows/row.json").decode() == str(won.index(True))
    assert store.names() == ["rows/row.json"]


def test_a_file_is_replaced_only_where_it_is_the_one_that_was_read(store: Store) -> None:
    store.write("file", "1")
    version = store.read_version("file")[1]
    newer = store.replace("file", "2", version)
    assert newer is not None
    assert store.replace("file", "3", version) is None
    assert store.replace("file", "4", newer) is not None
    assert store.read("file") == b"4"
    store.delete("file")
    assert store.replace("file", "5", newer) is None


def test_directories_are_made_and_fetched_whole(store: Store) -> None:
    with store.made("tokenizer") as folder:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "words.txt").write_text("the a")
    assert store.names() == ["tokenizer/deep/words.txt"]
    with store.fetched("tokenizer") as folder:
        assert (folder / "deep" / "words.txt").read_text() == "the a"
    with contextlib.suppress(ZeroDivisionError), store.made("half") as folder:
        folder.mkdir()
        (folder / "file").write_text("")
        raise ZeroDivisionError
    assert not store.exists("half")


def test_a_log_forgets_what_came_after_a_step(store: Store) -> None:
    for step, value in ((5, 0.5), (5, 0.25), (10, 1.0), (15, 2.0)):
        store.log("metrics", {"step": step, "value": value})
    store.drop_log("metrics", 10)
    store.log("metrics", {"step": 15, "value": 3.0})
    lines = [json.loads(line) for name in store.names() for line in store.read(name).splitlines()]
    assert [(row["step"], row["value"]) for row in lines] == [(5, 0.5), (5, 0.25), (10, 1.0), (15, 3.0)]
    store.drop_log("absent", 1)


def test_segments_are_written_by_one_process() -> None:
    """Of two that think they train here, though none of the checks stopped the first one, no row is there twice."""
    one, other = (Bucket(memory, "memory://bucket") for memory in [MemoryStore()] * 2)
    one.log("metrics", {"step": 5, "value": 0.5})
    with pytest.raises(LostError, match=r"metrics/0000000005\.jsonl was written by another process"):
        other.log("metrics", {"step": 5, "value": 0.5, "of": "the other"})
    one.log("metrics", {"step": 5, "value": 0.25})
    other.drop_log("metrics", 0)
    with pytest.raises(LostError):
        one.log("metrics", {"step": 5, "value": 0.125})
    other.log("metrics", {"step": 5, "value": 1.0})
    with pytest.raises(LostError):
        one.log("metrics", {"step": 5, "value": 0.125})
    assert other.read("metrics/0000000005.jsonl") == b'{"step": 5, "value": 1.0}\n'


def test_what_fills_a_directory_is_kept_though_it_fails(store: Store) -> None:
    with contextlib.suppress(ZeroDivisionError), store.filled("tensorboard") as folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "events").write_text("1")
        raise ZeroDivisionError
    assert store.read("tensorboard/events") == b"1"


@pytest.mark.parametrize("address", ["gs:/b/x", "s3:///x", "gs://", "http://host/x", "s3://b/../x", "gs://b//x"])
def test_an_address_that_cannot_be_read_is_named(address: str) -> None:
    assert is_address(address)
    with pytest.raises(ValueError, match="give gs://BUCKET/PATH, s3://BUCKET/PATH or a directory"):
        open_store(address)


def test_paths_are_no_addresses() -> None:
    assert not any(map(is_address, ["/a/b", "a", "~/x", "c:", "./gs:/x"]))
    assert str(open_store("~")) == str(pathlib.Path.home())


def test_what_an_object_store_does_not_have_is_one_line(s3_bucket: str) -> None:
    for address, said in ((f"{s3_bucket}/none", "it is missing"), ("s3://no-bucket", "the bucket does not exist")):
        with pytest.raises(OSError, match=said) as raised:
            open_store(address).read("x")
        assert "\n" not in str(raised.value)


def claim(store: Store) -> Claim:
    return Claim(store, "training", beat=0.1, stale=0.6)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_a_lease_lets_one_in(store: Store) -> None:
    first = claim(store)
    with pytest.raises(HeldError, match=r"another process is training in .*process .* on "):
        claim(store)
    first.check()
    first.release()
    assert store.names() == []
    second = claim(store)
    second.check()
    second.release()


@pytest.mark.usefixtures("no_locks")
def test_of_many_that_want_a_lease_one_gets_it(store: Store) -> None:
    def take(_: int) -> Claim | None:
        try:
            return claim(store)
        except HeldError:
            return None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        claims = [one for one in pool.map(take, range(8)) if one is not None]
    assert len(claims) == 1
    claims[0].release()


@pytest.mark.usefixtures("no_locks")
def test_a_stale_lease_is_taken_over_and_its_holder_told(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    frozen = Claim(store, "training", beat=60, stale=60)  # shows no life for a minute
    other = claim(store)
    assert "waiting up to 1 s for a sign of it" in capsys.readouterr().err
    other.check()
    with pytest.raises(UserError, match=r"was lost: process .* has taken it over; this process stops"):
        frozen.check()
    frozen.release()  # takes nothing from the new holder
    other.check()
    other.release()


@pytest.mark.usefixtures("no_locks")
def test_the_lease_of_a_killed_process_of_this_machine_is_taken_at_once(tmp_path: pathlib.Path) -> None:
    claim(open_store(tmp_path)).release()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    killed = Claim(open_store(tmp_path), "training", beat=60, stale=60)
    lease = json.loads((tmp_path / LEASE_FILE).read_text()) | {"process": int(gone.stdout)}
    (tmp_path / LEASE_FILE).write_text(json.dumps(lease))
    start = time.monotonic()
    other = claim(open_store(tmp_path))
    assert time.monotonic() - start < 0.5  # less than until it is stale
    other.release()
    killed.release()


@pytest.mark.usefixtures("no_locks")
def test_whose_lease_was_taken_over_writes_nothing_more(store: Store) -> None:
    """It was frozen for longer than its lease lasts: the clock tells it to ask before it writes."""
    frozen = Claim(store, "training", beat=60, stale=0.6)
    frozen.store.write("status.json", "1")
    other = claim(store)
    other.store.log("metrics", {"step": 5, "value": 0.5})
    writes = (
        lambda: frozen.store.write("status.json", "2"),
        lambda: frozen.store.create("rows/new.json", "2"),
        lambda: frozen.store.log("metrics", {"step": 5, "value": 0.25}),
        lambda: frozen.store.drop_log("metrics", 0),
        lambda: frozen.store.delete("status.json"),
    )
    for write in writes:
        with pytest.raises(UserError, match="has taken it over; this process stops"):
            write()
    with pytest.raises(UserError), frozen.store.made("folder") as made:
        made.write_text("2")
    other.release()
    assert store.read("status.json") == b"1"
    (log,) = [name for name in store.names() if name != "status.json"]
    assert json.loads(store.read(log)) == {"step": 5, "value": 0.5}


def test_a_claim_that_the_clock_says_is_fresh_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(MemoryStore(), "memory://bucket")
    held = Claim(bucket, "training")
    monkeypatch.setattr(Bucket, "read_version", lambda *_: pytest.fail("it was asked"))
    held.store.write("status.json", "1")
    monkeypatch.undo()
    held.release()


@pytest.mark.usefixtures("no_locks")
def test_a_lease_that_was_removed_or_damaged_is_no_reason_to_go_on(store: Store) -> None:
    held = claim(store)
    store.delete(LEASE_FILE)
    with pytest.raises(UserError, match="it was removed"):
        held.check()
    held.release()
    store.write(LEASE_FILE, '{"half')
    again = claim(store)  # once it is stale
    again.check()
    again.release()


def test_a_directory_with_file_locks_has_no_lease(tmp_path: pathlib.Path) -> None:
    held = Claim(Folder(tmp_path), "training")
    with pytest.raises(HeldError, match="another process is training"):
        Claim(Folder(tmp_path), "training")
    held.check()
    assert not (tmp_path / LEASE_FILE).exists()
    held.release()
    Claim(Folder(tmp_path), "training").release()


def test_who_only_looks_keeps_nobody_from_a_claim(tmp_path: pathlib.Path) -> None:
    """To see whether a place is held its lock is taken for a moment, which a process that begins there waits for."""
    look = Folder(tmp_path).lock(".lock")
    assert look is not None
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        claimed = pool.submit(Claim, Folder(tmp_path), "training")
        time.sleep(0.1)
        look.close()
        claimed.result().release()


@pytest.mark.parametrize("locks", [True, False])
def test_who_waits_for_a_claim_gets_it_when_it_is_given_back(
    store: Store, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:
        request.getfixturevalue("no_locks")
    monkeypatch.setattr("alibi.storage.lease.POLL_SECONDS", 0.05)
    monkeypatch.setattr("alibi.storage.lease.Claim", functools.partial(Claim, beat=0.1, stale=0.6))
    said: list[str] = []
    assert not is_held(store)
    first = claim(store)
    assert is_held(store)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = pool.submit(awaited, store, "sweeping", said.append)
        time.sleep(0.4)
        assert not second.done()
        first.release()
        second.result(timeout=10).release()
    assert len(said) == 1
    assert said[0].startswith(f"another process is sweeping in {store}")
    assert not is_held(store)


def test_of_a_lease_that_is_old_or_damaged_nobody_is_there() -> None:
    bucket = Bucket(MemoryStore(), "memory://bucket")
    for lease in ("{", '{"time": "2026-11-01T00:00:00+00:00"}', '{"time": 1}'):
        bucket.write(LEASE_FILE, lease)
        assert not is_held(bucket)
