"""Templates of jobs: placeholders, restarts after a stop or a kill, none after a failure, and
fields of Kubernetes.
"""

import os
import re
import stat
import subprocess
from typing import Any

import pytest
import yaml

from alibi.errors import FAILED, REQUEUE
from alibi.sweeps.templates import command_line, fill, fill_tasks, job_name, submit_command
from tests.refusals import assert_refused
from tests.sweeps.sweepmaker import PROJECT

SLURM, JOBSET, TPU_VM = (
    (PROJECT / "configs" / "launch" / name) for name in ("slurm.sh", "jobset.yaml", "tpu_vm.sh")
)
COMMAND = command_line(["python", "sweep.py", "--sweep=/home/me/a b.py"], 6)
VALUES = {"NAME": "lengths", "LOGS": "/nfs/a b/slurm", "COMMAND": COMMAND, "CLONE_COMMAND": COMMAND}
SLICE = {"IMAGE": "eu.pkg.dev/me/alibi:1", "QUEUE": "research", "TOPOLOGY": "4x4", "HOSTS": "4"}


def test_placeholders_are_filled_by_the_user_else_by_the_script_else_by_default() -> None:
    template = "{{NAME}} {{TIME=1:00}} {{NAME}} {{OPTIONS=}}."
    assert fill(template, {"NAME": "a"}, {"TIME": "2"}) == "a 2 a ."
    assert fill(template, {"NAME": "a"}, {"NAME": "b"}) == "b 1:00 b ."
    assert_refused("--set=NAME=", fill, template, {}, {})
    assert_refused("--set=TIM:.* NAME, OPTIONS, TIME", fill, template, {"NAME": "a"}, {"TIM": "2"})
    assert fill_tasks("{{LAST_TASK}} of {{TASKS}}\n", {}, {}, 3) == "2 of 3\n"
    assert fill_tasks("{{TASK}}\n", {}, {}, 3) == "0\n1\n2\n"
    assert job_name("My Run_1") == "my-run-1"


def bash(
    script: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a script as bash reads it from stdin."""
    return subprocess.run(
        ["bash"], input=script, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (0, "R", 0, False),
        (FAILED, "R", 0, False),
        (REQUEUE, "R", 0, True),
        (REQUEUE, "CG", 0, False),  # Slurm ends it, and requeues a preempted job
        (129, "R", 0, True),
        (130, "R", 0, False),
        (137, "R", 99, True),
        (137, "R", 100, False),
    ],
)
def test_slurm_requeues_a_stopped_or_killed_task(tmp_path, code, state, restarts, requeued) -> None:
    """As bash runs it, for the third task of array 7; scripts take the place of srun, squeue,
    scontrol.
    """
    noting = f'echo "$@" >> {tmp_path}/'
    programs = {
        "srun": f"{noting}ran; exit {code}",
        "squeue": f"echo {state}",
        "scontrol": f"{noting}requeued",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    task = {
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    environment = (
        os.environ | task | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2"}
    )
    script = fill_tasks(SLURM.read_text(), VALUES, {"TIME": "1:00:00"}, 6)
    assert bash(script, environment).returncode == code
    words = "--kill-on-bad-exit=0 python sweep.py --sweep=/home/me/a b.py --task=2/6 --multihost\n"
    assert (tmp_path / "ran").read_text() == words
    assert (tmp_path / "requeued").exists() == requeued
    assert not requeued or (tmp_path / "requeued").read_text() == "requeue 7_2\n"


def test_options_of_slurm() -> None:
    given = {
        "TIME": "4:00:00",
        "OPTIONS": "--partition=gpu --mem=8G",
        "GRACE": "60",
        "AT_ONCE": "3",
        "NODES": "2",
    }
    script = fill_tasks(SLURM.read_text(), VALUES, given, 6)
    assert re.findall("^#SBATCH (.*)", script, re.M) == [
        "--job-name=lengths",
        "--array=0-5%3",
        "--nodes=2 --ntasks-per-node=1 --cpus-per-task=8 --partition=gpu --mem=8G",
        "--time=4:00:00",
        "--signal=TERM@60",
        "--requeue",
        "--open-mode=append",
        '--output="/nfs/a b/slurm/%x-%A_%a.log"',
    ]
    assert submit_command(script) == ["sbatch"]


# The part of the APIs of JobSet, Job and Pod that the template uses: types and needed fields ("!"),
# as in https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/ and
# https://kubernetes.io/docs/reference/kubernetes-api/. A dictionary has these fields and no others;
# a list holds such elements.
STRINGS = {"*": str}
CONTAINER = {
    "name!": str,
    "image": str,
    "command": [str],
    "args": [str],
    "ports": [{"containerPort!": int}],
    "resources": {"requests": STRINGS, "limits": STRINGS},
}
POD = {
    "restartPolicy": re.compile("Never"),  # podFailurePolicy needs it
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
POLICY = {
    "name!": re.compile("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"),
    "action!": re.compile("FailJobSet|RestartJobSet|RestartJobSetAndIgnoreMaxRestarts"),
    "onJobFailureReasons": [re.compile("BackoffLimitExceeded|DeadlineExceeded|PodFailurePolicy")],
}
SCHEMA = {
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
        "failurePolicy": {"maxRestarts": int, "rules": [POLICY]},
        "replicatedJobs": [{"name!": str, "replicas": int, "template!": {"spec": JOB}}],
    },
}


def check(value: Any, schema: Any, at: str = "") -> None:
    """Raises AssertionError if `value` does not have the types and fields of `schema`."""
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


def test_a_jobset_for_each_task_that_starts_again_after_a_stop_or_a_kill() -> None:
    text = fill_tasks(JOBSET.read_text(), VALUES, SLICE, 6)
    assert submit_command(text) == ["kubectl", "create", "--filename=-"]
    sets = list(yaml.safe_load_all(text))
    assert [one["metadata"]["name"] for one in sets] == [
        f"alibi-lengths-{number}" for number in range(6)
    ]
    said = ""
    for one in sets:
        check(one, SCHEMA)
        job = one["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
        (container,) = job["template"]["spec"]["containers"]
        said += container["args"][0].replace("exec ", "echo ")
    assert bash(said).stdout.splitlines() == [
        f"python sweep.py --sweep=/home/me/a b.py --task={number}/6 --multihost"
        for number in range(6)
    ]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    assert rule["onExitCodes"]["values"] == [REQUEUE, 129, *range(131, 160)], (
        "sorted, as the API needs"
    )
    (rule,) = one["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_tpu_vms_are_a_queued_resource_for_each_task(tmp_path) -> None:
    given = {
        "REPOSITORY": "r",
        "PROJECT": "p",
        "ZONE": "z",
        "ACCELERATOR": "v5litepod-16",
        "OPTIONS": "--spot",
    }
    text = fill_tasks(TPU_VM.read_text(), VALUES, given, 2)
    assert submit_command(text) == ["bash"]
    (tmp_path / "gcloud").write_text('#!/bin/bash\necho "$4 $5"; cat "${11#*startup-script=}"\n')
    (tmp_path / "gcloud").chmod(stat.S_IRWXU)
    ran = bash(text, os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert ran.returncode == 0
    assert re.findall("^create (.*)", ran.stdout, re.M) == ["alibi-lengths-0", "alibi-lengths-1"]
    assert re.findall("^TASK=(.*)", ran.stdout, re.M) == ["0", "1"]
