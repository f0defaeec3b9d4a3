"""The check of a machine with a GPU, in the dry."""

import json
import os
import subprocess
import sys

import pytest

from tests.hosts import ROOT

pytestmark = pytest.mark.slow


def test_every_part_runs_in_the_dry(tmp_path):
    command = ["bash", ROOT / "tools" / "device_check.sh", "--dry", tmp_path / "out"]
    environment = os.environ | {"PYTHON": sys.executable}
    result = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    parts = {"attention-64.json", "attention-64.txt", "tests.txt", "train.txt"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == parts
    (row,) = json.loads((tmp_path / "out" / "attention-64.json").read_text())
    assert (row["contender"], row["failed"]) == ("t5 blocked, skip 0", None)
    assert "1 passed" in (tmp_path / "out" / "tests.txt").read_text()
    assert result.stdout.splitlines()[-1].startswith("device_check: all parts are done")


def test_a_machine_without_a_gpu_is_told_so(tmp_path):
    command = ["bash", ROOT / "tools" / "device_check.sh", tmp_path / "out"]
    environment = os.environ | {"PYTHON": sys.executable}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("device_check: JAX sees no GPU here; install jax[cuda13]")
