"""What engines are given to run, and that they start again what was stopped or killed, and nothing that failed."""

import os
import pathlib
import re
import shlex
import stat
import subprocess
import sys
from typing import Any

import pytest
import yaml

from alibi.errors import FAILED, REQUEUE, UserError
from alibi.sweeps import engines
from alibi.sweeps.engines import Job, Local, Slurm, check_shared, handed_over
from alibi.sweeps.jobset import JobSet
from alibi.sweeps.launchers import Command
from tests.sweeps.sweepmaker import PROJECT

SWEEP = Job("lengths", Command("scripts/sweep.py", ("--sweep=/home/me/a b.py", "--workdir=/nfs/l")), "/nfs/l", tasks=6)
TRAINING = Job("1B", Command("train.py", ("--config=configs/x.py:seed=1", "--workdir=gs://b/1B")), "gs://b/1B")
SLICE = ("eu.pkg.dev/me/alibi:1", "research", "tpu-v5-lite-podslice")


def test_a_sweep_is_an_array_of_slurm():
    python, script = sys.executable, PROJECT / "scripts" / "sweep.py"
    options = ["--partition=gpu", "--gpus-per-node=4", "--comment=for me"]
    assert (
        Slurm(time="1-12:00:00", options=options).render(SWEEP)
        == f"""\
#!/bin/bash
#SBATCH --job-name=lengths
#SBATCH --array=0-5
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=1-12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/nfs/l/slurm/%x-%A_%a.log
#SBATCH --partition=gpu
#SBATCH --gpus-per-node=4
#SBATCH '--comment=for me'

trap : TERM  # of this shell; the command answers it
srun --kill-on-bad-exit=0 {python} {script} '--sweep=/home/me/a b.py' --workdir=/nfs/l "--task=$SLURM_ARRAY_TASK_ID/6"
code=$?
echo "ended with exit code $code" >&2
# The last task of an array has the number of the array itself.
job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
# 75: stopped with what was done saved. From 129 on: killed, but by 130 a person's Ctrl-C.
again() {{ [ $code -eq 75 ] || [ $code -eq 129 ] || [ $code -gt 130 ]; }}
if again && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 100 ]; then
  # Not where Slurm ends the job itself: it requeues what it preempts, and what was cancelled is to stay so.
  [ "$(squeue --noheader --format=%t --job=$job)" != R ] || scontrol requeue $job
fi
exit $code
"""
    )


def test_a_training_of_several_machines_is_one_job_of_slurm():
    """At an address there is no place for the log, which goes where the job is submitted."""
    text = Slurm(nodes=4).render(TRAINING)
    assert "#SBATCH --nodes=4\n" in text
    assert "#SBATCH --output=%x-%j.log\n" in text
    assert f"{PROJECT}/train.py --config=configs/x.py:seed=1 --workdir=gs://b/1B --multihost\n" in text
    assert "--array" not in text
    assert "#SBATCH --array=0-5%2\n" in Slurm(at_once=2).render(SWEEP)
    assert "--time=" not in text, "the partition's own limit"


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        (["--gpus-per-node=8"], 32),
        (["--gpus-per-node=h100:8"], 32),
        (["--gpus-per-task=2"], 8),  # a task a node
        (["--gres=gpu:8"], 32),
        (["--gres=gpu:a100-sxm4:2"], 8),
        (["--gpus=8"], 8),  # of the job
        (["-G8"], 8),
        (["--gpus-per-node=8", "--gpus-per-node=4"], 16),  # the last one counts, as for sbatch
        (["--partition=gpu", "--mem=8G", "--gres=lustre:2"], None),
        (["--gpus=volta:3,kepler:5"], None),
    ],
)
def test_the_devices_of_a_job_are_the_gpus_that_its_options_ask_for(options, devices):
    assert Slurm(nodes=4, options=options).devices == devices


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (0, "R", 0, False),
        (FAILED, "R", 0, False),  # a person must mend something
        (REQUEUE, "R", 0, True),
        (REQUEUE, "CG", 0, False),  # Slurm ends it, and requeues what it preempts
        (129, "R", 0, True),  # by SIGHUP, as Python started
        (130, "R", 0, False),
        (137, "R", 99, True),
        (137, "R", 100, False),
    ],
)
def test_the_script_requeues_what_was_stopped_or_killed(tmp_path, code, state, restarts, requeued):
    """As bash runs it, for the third task of array 7; srun, squeue and scontrol are scripts that note their words."""
    programs = {"srun": f"exit {code}", "squeue": f"echo {state}", "scontrol": f'echo "$@" >> {tmp_path}/requeued'}
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    task = {
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    environment = os.environ | task | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash"], input=Slurm().render(SWEEP), text=True, env=environment, check=False)
    assert ended.returncode == code
    noted = tmp_path / "requeued"
    assert (noted.read_text() if noted.exists() else "") == ("requeue 7_2\n" if requeued else "")


# What of the JobSet's CRD and of the Job's and Pod's API is used here: types, fields and what must be there, as in
# https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/ and https://kubernetes.io/docs/reference/kubernetes-api/.
# A dictionary has these fields and no others, those with "!" at any rate; a list is one of such elements.
STRINGS = {"*": str}
CONTAINER = {
    "name!": str,
    "image": str,
    "command": [str],
    "ports": [{"containerPort!": int}],
    "resources": {"requests": STRINGS, "limits": STRINGS},
}
POD = {
    "restartPolicy": re.compile("Never"),  # which a podFailurePolicy needs
    "terminationGracePeriodSeconds": int,
    "nodeSelector": STRINGS,
    "serviceAccountName": str,
    "containers!": [CONTAINER],
}
RULE = {
    "action!": re.compile("FailJob|FailIndex|Ignore|Count"),
    "onExitCodes": {"operator!": re.compile("In|NotIn"), "values!": [int]},
}
JOB = {
    "completionMode": re.compile("Indexed|NonIndexed"),
    "parallelism": int,
    "completions": int,
    "backoffLimit": int,
    "podFailurePolicy": {"rules!": [RULE]},
    "template!": {"spec": POD},
}
JOBSET = {
    "apiVersion!": re.compile("jobset.x-k8s.io/v1alpha2"),
    "kind!": re.compile("JobSet"),
    "metadata!": {
        "name!": re.compile("[a-z]([-a-z0-9]*[a-z0-9])?"),
        "namespace": str,
        "labels": STRINGS,
        "annotations": STRINGS,
    },
    "spec!": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [
                {
                    "name!": re.compile("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"),
                    "action!": re.compile("FailJobSet|RestartJobSet|RestartJobSetAndIgnoreMaxRestarts"),
                    "onJobFailureReasons": [re.compile("BackoffLimitExceeded|DeadlineExceeded|PodFailurePolicy")],
                }
            ],
        },
        "replicatedJobs": [{"name!": str, "replicas": int, "template!": {"spec": JOB}}],
    },
}


def check(value: Any, schema: Any, at: str = "") -> None:
    """Raises AssertionError where `value` is not what `schema` has there."""
    if isinstance(schema, dict):
        fields = {key.rstrip("!"): one for key, one in schema.items()}
        assert type(value) is dict, at
        assert not [key for key in schema if key.endswith("!") and key[:-1] not in value], at
        for key, one in value.items():
            assert key in fields or "*" in fields, f"{at}: no field {key}"
            check(one, fields.get(key, fields.get("*")), f"{at}.{key}")
    elif isinstance(schema, list):
        assert type(value) is list, at
        for number, one in enumerate(value):
            check(one, schema[0], f"{at}[{number}]")
    elif isinstance(schema, re.Pattern):
        assert schema.fullmatch(value), f"{at}: {value}"
    else:
        assert type(value) is schema, f"{at}: {value!r}"


def test_a_sweep_is_one_jobset_for_each_task():
    """So that each is admitted when there is a slice for it, and not all when there is one for each."""
    engine = JobSet(*SLICE, topology="4x4")
    text = engine.render(SWEEP)
    assert text == JobSet(*SLICE, topology="4x4").render(SWEEP)
    sets = list(yaml.safe_load_all(text))
    assert [one["metadata"]["name"] for one in sets] == [f"lengths-{number}" for number in range(6)]
    for number, one in enumerate(sets):
        check(one, JOBSET)
        assert one["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
        job = one["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0), "16 chips, 4 a host"
        pod = job["template"]["spec"]
        assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"google.com/tpu": "4"}
        assert container["command"][2:] == [*SWEEP.command.flags, f"--task={number}/6", "--multihost"]


def test_a_training_on_one_host_is_one_jobset():
    engine = JobSet(*SLICE, topology="2x4", chips_per_host=8, namespace="team", service_account="writer")
    (one,) = yaml.safe_load_all(engine.render(TRAINING))
    check(one, JOBSET)
    assert one["metadata"]["name"] == "a1b", "names of Kubernetes are of small letters, and begin with one"
    assert one["metadata"]["namespace"] == "team"
    pod = one["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "writer"
    assert pod["containers"][0]["command"] == ["python", "train.py", *TRAINING.command.flags]


def test_a_jobset_starts_again_what_was_stopped_or_killed_and_fails_otherwise():
    """A code that the Job's policy names makes it fail for the one reason for which the set fails too."""
    (one,) = yaml.safe_load_all(JobSet(*SLICE, topology="2x2").render(TRAINING))
    (rule,) = one["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    again = rule["onExitCodes"]["values"]
    assert {REQUEUE, 137, 143} <= set(again)
    assert not {FAILED, 2, 130} & set(again)
    assert again == sorted(set(again)), "as the API asks"
    (rule,) = one["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Slurm(time="4h"), "--time=4h is no time of Slurm; give minutes, HH:MM:SS or D-HH:MM:SS"),
        (lambda: Slurm(options=["partition=gpu"]), "--sbatch=partition=gpu is no option of sbatch"),
        (lambda: JobSet(*SLICE, topology="16"), "--topology=16 is none of a TPU slice; give its chips, such as 4x4"),
        (
            lambda: JobSet(*SLICE, topology="2x3"),
            "--topology=2x3 has 6 chips, which --chips_per_host=4 does not divide",
        ),
        (
            lambda: JobSet("i", "q", "nonsense", topology="4x4"),
            "--accelerator=nonsense is no label of nodes with TPUs; use one of tpu-v3-device, ",
        ),
        (lambda: Local(10**6), "--at_once=1000000 must be between 1 and"),
    ],
)
def test_what_an_engine_does_not_take(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(("engine", "program"), [(Slurm(), "sbatch"), (JobSet(*SLICE, topology="4x4"), "kubectl")])
def test_an_engine_that_is_not_installed(monkeypatch, tmp_path, engine, program):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=f"there is no {program} on this machine, by which --engine="):
        engine.check_installed()
    Local().check_installed()


def test_what_an_engine_refuses_is_one_line():
    with pytest.raises(UserError, match="bash refused the job: no such partition"):
        handed_over(["bash"], "echo 'no such\npartition' >&2; exit 1")
    assert handed_over(["cat"], "17;cluster\n") == "17;cluster"


def test_local_tasks_go_on_after_a_stop_and_not_after_a_failure(tmp_path, capfd):
    """The first task is stopped, then killed, before it ends well; the second one fails."""
    script = tmp_path / "task.py"
    script.write_text(
        "import os, pathlib, signal, sys\n"
        f"task = sys.argv[1].removeprefix('--task=').replace('/', '-')\nnotes = pathlib.Path({str(tmp_path)!r}, task)\n"
        "starts = len(notes.read_text()) if notes.exists() else 0\nnotes.write_text('x' * (starts + 1))\n"
        f"if task == '1-2': sys.exit({FAILED})\n"
        f"if starts == 0: sys.exit({REQUEUE})\n"
        "if starts == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    job = Job("tasks", Command(str(script), ()), str(tmp_path), tasks=2)
    lines = Local().render(job).splitlines()
    assert [shlex.split(line)[-1] for line in lines] == ["--task=0/2", "--task=1/2"]
    assert Local(min(2, len(os.sched_getaffinity(0)))).submit(job) == FAILED
    assert [len((tmp_path / task).read_text()) for task in ("0-2", "1-2")] == [3, 1]
    assert capfd.readouterr().err.count("starts again: --task=0/2") == 2
    (tmp_path / "0-2").unlink()
    assert Local().submit(Job("tasks", job.command, job.workdir, tasks=1, restarts=0)) == REQUEUE


@pytest.mark.parametrize(
    ("accelerator", "devices"),
    [("tpu-v5-lite-podslice", 16), ("tpu-v6e-slice", 16), ("tpu-v3-slice", 32), ("tpu7x", 32)],
)
def test_a_slice_has_the_devices_that_jax_counts(accelerator, devices):
    """Of v3 and 7x a device is a core, half a chip."""
    assert JobSet("i", "q", accelerator, topology="4x4").devices == devices


def test_paths_where_the_commands_run():
    file = PROJECT / "configs" / "base.py"
    jobset = JobSet(*SLICE, topology="4x4")
    assert (Local().path_of(file), jobset.path_of(file)) == (str(file), "configs/base.py")
    with pytest.raises(ValueError, match=r"/elsewhere/x.py lies outside this repository, which is what --image holds"):
        jobset.path_of(pathlib.Path("/elsewhere/x.py"))
    with pytest.raises(
        ValueError, match=r"--workdir /x is a path, which pods don't see; give gs://BUCKET/PATH, or --sha"
    ):
        jobset.check_seen("/x", file)
    jobset.check_seen("gs://b/x", file)


@pytest.mark.parametrize(
    ("local", "said"),
    [
        (
            "/nfs/run",
            "--workdir /nfs/run lies on .* of type ext4, .*; give one on a shared file system, or gs://BUCKET",
        ),
        (
            str(PROJECT),
            f"this clone {PROJECT} lies on a file system of type ext4, which .*; clone it to a shared file sy",
        ),
        (
            "/nfs/x.py",
            "the file /nfs/x.py lies on .* of type ext4, which other machines don't see; move it to a shared",
        ),
        (
            str(pathlib.Path(sys.executable).parent.resolve()),
            "this Python of .* lies on .*; use a virtual environment on",
        ),
    ],
)
def test_slurm_asks_of_each_path_that_its_job_needs(monkeypatch, local, said):
    monkeypatch.setattr(engines, "LOCAL_PREFIXES", ())
    monkeypatch.setattr(engines, "_file_system", lambda place: "nfs4")
    Slurm().check_seen("/nfs/run", pathlib.Path("/nfs/x.py"))
    monkeypatch.setattr(engines, "_file_system", lambda place: "ext4" if str(place) == local else "nfs4")
    with pytest.raises(ValueError, match=said):
        Slurm().check_seen("/nfs/run", pathlib.Path("/nfs/x.py"))
    Slurm().check_seen("gs://b/run", pathlib.Path("/nfs/y.py")) if local == "/nfs/run" else None


def test_a_place_that_other_machines_do_not_see(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"--workdir /tmp/runs lies under /tmp, which other machines don't see; give another, or"
    ):
        check_shared("/tmp/runs", "--workdir", "give another")
    seen = pathlib.Path("/data/runs/new")
    for kind in ("ext4", "xfs", "tmpfs", "overlay"):
        monkeypatch.setattr(engines, "_file_system", lambda place, kind=kind: kind)
        with pytest.raises(ValueError, match=f"/data/runs/new lies on a file system of type {kind}, which"):
            check_shared(seen, "--workdir", "give another")
    for kind in ("nfs4", "lustre", "fuse.gcsfuse", ""):  # "": the system doesn't tell
        monkeypatch.setattr(engines, "_file_system", lambda place, kind=kind: kind)
        check_shared(seen, "--workdir", "give another")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mounted by /proc")
def test_the_type_of_a_file_system_is_that_of_the_nearest_mount():
    assert engines._file_system(pathlib.Path("/proc/self/status")) == "proc"
    assert engines._file_system(pathlib.Path("/proc-or-not")) == engines._file_system(pathlib.Path("/"))
