"""A sweep on a real Slurm of two nodes that are both this machine, where one can be started."""

import os
import re
import shutil
import subprocess

import pytest

from tests.hosts import ROOT

pytestmark = pytest.mark.slow

ABSENT = [
    name
    for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    if shutil.which(name) is None
]


@pytest.mark.skipif(
    bool(ABSENT),
    reason=f"needs Slurm, see tools/cluster_test.sh: there is no {', '.join(ABSENT)}",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as which the nodes of Slurm run")
def test_a_sweep_by_an_array_with_a_killed_and_a_preempted_task() -> None:
    """Each run is begun once and reported; what the script compares besides is told by its exit
    code.
    """
    environment = os.environ | {"CASES": "sweep", "METHODS": "alibi", "SEEDS": "3", "COMPARE": ""}
    ended = subprocess.run(
        ["bash", "tools/cluster_test.sh"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr
    told = r"sweep: 3 runs begun once, 2 went on, 6 rows, 1 report; ended with 3 x 0, 1 x 75, 1 x 137\n"
    assert re.fullmatch(told, ended.stdout), ended.stdout
