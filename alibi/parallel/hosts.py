"""Processes on several hosts: how they join, exchange values and agree.

All processes must call a function at the same place in the program, except `is_primary` and
`is_lost_connection`. A single process exchanges nothing. If a process is lost, JAX ends the others
with a signal within about a minute, or their collectives fail.
"""

import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from alibi.errors import UserError

Result = TypeVar("Result")

JOIN_SECONDS = 300  # until all processes must have come
HEARTBEAT_SECONDS = 60  # without a heartbeat, until a process counts as lost
# until a process no longer waits for the others, which may be tokenizing a large corpus
WAIT_SECONDS = 7 * 24 * 3600
LOST = re.compile(
    r"gloo|nccl|connection (closed|reset)|broken pipe|timed? ?out|unavailable|coordination", re.I
)
_exchanges = itertools.count()  # all processes count alike


def join(
    address: str | None, count: int | None, process: int | None, *, keep_sigterm: bool = True
) -> None:
    """Connects to the other processes.

    Args:
      address, count, process: as in `jax.distributed.initialize`.
      keep_sigterm: restores this process's handler of SIGTERM. Otherwise JAX takes the signal and
        tells all processes (`multihost_utils.reached_preemption_sync_point`).

    Raises:
      ValueError: the address is not HOST:PORT, `process` is not below the count, or neither the
        arguments nor the cluster give all three.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    host, _, port = (address or "host:1").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"--coordinator_address={address} must be HOST:PORT of the first process, such as "
            "localhost:12345; use a free port from 1024 to 65535"
        )
    if count is not None and not 0 <= (process or 0) < count:
        raise ValueError(
            f"--process_id={process} and --num_processes={count} do not fit; number the processes "
            "from 0, and give the number of all of them"
        )
    # no handler of Python runs while C++ waits for the others
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    where = f" at {address}" if address else ""
    print(
        f"waiting for the other processes{where}, for {JOIN_SECONDS} s at most; a process that failed before it came "
        "has said why",
        file=sys.stderr,
    )
    try:
        jax.distributed.initialize(
            address,
            count,
            process,
            local_devices(os.environ),
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except ValueError as error:
        raise ValueError(
            f"neither flags nor a cluster that JAX knows say which process this is ({error}); give "
            "--coordinator_address=HOST:PORT of the first process, --num_processes and "
            "--process_id; a single process needs none of them, nor --multihost"
        ) from error
    if keep_sigterm:
        signal.signal(signal.SIGTERM, handler)


def local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Returns a Slurm task's GPUs, or None to leave the choice to JAX, which takes one.

    A node's only task takes all its GPUs, several share them evenly, and a task that Slurm has bound
    to GPUs takes these.
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
    """Returns whether this is process 0, the only one that writes files and prints."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def gather(value: Any, *, seconds: int = WAIT_SECONDS) -> list[Any]:
    """Returns all processes' values, in order. JSON must be able to hold them.

    Processes wait in JAX's coordination service, since device collectives have time limits. If a
    process doesn't come within `seconds`, the others fail.
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
    """Runs `ask` on process 0 and returns its result, which JSON must hold, on every process.

    Raises:
      UserError: `ask` failed. Process 0 raises its own error.
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
    """Raises ValueError on every process if `facts` differ between processes, and names the keys."""
    if lines := _differing(gather(facts)):
        raise ValueError(f"the processes differ; start the same command and code on all:{lines}")


def check_same_state(parts: list[tuple[str, str]], when: str) -> None:
    """Checks that processes with the same part of a state hold equal values.

    Args:
      parts: the name and digest of each part on this process's devices.
      when: the time, for the error.

    Raises:
      UserError: on every process, with the numbers of the processes.
    """
    owners: dict[str, dict[str, list[int]]] = {}
    for process, held in enumerate(gather(parts)):
        for name, digest in held:
            owners.setdefault(name, {}).setdefault(digest, []).append(process)
    if differing := next((groups for groups in owners.values() if len(groups) > 1), None):
        shown = " and ".join(f"process {str(sorted({*each}))[1:-1]}" for each in differing.values())
        raise UserError(
            f"{when}, {shown} hold different parameters or optimizer states: they compute differently, "
            "and nothing more is saved. Start all alike, with the same processors, devices, packages and "
            "environment variables such as XLA_FLAGS, and the same command goes on from the last checkpoint. "
            "If nothing differs, a device may compute wrongly"
        )


def _differing(everywhere: list[dict[str, Any]]) -> str:
    """Returns a line for each key that has several values."""
    lines = ""
    for key in sorted(set().union(*everywhere)):
        values = [json.dumps(there.get(key)) for there in everywhere]
        if len(set(values)) > 1:
            shown = (f"{value} on process {values.index(value)}" for value in dict.fromkeys(values))
            lines += f"\n  {key}: {', '.join(shown)}"
    return lines


def is_lost_connection(error: BaseException) -> bool:
    """Returns whether `error` means that another process, or the network to it, was lost."""
    # If a computation on CPUs fails while it is dispatched, it is a ValueError: "UNKNOWN: Gloo ..."
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or re.match("[A-Z_]+: Gloo", str(error))
    return jax.distributed.is_initialized() and bool(of_jax and LOST.search(str(error)))
