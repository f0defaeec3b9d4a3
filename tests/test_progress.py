"""Progress is a bar on a terminal and whole lines elsewhere."""

import contextlib
import os
import sys
import termios

import pytest

from alibi import progress
from alibi.progress import Progress, print_line


def test_what_is_no_terminal_gets_a_line_now_and_then(monkeypatch, capsys) -> None:
    clock = iter([0.0, 10.0, 31.0, 31.0, 40.0, 70.0, 70.0, 80.0, 80.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with Progress("own", 2000, "update", done=500, last=True) as shown:
        for _ in range(4):
            shown.update(350, "loss 1.5")
        shown.update(100, "loss 1.4")
    assert shown.done == 2000
    assert capsys.readouterr().err.splitlines() == [
        "own: update 1,200 of 2,000 (60%), 00:35 left, loss 1.5",  # 700 in 31 s: 800 in 35 s
        "own: update 1,900 of 2,000 (95%), 00:05 left, loss 1.5",
        "own: update 2,000 of 2,000 (100%), loss 1.4",
    ]


def test_bytes_of_an_unknown_total_and_what_is_over_at_once(monkeypatch, capsys) -> None:
    with Progress("quick", 10, "token") as shown:
        shown.update(10)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    for show in (False, True):
        with Progress("text train", None, "bytes", show=show) as shown:
            shown.update(1_500_000)
    assert capsys.readouterr().err == "text train: bytes 1.50M\n"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
def test_a_terminal_gets_a_bar_that_lines_stand_above(monkeypatch) -> None:
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress("own", 4, "update", last=True) as shown:
            shown.update(3, "loss 1.5")
            print_line("update 3: saved")
        os.set_blocking(master, False)
        drawn = ""
        with contextlib.suppress(BlockingIOError):
            while True:
                drawn += os.read(master, 10_000).decode()
    os.close(master)
    assert "\r" in drawn
    assert "update 3: saved\r\n" in drawn
    assert drawn.rstrip().endswith(
        "own: update  75%|███████████████     | 3/4, 00:00 left, loss 1.5"
    )
