"""The check of a machine with a GPU, in the dry."""

import json
import os
import statistics
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
    benchmarks = {
        f"{part}.{kind}" for part in ("attention-64", "train-tiny") for kind in ("json", "txt")
    }
    parts = {*benchmarks, "tests.txt", "train.txt"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == parts
    (row,) = json.loads((tmp_path / "out" / "attention-64.json").read_text())
    assert (row["contender"], row["failed"]) == ("t5 blocked, skip 0", None)
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
    command = ["bash", ROOT / "tools" / "device_check.sh", tmp_path / "out"]
    environment = os.environ | {"PYTHON": sys.executable}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("device_check: JAX sees no GPU here; install jax[cuda13]")


def test_an_unknown_option_is_named():
    result = subprocess.run(
        ["bash", ROOT / "tools" / "device_check.sh", "--dryy", "out"],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "device_check: --dryy is no option; use --dry or --only=PATTERN\n"
