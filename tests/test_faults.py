"""The short form of tools/fault_test.py: killed and damaged runs end with the numbers of an
undisturbed run.
"""

import subprocess
import sys

import pytest

from tests.hosts import ROOT

pytestmark = pytest.mark.slow

STARTS = "train,train without locks"
DAMAGES = "one bit,half"
MISPLACED = "checkpoints swapped,checkpoint renamed,config"
KINDS = ("tokens", "rows")


def test_kills_flips_and_starts_leave_no_difference() -> None:
    command = [
        sys.executable,
        "-m",
        "tools.fault_test",
        "--kills=1",
        "--flips=1",
        "--hosts=0",
        f"--starts={STARTS}",
        f"--small={DAMAGES}",
        f"--misplaced={MISPLACED}",
    ]
    done = subprocess.run(
        [*command, f"--kinds={','.join(KINDS)}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("prepare", "train", "evaluate", "sweep"):
        assert f"kills of {kind}: 1\n" in done.stdout
    for kind in KINDS:
        assert f"flips in {kind}: 1\n" in done.stdout
    for damage in DAMAGES.split(","):
        assert f"small files, {damage}: 6\n" in done.stdout
    for place in MISPLACED.split(","):
        assert f"misplaced: {place}: 1\n" in done.stdout
    for start in STARTS.split(","):
        assert f"second starts of {start}: 1\n" in done.stdout
    assert "differences: 0, other mistakes: 0\n" in done.stdout
