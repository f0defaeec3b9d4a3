"""Signals that ask a run to stop, before its first update and after."""

import concurrent.futures
import contextlib
import os
import pathlib
import signal

import pytest

from alibi.parallel.signals import Interrupted, answered, raised
from alibi.runs import RunDirectory
from alibi.training import loop
from alibi.training.interrupt import Interrupt
from tests.training.runs import rows, stop_at

pytestmark = pytest.mark.usefixtures("one_device")


def test_a_hangup_asks_to_stop_unless_it_was_ignored_before() -> None:
    """`nohup` starts a process with the hangup of its terminal ignored, so that it goes on."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        for ignored in (True, False):
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            interrupt = Interrupt()
            with answered(interrupt.request):
                interrupt.updating()
                os.kill(os.getpid(), signal.SIGHUP)
                assert interrupt.requested(1) is not ignored
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_of_a_launcher_that_sends_them_twice_are_answered_once() -> None:
    with raised():
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # as it ends
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_is_lost_in_a_destructor_counts_before_the_first_update() -> None:
    interrupt = Interrupt()
    with contextlib.suppress(Interrupted):  # as Python does there, with a message
        interrupt.request(signal.SIGTERM, None)
    with pytest.raises(Interrupted, match="stopped before the first update; the same command goes on"):
        interrupt.updating()


def test_a_run_that_is_stopped_saves_and_validates_only_at_its_end(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """A validation may take longer than a cluster waits. Here it is due after updates 3 and 6, the last."""
    run, config = RunDirectory(tmp_path / "run"), tiny_config()
    with monkeypatch.context() as patch:
        stop_at(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(loop.Interrupted, match="stopped at update 3 of 6"):
            loop.train(config, str(run))
    assert run.saved_steps()[-1] == 3
    assert not [row for row in rows(run.path) if "valid_nll" in row]
    with monkeypatch.context() as patch:
        stop_at(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert loop.train(config, str(run))["best"]["step"] == 6
    assert [row["step"] for row in rows(run.path) if "valid_nll" in row] == [6]


def test_a_signal_before_the_first_update_leaves_what_was_there(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """As a run begins, and as it goes on from update 2; then the same command comes to its end."""
    run, config = RunDirectory(tmp_path / "run"), tiny_config(train__steps=4)

    def interrupted(where: object, name: str, number: int) -> None:
        begin = getattr(where, name)

        def signalled(*arguments: object, **named: object) -> object:
            os.kill(os.getpid(), number)
            return begin(*arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(where, name, signalled)
            with pytest.raises(loop.Interrupted, match="stopped before the first update; the same command goes on"):
                loop.train(config, str(run))

    interrupted(loop, "prepare_files", signal.SIGTERM)
    interrupted(loop, "_compile_beside", signal.SIGUSR1)
    assert run.status()["state"] == "missing"
    with monkeypatch.context() as patch:
        stop_at(patch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(loop.Interrupted, match="stopped at update 2 of 4; the same command goes on there"):
            loop.train(config, str(run))
    interrupted(concurrent.futures.ThreadPoolExecutor, "submit", signal.SIGHUP)  # of what restores
    interrupted(loop, "Record", signal.SIGINT)
    assert (run.status()["state"], run.status()["step"], run.saved_steps()) == ("interrupted", 2, [2])
    assert loop.train(config, str(run))["state"] == "finished"
