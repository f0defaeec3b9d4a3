"""The processes of several hosts: how they join, exchange values and agree.

Every process must call each function but `is_primary` and `is_lost_connection` at the same place of
the program. A single process exchanges nothing. If a process is lost, JAX ends the others within
about a minute by a signal, or their collectives fail.
"""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from alibi.errors import UserError

Result = TypeVar("Result")

JOIN_SECONDS = 300  # in which all processes must come
TOLD_SECONDS = 15  # after which a process that waits for them says so
HEARTBEAT_SECONDS = 60  # without a heartbeat for so long a process is lost
# for which a process waits for the others, which may be tokenizing a large corpus
WAIT_SECONDS = 7 * 24 * 3600
LOST = re.compile(
    r"gloo|nccl|connection (closed|reset)|broken pipe|timed? ?out|unavailable|coordination", re.I
)
# Environment variables that change how JAX and the libraries below it compute. A prefix would take
# in secrets, such as NVIDIA_API_KEY.
_FLAGS = (
    *("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
    *("JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DISABLE_JIT", "JAX_DEFAULT_MATMUL_PRECISION"),
    *("JAX_DEFAULT_PRNG_IMPL", "JAX_THREEFRY_PARTITIONABLE", "JAX_NUM_CPU_DEVICES"),
    *("NCCL_ALGO", "NCCL_PROTO", "MKL_CBWR", "MKL_NUM_THREADS", "OMP_NUM_THREADS"),
)
_VECTORS = re.compile(r"\b(?:avx|amx|fma|sve|asimd)\w*")  # among the flags of /proc/cpuinfo
# open, and never read, while this process lives; and the addresses of all processes
_listeners: list[socket.socket] = []
_places: list[list | None] = []
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
      ValueError: the address is not HOST:PORT, the number is not below the count, or one of the
        three is missing and the cluster doesn't provide it.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    host, _, port = (address or "host:1").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"--coordinator_address={address} must be HOST:PORT of the first process, such as "
            "localhost:12345; use a free port from 1024 to 65535"
        )
    if count is not None and not 0 <= (number or 0) < count:
        raise ValueError(
            f"--process_id={number} and --num_processes={count} do not fit; number the processes "
            "from 0, and give the number of all of them"
        )
    # no handler of Python runs while C++ waits for the others
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    waiting = threading.Timer(
        TOLD_SECONDS,
        print,
        [
            f"waiting for the other processes{f' at {address}' if address else ''}, for {JOIN_SECONDS} s in all; "
            "a process that failed before it came has said why"
        ],
        {"file": sys.stderr, "flush": True},
    )
    waiting.start()
    try:
        jax.distributed.initialize(
            address,
            count,
            number,
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
    finally:
        waiting.cancel()
    if keep_sigterm:
        signal.signal(signal.SIGTERM, handler)
    place = None
    # An address of this machine that others reach: towards the first process, or outwards.
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as way:
        way.connect((host if address else "10.255.255.255", 9))
        _listeners.append(socket.create_server((way.getsockname()[0], 0)))
        place = _listeners[-1].getsockname()
    _places.extend(gather(place))


def lost_processes() -> list[int]:
    """Returns the processes that have ended, or can't be reached, as far as it is known."""
    lost = []
    # A host's name may stand for 127.0.1.1 on that host: no other host reaches it there.
    local = [place[0].startswith("127.") for place in _places if place]
    for process, place in enumerate(_places):
        if not place or (place[0].startswith("127.") and not all(local)):
            continue
        with socket.socket() as asking:
            asking.settimeout(1)
            if asking.connect_ex(tuple(place)):
                lost.append(process)
    return lost


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
    if lines := _differing(gather(facts)):
        raise ValueError(f"the processes differ; start the same command and code on all:{lines}")


def check_same_state(
    parts: list[tuple[str, str]], facts: Callable[[], dict[str, Any]], when: str
) -> None:
    """Checks that the parts of a state that several processes hold are equal.

    Args:
      parts: the place and the digest of each part that a device of this process holds.
      facts: called if parts differ; returns possible causes.
      when: the time of the check, for the error.

    Raises:
      UserError: on every process; names the processes, and the causes that differ.
    """
    owners: dict[str, dict[str, list[int]]] = {}
    for process, there in enumerate(gather(parts)):
        for place, digest in there:
            owners.setdefault(place, {}).setdefault(digest, []).append(process)
    differing = next((groups for groups in owners.values() if len(groups) > 1), None)
    if differing is None:
        return
    causes = _differing(gather(facts())) or (
        "\n  no processor, flag, package or own file; a device may compute wrongly"
    )
    shown = " and ".join(f"process {str(sorted({*group}))[1:-1]}" for group in differing.values())
    raise UserError(
        f"{when}, {shown} hold different parameters or optimizer states: they compute differently, "
        "and nothing more is saved. Start all alike, and the same command goes on from the last "
        f"checkpoint. The processes differ in:{causes}"
    )


def computer() -> dict[str, Any]:
    """Returns the processor's instructions, devices, flags and package versions, by which processes
    of the same program may compute different numbers; hashes of flags, whose values are not shown.
    """
    cpu = pathlib.Path("/proc/cpuinfo")
    about = cpu.read_text() if cpu.exists() else ""
    device = jax.local_devices()[0]
    return {
        "vector instructions": " ".join(sorted(set(_VECTORS.findall(about)))),
        "devices": f"{device.device_kind}, {device.client.platform_version}",
        **{
            name: f"a value with hash {hashlib.sha256(value.encode()).hexdigest()[:6]}"
            for name in _FLAGS
            if (value := os.environ.get(name))
        },
        **{f"package {each.name}": each.version for each in importlib.metadata.distributions()},
    }


def _differing(everywhere: list[dict[str, Any]]) -> str:
    """Returns a line for each key whose values differ between processes."""
    lines = ""
    for key in sorted(set().union(*everywhere)):
        values = [json.dumps(there.get(key)) for there in everywhere]
        if len(set(values)) > 1:
            shown = (f"{value} on process {values.index(value)}" for value in dict.fromkeys(values))
            lines += f"\n  {key}: {', '.join(shown)}"
    return lines


def is_lost_connection(error: BaseException) -> bool:
    """Returns whether `error` says that another process, or the network to it, was lost."""
    # If a computation on CPUs fails while it is dispatched, it is a ValueError: "UNKNOWN: Gloo ..."
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or re.match("[A-Z_]+: Gloo", str(error))
    return jax.distributed.is_initialized() and bool(of_jax and LOST.search(str(error)))
