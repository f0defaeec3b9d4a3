"""Updates don't wait for rows and statuses to be written, and no row is lost."""

import pathlib
import threading
import time
from typing import Any

from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints
from alibi.training import loop
from alibi.training.metric_writers import JsonLines
from tests.refusals import assert_refused
from tests.training.runs import rows, stop_at

SECONDS = 20.0  # for which something is waited for that comes at once


def test_updates_do_not_wait_for_rows_nor_for_the_status(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """Without a checkpoint: the fourth update begins while the first update's row is still being
    written.
    """
    log, write_status, answers = JsonLines.write, RunDirectory.write_status, threading.Event()

    def answered(write: Any) -> Any:
        def late(*arguments: Any, **named: Any) -> None:
            assert answers.wait(SECONDS), "the update that would end the waiting has not begun"
            write(*arguments, **named)

        return late

    monkeypatch.setattr(JsonLines, "write", answered(log))
    monkeypatch.setattr(RunDirectory, "write_status", answered(write_status))
    stop_at(monkeypatch, 3, answers.set)
    status = loop.train(
        tiny_config(checkpoint__every_steps=0, eval__every_steps=0), str(tmp_path / "run")
    )
    assert (status["state"], status["step"], status["saved"]) == ("finished", 6, 6)
    assert [row["step"] for row in rows(tmp_path / "run") if "train_nll" in row] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_all_rows_are_on_disk_before_a_checkpoint_is_saved(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
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


def test_a_row_that_fails_ends_training_as_the_next_one_comes(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """With the failure as the run's reason."""
    log = JsonLines.write

    def fail(writer: JsonLines, step: int, values: dict[str, float]) -> None:
        if step == 2:
            raise OSError("the bucket does not exist")
        log(writer, step, values)

    monkeypatch.setattr(JsonLines, "write", fail)
    run = RunDirectory(tmp_path / "run")
    assert_refused(
        "bucket",
        loop.train,
        tiny_config(train__steps=52, checkpoint__every_steps=0, eval__every_steps=0),
        str(run),
        raised=OSError,
    )
    status = run.status()
    assert (status["state"], status["reason"]) == ("failed", "OSError: the bucket does not exist")
    assert run.saved_steps() == []
    assert rows(run.path)[0]["step"] == 1
