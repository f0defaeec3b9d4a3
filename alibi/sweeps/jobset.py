"""JobSets for TPU slices of a Kubernetes cluster, which Kueue queues: one for each task, so that each waits alone.

Of a JobSet all pods are started together, one a host of the slice, and again together when one of them fails, unless
it failed with a code that says that a person must mend something. The fields are those of JobSet's API
(https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/), the labels those of Kueue and of Google's clusters
(https://cloud.google.com/kubernetes-engine/docs/how-to/tpus).
"""

import math
import os
import pathlib
import re
import sys
from typing import Any

import yaml

from alibi.errors import REQUEUE
from alibi.storage.atomic import is_address
from alibi.sweeps.definition import PROJECT
from alibi.sweeps.engines import Engine, Job, handed_over
from alibi.sweeps.launchers import Command

# Of a container: stopped with what was done saved, and killed by a signal that no person sent by Ctrl-C.
AGAIN = [REQUEUE, 129, *range(131, 160)]
# The kinds of TPU by the label that their nodes have (https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus),
# and how many devices JAX counts on each chip (alibi/parallel/device_kinds.py).
ACCELERATORS = {
    "tpu-v3-device": 2,
    "tpu-v3-slice": 2,
    "tpu-v4-podslice": 1,
    "tpu-v5-lite-device": 1,
    "tpu-v5-lite-podslice": 1,
    "tpu-v5p-slice": 1,
    "tpu-v6e-slice": 1,
    "tpu7x": 2,
}
LONGEST = 40  # of a name, of which those of jobs, pods and hosts are made, of 63 characters at most


class JobSet(Engine):
    """Slices of TPUs.

    Args:
      image: with this repository as its working directory, and what it needs installed.
      queue: the LocalQueue of Kueue.
      accelerator: the kind of TPU, one of `ACCELERATORS`.
      topology: of the slice, in chips, such as 4x4 or 2x2x2.
      chips_per_host: of its machines.
      namespace, service_account: "": the default ones; the account is by which pods reach buckets.
    """

    program = "kubectl"

    def __init__(
        self,
        image: str,
        queue: str,
        accelerator: str,
        topology: str,
        chips_per_host: int = 4,
        namespace: str = "",
        service_account: str = "",
    ):
        if accelerator not in ACCELERATORS:
            known = ", ".join(ACCELERATORS)
            raise ValueError(f"--accelerator={accelerator} is no label of nodes with TPUs; use one of {known}")
        if not re.fullmatch(r"\d+(x\d+){1,2}", topology):
            raise ValueError(f"--topology={topology} is none of a TPU slice; give its chips, such as 4x4 or 2x2x2")
        chips = math.prod(map(int, topology.split("x")))
        if chips % chips_per_host or not chips:
            raise ValueError(
                f"--topology={topology} has {chips} chips, which --chips_per_host={chips_per_host} does not divide"
            )
        self._image, self._queue, self._namespace, self._account = image, queue, namespace, service_account
        self._accelerator, self._topology = accelerator, topology
        self.hosts, self._chips = chips // chips_per_host, chips_per_host
        self.devices = chips * ACCELERATORS[accelerator]

    def path_of(self, file: pathlib.Path) -> str:
        if not file.is_relative_to(PROJECT):
            raise ValueError(f"{file} lies outside this repository, which is what --image holds; move it to configs/")
        return os.fspath(file.relative_to(PROJECT))

    def check_seen(self, workdir: str, file: pathlib.Path) -> None:
        if not is_address(workdir):
            raise ValueError(
                f"--workdir {workdir} is a path, which pods don't see; give gs://BUCKET/PATH, or --shared if they do"
            )

    def render(self, job: Job) -> str:
        name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:LONGEST].strip("-") or "job"
        name = name if name[0].isalpha() else f"a{name}"
        names = [f"{name}-{number}" for number in range(job.tasks)] or [name]
        sets = [self._set(*pair, job) for pair in zip(names, job.commands(), strict=True)]
        return yaml.safe_dump_all(sets, sort_keys=False, default_flow_style=None, width=100)

    def submit(self, job: Job) -> int:
        print(handed_over(["kubectl", "create", "--filename=-"], self.render(job)), file=sys.stderr)
        return 0

    def _set(self, name: str, command: Command, job: Job) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": name, "labels": {"kueue.x-k8s.io/queue-name": self._queue}}
        if self._namespace:
            metadata["namespace"] = self._namespace
        if self.hosts > 1:  # all pods on the hosts of one slice
            key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
            metadata["annotations"] = {key: "cloud.google.com/gke-nodepool"}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": {
                    "maxRestarts": job.restarts,
                    "rules": [
                        {"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                    ],
                },
                "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": self._job(command, job)}}],
            },
        }

    def _job(self, command: Command, job: Job) -> dict[str, Any]:
        failed = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": AGAIN}}
        return {
            "completionMode": "Indexed",
            "parallelism": self.hosts,
            "completions": self.hosts,
            "backoffLimit": 0,  # the set starts again, all of its pods together
            "podFailurePolicy": {"rules": [failed]},
            "template": {"spec": self._pod(command, job)},
        }

    def _pod(self, command: Command, job: Job) -> dict[str, Any]:
        flags = (*command.flags, "--multihost") if self.hosts > 1 else command.flags
        container = {
            "name": "main",
            "image": self._image,
            "command": ["python", command.script, *flags],
            "ports": [{"containerPort": 8471}, {"containerPort": 8482}],  # of TPU hosts, and of JAX's coordinator
            "resources": {limit: {"google.com/tpu": str(self._chips)} for limit in ("requests", "limits")},
        }
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": job.grace,
            "nodeSelector": {
                "cloud.google.com/gke-tpu-accelerator": self._accelerator,
                "cloud.google.com/gke-tpu-topology": self._topology,
            },
            **({"serviceAccountName": self._account} if self._account else {}),
            "containers": [container],
        }
