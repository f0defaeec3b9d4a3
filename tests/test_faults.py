"""The short form of tools/fault_test.py: killed and damaged runs end with the numbers of an
undisturbed run.
"""

import subprocess
import sys

import pytest

from tests.hosts import ROOT

pytestmark = pytest.mark.slow

# A sweep prepares, trains and evaluates too. training/test_resume.py kills a training,
# test_identity.py misplaces files, and test_claims.py starts two. The long form has all of each.
SHORT = {
    "commands": ("sweep",),
    "kinds": ("tokens", "rows"),
    "small": ("one bit",),
    "misplaced": (),
    "starts": (),
}
COUNTED = {
    "commands": "kills of {}: 1\n",
    "kinds": "flips in {}: 1\n",
    "small": "small files, {}: 6\n",
}


def test_kills_flips_and_starts_leave_no_difference() -> None:
    command = [sys.executable, "-m", "tools.fault_test", "--kills=1", "--flips=1"]
    command += [f"--{flag}={','.join(names)}" for flag, names in SHORT.items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for flag, names in SHORT.items():
        for name in names:
            assert COUNTED[flag].format(name) in done.stdout
    assert "differences: 0, other mistakes: 0\n" in done.stdout
