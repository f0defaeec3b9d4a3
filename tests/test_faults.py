"""The shortest form of tools/fault_test.py: a killed sweep ends with the numbers of an undisturbed one."""

import subprocess
import sys

import pytest

from tests.hosts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users")]


def test_a_killed_sweep_leaves_no_difference() -> None:
    """It prepares, trains and evaluates. Flipped bits, files of other runs, second starts and a killed
    training are in test_checkpoint.py, test_tokens.py, test_rows.py, test_identity.py, test_claims.py
    and test_resume.py; the long form has all of each.
    """
    none = [f"--{flag}=" for flag in ("kinds", "small", "starts")]
    command = [sys.executable, "-m", "tools.fault_test", "--kills=1", "--commands=sweep", *none]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills of sweep: 1\n" in done.stdout
    assert "differences: 0, other mistakes: 0\n" in done.stdout
