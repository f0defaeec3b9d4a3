"""The check of a machine with a GPU, in the dry."""

import json
import os
import statistics
import subprocess
import sys

import pytest

from tests.hosts import ROOT

pytestmark = pytest.mark.slow


def check(*words):
    command = ["bash", ROOT / "tools" / "device_check.sh", *words]
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)


def test_parts_run_in_the_dry(tmp_path):
    """The tests, and the benchmark of training. test_benchmark.py runs the other benchmark."""
    result = check("--dry", "--only=tests|train-tiny", tmp_path / "out")
    assert result.returncode == 0, result.stdout + result.stderr
    parts = {"tests.txt", "train-tiny.json", "train-tiny.txt"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == parts
    rows = json.loads((tmp_path / "out" / "train-tiny.json").read_text())
    names = "fox (JAX)", "Flax, no positions"
    assert [(row["contender"], row["failed"]) for row in rows] == [(name, None) for name in names]
    fox, none = (row["parameters"] for row in rows)
    # a gate for each of 4 heads reads 32 features, and has a bias
    assert fox - none == 33 * 4
    for row in rows:
        assert row["tokens_per_second"] == 64 / statistics.median(row["step_seconds"])
    assert "1 passed" in (tmp_path / "out" / "tests.txt").read_text()
    assert result.stdout.splitlines()[-1].startswith("device_check: all parts are done")


def test_a_machine_without_a_gpu_is_told_so(tmp_path):
    result = check(tmp_path / "out")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("device_check: JAX sees no GPU here; install jax[cuda13]")
