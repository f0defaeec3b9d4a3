"""The processes of several hosts: how they join, exchange values and agree.

Every process must call each function but `is_primary` and `is_lost_connection` at the same place of
the program. A single process exchanges nothing. If a process is lost, JAX ends the others within
about a minute by a signal, or their collectives fail.
"""

import itertools
import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from alibi.errors import UserError

Result = TypeVar("Result")

JOIN_SECONDS = 300  # in which all processes must come
HEARTBEAT_SECONDS = 60  # without a heartbeat for so long a process is lost
# for which a process waits for the others, which may be tokenizing a large corpus
WAIT_SECONDS = 7 * 24 * 3600
LOST = re.compile(
    r"gloo|nccl|connection (closed|reset)|broken pipe|timed? ?out|unavailable|coordination", re.I
)
_exchanges = itertools.count()  # all processes count alike


def join(
    address: str | None, count: int | None, number: int | None, *, keep_sigterm: bool = True
) -> None:
    """Connects to the other processes; see `jax.distributed.initialize` for the first three
    arguments.

    Args:
      keep_sigterm: restore this process's handler of SIGTERM. Else JAX keeps the signal, and tells
        all processes of it by `multihost_utils.reached_preemption_sync_point`.

    Raises:
      ValueError: the address, the count or the number is missing, and the cluster doesn't provide
        it.
    """
    # no Python runs while C++ waits for the others
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    jax.distributed.initialize(
        address,
        count,
        number,
        local_devices(os.environ),
        initialization_timeout=JOIN_SECONDS,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    if keep_sigterm:
        signal.signal(signal.SIGTERM, handler)


def local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Returns the visible GPUs for a Slurm task; None leaves the choice to JAX.

    JAX takes one GPU for each task. Here the only task of a node takes all GPUs of the node,
    several tasks share them evenly, and a task takes its own GPUs if Slurm has bound it to some.
    """
    gpus = len(
        [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    )
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if not gpus or not tasks or "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    per_node, per_task = (
        int((re.findall(r"\d+", environment.get(name, "")) or [0])[-1])  # "4", or "a100:4"
        for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK")
    )
    share = gpus // int(tasks[0])
    if gpus < per_node or gpus == per_task or not share:
        return list(range(gpus))
    first = int(environment["SLURM_LOCALID"]) * share
    return list(range(first, first + share))


def is_primary() -> bool:
    """Returns whether this is process 0, which alone writes files and prints."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def gather(value: Any, *, seconds: int = WAIT_SECONDS) -> list[Any]:
    """Returns the `value` of each process, in their order; JSON must be able to hold it.

    Processes wait for each other in JAX's coordination service, since collectives of devices have
    time limits of their own. If a process doesn't come within so many `seconds`, the others fail.
    """
    if not jax.distributed.is_initialized():
        return [value]
    from orbax.checkpoint import multihost  # its import takes seconds

    multihost.get_barrier_sync_fn()(key=f"alibi-{next(_exchanges)}", timeout_ms=1000 * seconds)
    text = json.dumps(value).encode()
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    width = 1 << int(sizes.max()).bit_length()  # few shapes, each compiled once
    padded = np.frombuffer(text.ljust(width), np.uint8)
    return [json.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded)]


def broadcast(ask: Callable[[], Result]) -> Result:
    """Runs `ask` on process 0 and returns its result, which JSON can hold, on every process.

    Raises:
      UserError: `ask` failed; process 0 raises its own error.
    """
    if not jax.distributed.is_initialized():
        return ask()
    result, failure = None, None
    if is_primary():
        try:
            result = ask()
        except Exception as error:
            failure = error
    result, reason = gather((result, failure and f"{type(failure).__name__}: {failure}"))[0]
    if failure is not None:
        raise failure
    if reason is not None:
        raise UserError(f"process 0 failed: {reason}")
    return result


def check_alike(facts: dict[str, Any]) -> None:
    """Raises ValueError on every process, naming all differing keys, if `facts` differ between
    processes.
    """
    everywhere = gather(facts)
    differing = []
    for key in sorted(set().union(*everywhere)):
        values = [json.dumps(there.get(key)) for there in everywhere]
        if len(set(values)) > 1:
            shown = (f"{value} on process {values.index(value)}" for value in dict.fromkeys(values))
            differing.append(f"  {key}: {', '.join(shown)}")
    if differing:
        raise ValueError(
            "the processes differ; start the same command and code on all:\n" + "\n".join(differing)
        )


def is_lost_connection(error: BaseException) -> bool:
    """Returns whether `error` says that another process, or the network to it, was lost."""
    several = jax.distributed.is_initialized()
    return (
        several and isinstance(error, jax.errors.JaxRuntimeError) and bool(LOST.search(str(error)))
    )
