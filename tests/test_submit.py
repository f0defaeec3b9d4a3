"""Mistakes in a job are one line before anything is submitted; a job is printed as it is given to
the cluster.
"""

import functools
import os
import pathlib
import subprocess
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SLURM, JOBSET = "--template=configs/launch/slurm.sh", "--template=configs/launch/jobset.yaml"
SWEEP, CONFIG = "--sweep=configs/sweeps/quickstart.py", "--config=configs/quickstart.py"
PAPER, TIME = "--config=configs/wikitext103.py", "--set=TIME=1:00:00"


@pytest.fixture
def submit(
    run_script, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs submit.py in this process, from the project's root."""
    monkeypatch.chdir(ROOT)
    return functools.partial(run_script, ROOT / "scripts" / "submit.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SLURM, SWEEP, CONFIG], "give --sweep=FILE.py, or --config=FILE.py of one run"),
        ([SLURM, CONFIG], "the template needs TIME; give --set=TIME="),
        ([SLURM, CONFIG, TIME, "--set=IMAGE=i"], "--set=IMAGE: no such placeholder"),
        ([SLURM, CONFIG, "--set=TIME"], "--set=TIME has no value"),
        (["--template=configs/launch", CONFIG], "--template=configs/launch can't be read"),
        (
            [SLURM, SWEEP, "--devices=64"],
            "run sinusoidal-L128-seed0: train.batch_tokens=2048 must be a multiple",
        ),
        ([SLURM, CONFIG, "--workdir=s3://b/x"], "work directory s3://b/x can't hold checkpoints"),
        ([SLURM, SWEEP, "--tasks=9"], "--tasks=9: there are 4 runs; give at most as many tasks"),
        ([JOBSET, "--config=/elsewhere/x.py"], "there is no config file"),
        (
            [JOBSET, "--config=configs/cc100_1b3.py"],
            "data.train is empty, but data.corpus=text reads files; set it",
        ),
        ([SLURM, SWEEP, TIME, "--go"], "there is no sbatch on this machine"),
    ],
    ids=lambda value: None if isinstance(value, list) else value.split(";")[0],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    submit, monkeypatch, tmp_path, words, message
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = submit(f"--workdir={tmp_path}/work", *words, code=1)
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {message}")
    assert not ended.stdout
    assert not (tmp_path / "work").exists()


def test_a_sweep_is_printed_as_an_array_and_submitted(
    submit, monkeypatch, tmp_path: pathlib.Path
) -> None:
    words = [
        SLURM,
        SWEEP,
        TIME,
        "--tasks=2",
        "--set=OPTIONS=--partition=gpu",
        f"--workdir={tmp_path}/New One",
    ]
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\ncat > {tmp_path}/given; echo 17\n")
    (tmp_path / "sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ended = submit(*words, "--go")
    assert (tmp_path / "given").read_text() + "17\n" == ended.stdout
    assert "#SBATCH --job-name=new-one\n#SBATCH --array=0-1%1000\n" in ended.stdout
    sweep = f"--sweep={ROOT}/configs/sweeps/quickstart.py '--workdir={tmp_path}/New One'"
    assert f'{ROOT}/scripts/sweep.py {sweep} "--task=$TASK/2" $multihost\n' in ended.stdout
    assert (tmp_path / "New One" / "slurm").is_dir()
    assert (tmp_path / "New One" / "sweep.json").exists()


def test_a_training_is_printed_with_its_flags(submit, tmp_path: pathlib.Path) -> None:
    """32 devices divide the batch; 4 share each part."""
    words = [
        f"{PAPER}:position=t5",
        "--devices=32",
        "--config.mesh.tensor=4",
        "--noconfig.log.tensorboard",
    ]
    ended = submit(JOBSET, *words, *(f"--set={name}=x" for name in ("IMAGE", "QUEUE", "TOPOLOGY", "HOSTS")),
                   f"--workdir={tmp_path}/new")  # fmt: skip
    config = "--config=configs/wikitext103.py:position=t5 --config.mesh.tensor=4 --config.log.tensorboard=False"
    assert f"exec python train.py {config} --workdir={tmp_path}/new $multihost\n" in ended.stdout
    warning, last = ended.stderr.splitlines()
    assert warning.startswith(
        f"jobset.yaml starts jobs in clones of their own, which don't see {tmp_path}/new; give an address"
    )
    assert last == "nothing was submitted; --go does"
    assert not (tmp_path / "new").exists()
