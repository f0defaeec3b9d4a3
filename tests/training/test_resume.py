"""Runs go on bitwise after a stop, a crash, a full disk or lost checkpoints, or say why they can't."""

import dataclasses
import errno
import functools
import json
import pathlib
import shutil
import signal
import sys
import threading
import time

import jax
import orbax.checkpoint as ocp
import pytest

from alibi.config import replaced
from alibi.errors import UserError
from alibi.parallel.sharding import make_mesh
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.training import loop, updates
from tests.hosts import run_python
from tests.refusals import assert_refused
from tests.training.runs import assert_same, figures, final_state, interrupt, rows, stop_at


def test_interrupt_and_resume_is_bitwise(tiny_config, tmp_path: pathlib.Path, monkeypatch) -> None:
    """Ctrl-C in the middle saves; going on gives the very bits of a run without a stop, those of
    dropout and of drawn positions too.
    """
    # Stopped between two rows of metrics, after a row at update 3: the next one is of all updates
    # since.
    drawing = {"model__max_position": 64, "model__layer_draws": True, "model__test_draws": 1}
    dropout = {"model__dropout": 0.2, "model__attention_dropout": 0.2}
    config = tiny_config(**drawing, **dropout, log__every_steps=3)
    split = {"mesh.data": -1, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.gather": "update"}
    config = replaced(config, split)
    monkeypatch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:4]))
    loop.train(config, str(tmp_path / "whole"))
    interrupt(config, tmp_path / "parts", 4)
    assert RunDirectory(tmp_path / "parts").status()["state"] == "interrupted"
    loop.train(config, str(tmp_path / "parts"))
    assert_same(final_state(config, tmp_path / "parts"), final_state(config, tmp_path / "whole"))
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")


KILLED = """
import json, os, signal, sys
from alibi.config import read_config
from alibi.training import loop, updates
get = updates.Feed.get

def killed(feed, step, **how):
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return get(feed, step, **how)

updates.Feed.get = killed
loop.train(read_config(json.loads(sys.argv[1])), sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_process_goes_on_bit_for_bit(tiny_config, whole, tmp_path: pathlib.Path) -> None:
    """kill -9 leaves no time to save: the run goes on from its last whole checkpoint."""
    run, config = RunDirectory(tmp_path / "run"), tiny_config()
    given = json.dumps(dataclasses.asdict(config))
    run_python("-c", KILLED, given, run, code=-signal.SIGKILL)
    assert run.saved_steps()[-1] in (3, 4), "update 4's checkpoint may have been half written"
    run.write_status(**(run.status() | {"peak_memory_bytes": 2**60}))
    # of all its processes
    assert loop.train(config, str(run))["peak_memory_bytes"] == 2**60
    assert_same(final_state(config, run.path), final_state(config, whole))


def test_a_full_disk_is_named_and_the_saved_stays(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    config = tiny_config()
    save = Checkpoints.save

    def full(checkpoints: Checkpoints, state: TrainState, step: int, *more: object) -> None:
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(checkpoints, state, step, *more)

    as_it_begins = RunDirectory, "claim", lambda *_: full(None, None, 4)
    for owner, name, fails in (as_it_begins, (Checkpoints, "save", full)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            said = "no space left to write .*/run"
            assert_refused(said, loop.train, config, str(tmp_path / "run"), raised=UserError)
    assert RunDirectory(tmp_path / "run").status()["state"] == "failed"
    assert int(final_state(config, tmp_path / "run").step) in (2, 3)
    assert loop.train(config, str(tmp_path / "run"))["state"] == "finished"


def test_a_disk_that_fills_as_a_checkpoint_is_saved_is_named_at_the_next_row(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """Not at the next checkpoint, which may be an hour and thousands of updates later."""
    failed = threading.Event()

    async def full(*_: object) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    run = RunDirectory(tmp_path / "run")
    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", full)  # in the background
    stop_at(monkeypatch, 26, lambda: (failed.wait(20), time.sleep(0.5)))
    config = tiny_config(train__steps=52, checkpoint__every_steps=25, eval__every_steps=0)
    assert_refused("no space left to write .*/run", loop.train, config, str(run), raised=UserError)
    # The rows of updates 26 and 27 are written after the failure.
    assert [row["step"] for row in rows(run.path)][-1] in (26, 27)
    assert run.saved_steps() == []


def test_lost_checkpoints(tiny_config, finished: pathlib.Path, monkeypatch, capsys) -> None:
    """Training goes on from an earlier checkpoint; without any it refuses, or it would overwrite
    the run's record.
    """
    run = RunDirectory(finished)
    assert run.status()["saved"] == 6
    shutil.rmtree(run.checkpoints / "6")
    finished_status = run.status()
    with monkeypatch.context() as patch:
        begun = []
        patch.setattr(updates.Feed, "get", lambda feed, step, **_: begun.append(step) or sys.exit())
        with pytest.raises(SystemExit):
            loop.train(tiny_config(), str(finished))
        assert begun == [4]
    run.write("status.json", finished_status)
    assert (
        "was finished before, but its checkpoint of update 6 was lost since"
        in capsys.readouterr().err
    )
    shutil.rmtree(run.checkpoints)
    run.write("status.json", run.status() | {"state": "interrupted", "saved": 4})
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert_refused("no checkpoint.* step 4", loop.train, tiny_config(), str(finished))
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    # A run that was stopped before it first saved begins again.
    run.write_status("interrupted", step=1, steps=6)
    run.check_checkpoints()


def test_a_crash_goes_on_from_the_last_checkpoint(
    tiny_config, whole, tmp_path: pathlib.Path, monkeypatch
) -> None:
    config = tiny_config()

    def crash() -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        stop_at(patch, 5, crash)
        with pytest.raises(MemoryError):
            loop.train(config, str(tmp_path / "parts"))
    status = RunDirectory(tmp_path / "parts").status()
    assert (status["state"], status["reason"]) == ("failed", "MemoryError: no memory")
    loop.train(config, str(tmp_path / "parts"))
    assert_same(final_state(config, tmp_path / "parts"), final_state(config, whole))
