"""The study on a GPU, in the dry: rows and dumps come back in files, and another machine goes on from them."""

import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from alibi.evaluation.dumps import find_dumps
from alibi.reporting.recorded import find_rows
from tests.hosts import ROOT

pytestmark = pytest.mark.slow


def study(*arguments, python=sys.executable):
    command = ["bash", ROOT / "scripts" / "gpu_study.sh", *arguments]
    environment = os.environ | {"PYTHON": python}
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)


@pytest.fixture
def folders(tmp_path):
    """Two folders of results, whose work directories in the project are removed at the end."""
    before = set((ROOT / "workdirs").glob("gpu_study_dry-*"))
    yield tmp_path / "first", tmp_path / "second"
    for work in set((ROOT / "workdirs").glob("gpu_study_dry-*")) - before:
        shutil.rmtree(work)


def test_rows_and_dumps_come_back_and_another_machine_goes_on(folders, tmp_path):
    first, second = folders
    done = study("--dry", first)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = first.iterdir()
    with tarfile.open(file) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    rows = find_rows(tmp_path / "unpacked")
    assert {(row.run, row.evaluator) for row in rows if row.is_measured} == {
        (run, evaluator)
        for run in ("alibi-L64-seed0", "alibi-L256-seed0")
        for evaluator in ("perplexity", "context_use", "echo")
    }
    dumps = find_dumps([f"{tmp_path}/unpacked/nll/*.npz"])
    assert sorted((one.row.run, one.length) for one in dumps) == [
        ("alibi-L256-seed0", 64), ("alibi-L256-seed0", 256),
        ("alibi-L64-seed0", 64), ("alibi-L64-seed0", 256),
    ]  # fmt: skip
    shutil.copytree(first, second)
    again = study("--dry", second)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "training" not in again.stdout
    assert again.stdout.count("-seed0: done") == 2


def test_a_machine_without_a_gpu_is_told_so(tmp_path):
    done = study(
        tmp_path / "out", python="false"
    )  # as JAX's devices are asked in test_device_check.py
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gpu_study: JAX sees no GPU here; install jax[cuda13]")
