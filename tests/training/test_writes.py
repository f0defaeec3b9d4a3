"""Updates don't wait for rows and statuses to be written, and nothing is lost by that, in silence or at all."""

import pathlib
import threading
import time
from typing import Any

import pytest

from alibi.config import replaced
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints
from alibi.training import loop
from alibi.training.metric_writers import JsonLines
from alibi.training.record import MOST_WRITES, Writes
from tests.training.runs import rows, stop_at

pytestmark = pytest.mark.usefixtures("one_device")
SECONDS = 20.0  # for which something is waited for that comes at once


def test_writes_are_made_in_order_up_to_one_that_fails() -> None:
    made: list[int] = []
    pending, begin = Writes(), threading.Event()

    def write(number: int) -> None:
        begin.wait(SECONDS)
        made.append(number)
        if number == 2:
            raise OSError("no connection")

    for number in range(4):
        pending.add(lambda number=number: write(number))
    assert made == []
    begin.set()
    for _ in range(2):
        with pytest.raises(OSError, match="no connection"):
            pending.wait()
    with pytest.raises(OSError, match="no connection"):
        pending.add(lambda: write(4))
    pending.close()
    assert made == [0, 1, 2]


def test_no_more_writes_are_left_than_a_stop_has_time_for() -> None:
    pending, begin, added = Writes(), threading.Event(), []

    def add_all() -> None:
        for number in range(MOST_WRITES + 3):
            pending.add(begin.wait)
            added.append(number)

    thread = threading.Thread(target=add_all)
    thread.start()
    end = time.monotonic() + SECONDS
    while len(added) < MOST_WRITES and time.monotonic() < end:
        time.sleep(0.01)
    thread.join(0.2)  # in which more would be added
    assert len(added) == MOST_WRITES
    begin.set()
    thread.join(SECONDS)
    pending.wait()
    assert len(added) == MOST_WRITES + 3
    pending.close()


def test_updates_do_not_wait_for_rows_nor_for_the_status(tiny_config, tmp_path: pathlib.Path, monkeypatch) -> None:
    """As long as nothing is saved: the fourth update begins while the store still writes of the first one."""
    log, write_status, answers = JsonLines.write, RunDirectory.write_status, threading.Event()

    def answered(write: Any) -> Any:
        def late(*arguments: Any, **named: Any) -> None:
            assert answers.wait(SECONDS), "the update that would end the waiting has not begun"
            write(*arguments, **named)

        return late

    monkeypatch.setattr(JsonLines, "write", answered(log))
    monkeypatch.setattr(RunDirectory, "write_status", answered(write_status))
    stop_at(monkeypatch, 3, answers.set)
    status = loop.train(tiny_config(checkpoint__every_steps=0, eval__every_steps=0), str(tmp_path / "run"))
    assert (status["state"], status["step"], status["saved"]) == ("finished", 6, 6)
    assert [row["step"] for row in rows(tmp_path / "run") if "train_nll" in row] == [1, 2, 3, 4, 5, 6]


def test_all_rows_are_on_disk_before_a_checkpoint_is_saved(tiny_config, tmp_path: pathlib.Path, monkeypatch) -> None:
    log, save, saved = JsonLines.write, Checkpoints.save, {}

    def slow(*arguments: Any) -> None:
        time.sleep(0.1)
        log(*arguments)

    def counting(checkpoints: Checkpoints, state: Any, step: int, *more: Any) -> None:
        saved[step] = [(row["step"], "valid_nll" in row) for row in rows(tmp_path / "run")]
        save(checkpoints, state, step, *more)

    monkeypatch.setattr(JsonLines, "write", slow)
    monkeypatch.setattr(Checkpoints, "save", counting)
    loop.train(tiny_config(), str(tmp_path / "run"))
    of_three = [(1, False), (2, False), (3, False), (3, True)]
    assert saved[2] == of_three[:2]
    assert saved[4] == [*of_three, (4, False)]
    assert saved[6] == [*saved[4], (5, False), (6, False), (6, True)]


def test_a_row_that_fails_ends_training_as_the_next_one_comes(tiny_config, tmp_path: pathlib.Path, monkeypatch) -> None:
    """Without a hole between rows, and with the failure as the run's reason."""
    log = JsonLines.write

    def fail(writer: JsonLines, step: int, values: dict[str, float]) -> None:
        if step == 2:
            raise OSError("the bucket does not exist")
        log(writer, step, values)

    monkeypatch.setattr(JsonLines, "write", fail)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(OSError, match="the bucket does not exist"):
        loop.train(tiny_config(train__steps=1000, checkpoint__every_steps=0, eval__every_steps=0), str(run))
    status = run.status()
    assert (status["state"], status["reason"]) == ("failed", "OSError: the bucket does not exist")
    assert (status["step"], run.saved_steps()) == (1, [])
    assert [row["step"] for row in rows(run.path)] == [1]


def test_checkpoints_are_not_listed_for_each_row(tiny_config, tmp_path: pathlib.Path, monkeypatch) -> None:
    """Only while one is being written: the status must not name it before it is whole."""
    run, saved_steps, listed = RunDirectory(tmp_path / "run"), RunDirectory.saved_steps, []
    monkeypatch.setattr(RunDirectory, "saved_steps", lambda run: listed.append(run) or saved_steps(run))

    def settle() -> None:
        end = time.monotonic() + SECONDS
        while not saved_steps(run) or run.status()["step"] < 9:
            assert time.monotonic() < end
            time.sleep(0.01)
        listed.clear()

    config = tiny_config(train__steps=20, eval__every_steps=0)
    config = replaced(config, {"checkpoint.every_steps": 5})
    stop_at(monkeypatch, 10, settle)
    monkeypatch.setattr(loop, "_is_save_due", lambda _, step, __: step in (5, 20))
    assert loop.train(config, str(run))["saved"] == 20
    assert len(listed) <= 2, "after update 10, if that of 5 was found late, and after the last one"
