"""The shortest form of tools/fault_test.py: a killed training ends with the numbers of an undisturbed one."""

import subprocess
import sys

import pytest

from tests.hosts import ROOT

pytestmark = pytest.mark.slow


def test_a_killed_training_leaves_no_difference() -> None:
    """The long form kills each command, flips bits of each kind of file and starts twice."""
    none = [f"--{flag}=" for flag in ("kinds", "small", "starts")]
    command = [sys.executable, "-m", "tools.fault_test", "--kills=1", "--commands=train", *none]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills of train: 1\n" in done.stdout
    assert "differences: 0, other mistakes: 0\n" in done.stdout
