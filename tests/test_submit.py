"""What is mistaken in a job is one line before anything is submitted."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SWEEP = "--sweep=configs/sweeps/quickstart.py"
CONFIG = "--config=configs/quickstart.py"
PAPER = "--config=configs/wikitext103.py"
SLICE = ("--image=i", "--queue=q", "--topology=4x4")


def submit(*words: str, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "submit.py"), *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine=slurm", SWEEP, CONFIG, "--workdir=x"], "give --sweep=FILE.py, or --config=FILE.py of one run"),
        (
            ["--engine=local", SWEEP, "--workdir=x", "--time=1:00"],
            "--time is of --engine=slurm; leave it out of --engine=",
        ),
        (
            ["--engine=jobset", CONFIG, "--workdir=gs://b/x", *SLICE, "--image="],
            "--engine=jobset needs --image (jobset:",
        ),
        (
            ["--engine=slurm", CONFIG, "--workdir=/tmp/x"],
            "--workdir /tmp/x lies under /tmp, which other machines don't",
        ),
        (
            ["--engine=jobset", CONFIG, "--workdir=/x", *SLICE],
            "--workdir /x is a path, which pods don't see; give gs://",
        ),
        (
            ["--engine=jobset", SWEEP, "--workdir=gs://b/x", *SLICE, "--topology=8x8"],
            "run sinusoidal-L128-seed0: train.batch_tokens=2048 must be a multiple of 8192 (train_length=128 x",
        ),
        (
            ["--engine=slurm", PAPER, "--workdir=x", "--nodes=4", "--sbatch=--gpus-per-node=8"],
            "train.batch_tokens=73728 must be a multiple of 16384 (train_length=512 x train.accumulation=1 x 32 dev",
        ),
        (
            ["--engine=slurm", f"{CONFIG}:mesh.tensor=3,mesh.data=5", "--workdir=x"],
            "mesh.tensor=3 splits the heads and does not divide model.num_heads=4; use one of 1, 2, 4",
        ),
        (
            ["--engine=local", CONFIG, "--workdir=x", "--at_once=2"],
            "--at_once is of a sweep's tasks; leave it out with",
        ),
        (["--engine=slurm", CONFIG, "--workdir=s3://b/x"], "work directory s3://b/x can't hold checkpoints"),
        (
            ["--engine=slurm", SWEEP, "--workdir=x", "--tasks=9"],
            "--tasks=9: the sweep has 4 runs; give at most as many",
        ),
        (["--engine=slurm", SWEEP, "--workdir=x", "--shared", "--go"], "there is no sbatch on this machine, by which"),
    ],
    ids=lambda value: None if isinstance(value, list) else value.split(";")[0],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path: pathlib.Path, words: list[str], said: str) -> None:
    workdir = tmp_path / "work"
    ended = submit(*(f"--workdir={workdir}" if word == "--workdir=x" else word for word in words), path=str(tmp_path))
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {said}")
    assert not ended.stdout
    assert not workdir.exists()


def test_a_sweep_is_printed_with_the_options_of_its_engine(tmp_path: pathlib.Path) -> None:
    options = (
        "--nodes=2",
        "--at_once=3",
        "--time=4:00:00",
        "--sbatch=--partition=gpu",
        "--sbatch=--mem=8G",
        "--tasks=2",
    )
    ended = submit(
        "--engine=slurm", SWEEP, *options, "--restarts=5", "--grace=60", "--shared", f"--workdir={tmp_path}/new"
    )
    assert ended.returncode == 0, ended.stderr
    given = [line.removeprefix("#SBATCH ") for line in ended.stdout.splitlines() if line.startswith("#SBATCH ")]
    assert given == [
        "--job-name=new",
        "--array=0-1%3",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--time=4:00:00",
        "--signal=TERM@60",
        "--requeue",
        "--open-mode=append",
        f"--output={tmp_path}/new/slurm/%x-%A_%a.log",
        "--partition=gpu",
        "--mem=8G",
    ]
    sweep = f"--sweep={ROOT}/configs/sweeps/quickstart.py --workdir={tmp_path}/new"
    assert f'scripts/sweep.py {sweep} "--task=$SLURM_ARRAY_TASK_ID/2" --multihost\n' in ended.stdout
    assert '"${SLURM_RESTART_COUNT:-0}" -lt 5 ]' in ended.stdout


def test_the_paper_s_model_on_four_nodes_as_in_the_docs(tmp_path: pathlib.Path) -> None:
    """docs/scaling.md gives these words: 32 GPUs, of which 4 share each part of the batch, divide it."""
    words = ["--nodes=4", "--sbatch=--gpus-per-node=8", "--config.mesh.tensor=4"]
    assert " ".join(words[1:]) in (ROOT / "docs" / "scaling.md").read_text()
    ended = submit("--engine=slurm", PAPER, *words, "--shared", f"--workdir={tmp_path}/new")
    assert ended.returncode == 0, ended.stderr
    assert f"--config.mesh.tensor=4 --workdir={tmp_path}/new --multihost\n" in ended.stdout


def test_a_job_is_printed_with_what_its_config_was_given(tmp_path: pathlib.Path) -> None:
    words = [f"{CONFIG}:position=t5", "--config.train.steps", "70", "--noconfig.log.tensorboard"]
    ended = submit("--engine=slurm", *words, "--nodes=2", "--shared", f"--workdir={tmp_path}/new")
    assert ended.returncode == 0, ended.stderr
    config = f"--config={ROOT}/configs/quickstart.py:position=t5 --config.train.steps=70 --config.log.tensorboard=False"
    assert f"train.py {config} --workdir={tmp_path}/new --multihost\n" in ended.stdout
    assert ended.stderr == "nothing was submitted; --go does\n"
    assert not (tmp_path / "new").exists()
