"""Processes: how tests start and end new interpreters, and several as hosts."""

import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run_python(
    *words: object, code: int = 0, cwd: pathlib.Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a new interpreter, with more variables in its environment. It ends with `code`."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_hosts(
    words: list[str],
    devices: int,
    *more: list[str],
    folders: Sequence[pathlib.Path] = (ROOT, ROOT),
) -> list[subprocess.Popen]:
    """Starts two processes of the command `words`, each with its own `more` and current folder, that
    join as hosts.
    """
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    shared = [*words, f"--coordinator_address=localhost:{free_port()}", "--num_processes=2"]
    return [
        subprocess.Popen(
            [*shared, f"--process_id={host}", *(more[host] if more else [])],
            cwd=folders[host], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for host in range(2)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen], code: int = 0) -> list[str]:
    """Returns the output of processes that end with `code`."""
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), "\n".join(
        outputs
    )
    return outputs
