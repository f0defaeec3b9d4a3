"""Processes as hosts: how tests start them, and what they said when they end."""

import os
import pathlib
import re
import socket
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]
ON = "what was saved is whole, and the same command goes on from there"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(words: list[str], devices: int) -> subprocess.Popen:
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(processes: list[subprocess.Popen]) -> None:
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)


def changed(words: list[str], program: str) -> list[str]:
    """The command `words` after `program`, which changes something in its process."""
    return [words[0], "-c", f"{program}\nimport runpy; runpy.run_path({words[1]!r}, run_name='__main__')", *words[2:]]


def said_at_the_end(process: subprocess.Popen, code: int = 75) -> str:
    """The one line of a process that ends with this code; 75: it is to be started again."""
    output = process.communicate(timeout=120)[0]
    assert process.returncode == code, output
    # What JAX's own service logs of the lost connection, of one or several lines, may stand before and after it.
    logged = re.compile(r"^(?:[IWEF]\d{4} |\[Gloo\]).*?(?=^(?:[IWEF]\d{4} |\[Gloo\]|error: |stopped)|\Z)", re.M | re.S)
    told = logged.sub("", output).splitlines()
    assert len(told) == 1, output
    return told[0]
