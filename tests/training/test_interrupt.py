"""Signals stop a run, before its first update and after."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest

from alibi.errors import REQUEUE, Interrupted, signals_handled, signals_raised
from alibi.runs import RunDirectory
from alibi.training import loop, updates
from tests.training.runs import interrupt, rows, stop_at


def test_a_hangup_asks_to_stop_unless_it_was_ignored_before() -> None:
    """`nohup` starts a process with SIGHUP ignored, and it goes on after its terminal is closed."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        for ignored in (True, False):
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            request = loop.StopRequest()
            with signals_handled(request.answer):
                os.kill(os.getpid(), signal.SIGHUP)
            assert request.reached(1) is not ignored
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_of_a_launcher_that_sends_them_twice_are_answered_once() -> None:
    with signals_raised() as received:
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)  # while the process ends
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_ends_a_process_whose_main_thread_computes_in_a_library() -> None:
    """Such as XLA, in which a compilation takes minutes; Python's handlers run only after it."""
    words = [sys.executable, "-c", BLOCKED]
    blocked = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert blocked.stdout is not None
    blocked.stdout.readline()
    start = time.monotonic()
    blocked.terminate()
    _, messages = blocked.communicate(timeout=60)
    assert (blocked.returncode, time.monotonic() - start < 30) == (REQUEUE, True)
    assert messages.strip() == "stopped; all work is saved, and the same command goes on"


BLOCKED = """
import hashlib, threading
from alibi.errors import signals_raised
with signals_raised():
    threading.Timer(0.5, print, [""], {"flush": True}).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def test_a_signal_whose_exception_is_lost_in_a_destructor_is_sent_again() -> None:
    class Signalled:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    start = time.monotonic()
    with signals_raised() as received:
        Signalled()
        with pytest.raises(Interrupted):
            time.sleep(60)
    assert (received, time.monotonic() - start < 30) == ([signal.SIGTERM], True)


def test_a_signal_whose_exception_is_lost_in_a_callback_counts_before_the_first_update(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    begin = loop.Updates

    def losing(*arguments: object) -> loop.Updates:
        with contextlib.suppress(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
        return begin(*arguments)

    monkeypatch.setattr(loop, "Updates", losing)
    with pytest.raises(Interrupted):
        loop.train(tiny_config(), str(tmp_path / "run"))
    assert RunDirectory(tmp_path / "run").status()["state"] == "missing"


def test_a_run_that_is_stopped_saves_and_validates_only_at_its_end(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """A validation may take longer than a cluster waits. Here it is due after updates 3 and 6, the
    last.
    """
    run, config = RunDirectory(tmp_path / "run"), tiny_config()
    interrupt(config, run.path, 3, signal.SIGTERM)
    assert run.saved_steps()[-1] == 3
    assert not [row for row in rows(run.path) if "valid_nll" in row]
    stop_at(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert loop.train(config, str(run))["best"]["step"] == 6
    assert [row["step"] for row in rows(run.path) if "valid_nll" in row] == [6]


def test_a_signal_before_the_first_update_changes_nothing(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """As a run begins, and as it goes on from update 2; then the same command comes to its end."""
    run, config = RunDirectory(tmp_path / "run"), tiny_config()

    def interrupted(module: types.ModuleType, name: str, number: int) -> None:
        begin = getattr(module, name)

        def signalled(*arguments: object, **named: object) -> object:
            os.kill(os.getpid(), number)
            return begin(*arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, signalled)
            with pytest.raises(loop.Interrupted):
                loop.train(config, str(run))

    interrupted(loop, "make_job", signal.SIGTERM)
    interrupted(updates, "initial_state", signal.SIGUSR1)
    assert run.status()["state"] == "missing"
    interrupt(config, run.path, 2, signal.SIGTERM)
    interrupted(updates, "Record", signal.SIGINT)
    assert (run.status()["state"], run.status()["step"], run.saved_steps()) == (
        "interrupted",
        2,
        [2],
    )
    assert loop.train(config, str(run))["state"] == "finished"
