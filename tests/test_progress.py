"""Progress is a bar on a terminal and whole lines elsewhere."""

import contextlib
import os
import re
import sys
import termios

import pytest

from alibi import progress
from alibi.progress import Progress, print_line


def test_what_is_no_terminal_gets_a_line_now_and_then(monkeypatch, capsys) -> None:
    with Progress("quick", 10, "token") as shown:
        shown.update(10)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Progress("own", 2000, "update", done=500, last=True) as shown:
        shown.update(700, "loss 1.5")
        shown.update(800, "loss 1.4")
    assert shown.done == 2000
    for show in (False, True):
        with Progress("text train", None, "bytes", show=show) as shown:
            shown.update(1_500_000)
    first, *others = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"own: update 1,200 of 2,000 \(60%\), \d\d:\d\d left, loss 1.5", first)
    assert others == ["own: update 2,000 of 2,000 (100%), loss 1.4", "text train: bytes 1.50M"]


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
