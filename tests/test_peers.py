"""What processes tell each other, and how they end: together, or in a line that says why."""

import json
import pathlib
import re
import sys

import pytest

from alibi.parallel.peers import local_devices
from tests.hosts import ON, free_port, said_at_the_end, start


def test_the_gpus_of_a_task_of_slurm() -> None:
    """One task a node takes all, several take their shares, and tasks bound to GPUs of their own take these."""
    node = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert local_devices(node) == [0, 1, 2, 3]
    share = node | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "3"}
    assert local_devices(share) == [3]
    assert local_devices(share | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "1"}) == [2, 3]
    assert local_devices(share | {"CUDA_VISIBLE_DEVICES": "3"}) == [0]
    two = share | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "1"}
    assert local_devices(two) == [1], "both tasks see the same two"
    assert local_devices(two | {"SLURM_GPUS_ON_NODE": "4"}) == [0, 1], "of four this task sees two of its own"
    assert local_devices(two | {"SLURM_GPUS_PER_TASK": "a100:2"}) == [0, 1]
    assert local_devices(node | {"SLURM_GPUS_ON_NODE": "4"}) == [0, 1, 2, 3]
    assert local_devices(node | {"JAX_LOCAL_DEVICE_IDS": "1"}) is None
    assert local_devices({}) is None


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_waits_for_the_others_in_vain_says_so_in_a_line(number: int) -> None:
    """Where JAX aborts with the stack of its C++ code; the first process, and one whose first process isn't there."""
    address = f"localhost:{free_port()}"
    program = f"from alibi.parallel import peers; peers.JOIN_SECONDS = 2; peers.join({address!r}, 2, {number})"
    output, _ = (process := start([sys.executable, "-c", program], devices=1)).communicate(timeout=120)
    assert process.returncode == 75
    (line,) = output.splitlines()
    assert line.startswith(f"error: not all 2 processes came to {address} within 2 s: see whether each was started")


def test_a_broken_collective_ends_what_all_do_together_at_once() -> None:
    """Not after a wait for whom it lost. The error is what gloo gave where a host was killed as it scored."""
    program = f"""
import jax
from alibi.parallel import hosts, peers
peers.join("localhost:{free_port()}", 1, 0)
def score():
    raise jax.errors.JaxRuntimeError("INTERNAL: Gloo all-gather failed: Connection closed by peer [127.0.0.1]:1")
hosts.together(score)
"""
    process = start([sys.executable, "-c", program], devices=1)
    assert said_at_the_end(process) == f"error: another process was lost: its connection ended; {ON}"


def test_what_fails_alike_on_all_processes_ends_none() -> None:
    """Each has its error, as where a length needs more memory than there is: it becomes a row, and others follow."""
    program = f"""
import sys
from alibi.parallel import hosts, peers
me = int(sys.argv[1])
peers.join("localhost:{free_port()}", 2, me)
def score():
    raise MemoryError(f"too large on {{me}}")
for _ in range(2):
    try:
        hosts.alike(score)
    except MemoryError as error:
        print(error, hosts.gather(me), flush=True)
"""
    pair = [start([sys.executable, "-c", program, str(host)], devices=1) for host in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    for host, output in enumerate(outputs):
        assert output.splitlines().count(f"too large on {host} [0, 1]") == 2


def test_a_process_whose_work_is_done_waits_for_one_that_still_works() -> None:
    """JAX waits for a limited time, and would then abort the one that works; one that asks its store would crash."""
    program = """
import sys, time, jax
from alibi.parallel import peers
address, me, slow = sys.argv[1], *map(int, sys.argv[2:])
connect = jax.distributed.initialize
jax.distributed.initialize = lambda *given, **more: connect(*given, **more, shutdown_timeout_seconds=2)
peers.WATCH_SECONDS = 0
peers.join(address, 2, me)
time.sleep(6 * (me == slow))
print("done", flush=True)
"""
    words = [sys.executable, "-c", program]
    pairs = [(f"localhost:{free_port()}", slow) for slow in range(2)]
    started = [start([*words, address, str(me), str(slow)], devices=1) for address, slow in pairs for me in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 4, outputs
    assert all("done" in output.splitlines() for output in outputs)


def test_what_the_first_process_tells_is_one_key_that_each_other_reads(tmp_path: pathlib.Path) -> None:
    """So 64 hosts ask their coordinator 64 times, not 8,192; what all have read is deleted, and a failure is told."""
    program = f"""
import json, sys
from alibi.parallel import hosts, peers
me = int(sys.argv[1])
peers.join("localhost:{free_port()}", 3, me)
state = hosts.distributed.global_state
class Counted:
    def __init__(self, client): self.client, self.keys = client, dict(key_value_set=set(), blocking_key_value_get=set())
    def __getattr__(self, name): return getattr(self.client, name)
    def key_value_set(self, key, *more):
        self.keys["key_value_set"].add(key)
        return self.client.key_value_set(key, *more)
    def blocking_key_value_get(self, key, *more):
        self.keys["blocking_key_value_get"].add(key)
        return self.client.blocking_key_value_get(key, *more)
state.client = Counted(state.client)
def counts():
    found = [len(keys) for keys in state.client.keys.values()]
    for keys in state.client.keys.values(): keys.clear()
    return found
def fail():
    raise ValueError("no such run")
found = dict(told=[hosts.told(lambda: [me, number]) for number in range(100)], of_told=counts())
try:
    hosts.told(fail)
except Exception as error:
    found["failure"] = f"{{type(error).__name__}}: {{error}}"
counts()
found["gathered"], found["of_gather"] = hosts.gather(me), counts()
for number in range(3): hosts.gather(number)
found["left"] = len(state.client.key_value_dir_get("alibi/")) if me == 0 else 0
hosts.gather(None)  # none ends before that
print("found", json.dumps(found), flush=True)
"""
    processes = [start([sys.executable, "-c", program, str(number)], devices=1) for number in range(3)]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    found = [json.loads(re.search("^found (.*)", output, re.M)[1]) for output in outputs]
    assert [one["told"] for one in found] == 3 * [[[0, number] for number in range(100)]]
    assert [one["gathered"] for one in found] == 3 * [[0, 1, 2]]
    others = "UserError: process 0 failed: ValueError: no such run"
    assert [one["failure"] for one in found] == ["ValueError: no such run", others, others]
    assert [one["of_told"] for one in found] == [[100, 0], [0, 100], [0, 100]]  # keys set, keys read
    assert [one["of_gather"] for one in found] == [[1, 2], [1, 1], [1, 1]]
    assert found[0]["left"] <= 5, "of the last gathering two values and their list, and the others' next values"
