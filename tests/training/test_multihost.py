"""Two processes as two hosts: each reads its own rows, and together they train the same run,
stopped or not.
"""

import json
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from alibi.config import make_config, replaced
from alibi.evaluation.evaluate import evaluate_runs
from alibi.parallel import hosts
from alibi.parallel.hosts import local_devices
from alibi.reporting.rows import read_rows
from alibi.runs import RunDirectory
from alibi.training import loop
from tests.evaluation.runs import options_of
from tests.hosts import ROOT, finish, free_port, start_hosts
from tests.training.runs import assert_same, final_state


def test_the_gpus_of_a_task_of_slurm() -> None:
    """One task a node takes all, several take their shares, and tasks bound to GPUs of their own
    take these.
    """
    node = {
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    assert local_devices(node) == [0, 1, 2, 3]
    share = node | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "3"}
    assert local_devices(share) == [3]
    assert local_devices(share | {"SLURM_GPUS_ON_NODE": "8"}) == [0, 1, 2, 3], (
        "Slurm shows each task its own"
    )
    assert local_devices(share | {"SLURM_GPUS_PER_TASK": "a100:4"}) == [0, 1, 2, 3]
    assert local_devices({"SLURM_STEP_TASKS_PER_NODE": "4"}) is None, "no GPUs"
    assert local_devices(node | {"JAX_LOCAL_DEVICE_IDS": "0"}) is None, "JAX reads it"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        # JAX raises what a computation on CPUs met as it was dispatched as a ValueError
        (ValueError("UNKNOWN: Gloo AllGather failed: [pair.cc:538] Read error [::1]:25500"), True),
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection closed"), True),
        (ValueError("the hub's model a/b can't be had (timed out)"), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
    ],
)
def test_an_error_that_a_lost_process_leaves(
    monkeypatch: pytest.MonkeyPatch, error: Exception, lost: bool
) -> None:
    assert not hosts.is_lost_connection(error), "a process alone loses none"
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert hosts.is_lost_connection(error) is lost


@pytest.mark.slow
def test_a_process_that_waits_for_another_says_so() -> None:
    address = f"localhost:{free_port()}"
    code = f"from alibi.parallel import hosts; hosts.join({address!r}, 2, 0)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    line = process.stderr.readline()
    process.kill()
    process.communicate()
    assert line.startswith(f"waiting for the other processes at {address}, for 300 s at most")


def overrides(text: pathlib.Path, cache: pathlib.Path) -> dict[str, object]:
    text, cache = str(text), str(cache)
    return {
        "data.corpus": "text", "data.train": text, "data.valid": text, "data.cache_dir": cache, "train.steps": 6,
        "train.batch_tokens": 128, "train_length": 16, "optimizer.warmup_steps": 1, "model.num_layers": 1,
        "model.width": 16, "model.num_heads": 2, "model.feed_forward": 32, "log.every_steps": 1, "eval.every_steps": 2,
        "log.tensorboard": False, "checkpoint.every_steps": 2, "eval.batch_tokens": 64,
        "eval.max_tokens": 500,
    }  # fmt: skip


def command(workdir: pathlib.Path, text: pathlib.Path, *more: str) -> list[str]:
    flags = [
        f"--config.{key}={value}"
        for key, value in overrides(text, workdir.parent / "cache").items()
    ]
    return [
        sys.executable,
        "train.py",
        "--config=configs/base.py",
        f"--workdir={workdir}",
        *flags,
        *more,
    ]


@pytest.mark.slow
def test_two_hosts_train_the_run_of_one_and_resume_it_bitwise(
    tiny_text, tmp_path: pathlib.Path
) -> None:
    """A signal to the second host stops both after the same update. Another pair goes on, trains
    without a stop, and begins a run whose second host computes other parameters: both fail, and
    nothing is saved.
    """
    text = tiny_text["train"]
    one, two, parts, other = (tmp_path / name for name in ("one", "two", "parts", "other"))
    config = replaced(make_config(), overrides(text, tmp_path / "cache"))
    loop.train(config, str(one))
    words = command(parts, text, "--config.mesh.fsdp=2")
    words[1:2] = ["-c", STOPPED]
    finish(start_hosts(words, 2), code=75)
    assert RunDirectory(parts).status()["state"] == "interrupted"
    words[2:3] = [IN_ONE_PAIR, str(two), str(other)]
    outputs = finish(start_hosts(words, 2), code=1)
    assert re.search(r"going on from the checkpoint of update [23] of 6", outputs[0]), outputs[0]
    for output in outputs:
        assert "error: after update 1, process 0 and process 1 hold different parameters" in output
        assert "Start all alike, with the same processors, devices, packages" in output
    failed = RunDirectory(other)
    assert (failed.status()["state"], failed.saved_steps()) == ("failed", [])
    run = RunDirectory(two)
    rows, alone = (
        [json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (two, one)
    )
    scores, expected = ([row for row in of if "valid_nll" in row] for of in (rows, alone))
    # 31 windows of 16, spread over 6,000 tokens
    assert [row["valid_tokens"] for row in (*scores, *expected)] == [496] * 6
    for score, single in zip(scores, expected, strict=True):
        assert score["valid_nll"] == pytest.approx(single["valid_nll"], abs=1e-4)
    samples = [row["sample"] for row in rows if "sample" in row]
    assert len(samples) == 3, "one at each validation, by all hosts together"
    assert all(re.match("the.", sample, re.DOTALL) for sample in samples)
    assert run.status()["state"] == "finished"
    assert (run.provenance()["process_count"], run.provenance()["device_count"]) == (2, 4)
    trained = [final_state(run.config(), workdir).params for workdir in (one, two)]
    # Adam turns the rounding of a key bias, whose gradient is zero, into a step; the logits don't
    # see it.
    for params in trained:
        del params["layers_0"]["attention"]["key"]["bias"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *trained)
    assert_same(*[final_state(run.config(), workdir) for workdir in (two, parts)])


IN_ONE_PAIR = """
import sys
from alibi.cli import command_line, train
from alibi.parallel import hosts
from alibi.training import loop, updates

def code(*more):
    return command_line.execute(train.main, ["train.py", *words, *more])

whole, other, *words = sys.argv[1:]
assert code() == 0
hosts.join = lambda *place, **how: None
assert code(f"--workdir={whole}", "--config.eval.sample_prompt=the", "--config.eval.sample_tokens=4") == 0
if "--process_id=1" in words:
    initial_state = updates.initial_state
    updates.initial_state = lambda *of: initial_state(*of[:-1], seed=of[-1] + 1)
sys.argv = ["train.py", *words, f"--workdir={other}"]
train.run()
"""
# The second host gets a signal in its second update; in the next seconds JAX tells the first one.
STOPPED = f"""
import os, runpy, sys, time
from alibi.training import loop, updates
get = updates.Feed.get
def stopping(feed, step, **how):
    if step == 1 and "--process_id=1" in sys.argv:
        os.kill(os.getpid(), {int(signal.SIGUSR1)})
        time.sleep(3)
    return get(feed, step, **how)
updates.Feed.get = stopping
runpy.run_path("train.py", run_name="__main__")
"""


OWN = """
import dataclasses

from alibi.positions.alibi import Alibi


@dataclasses.dataclass(frozen=True)
class Own(Alibi):
    pass
"""


# Commands one after the other in a pair of processes, whose starts would take most of the time.
IN_TURN = """
import pathlib, sys
from alibi.parallel import hosts
text, whole, out, *words = sys.argv[1:]
flags = dict(word[2:].split("=") for word in words)
hosts.join(flags["coordinator_address"], 2, int(flags["process_id"]))

from alibi.config import make_config, replaced
from alibi.config.override import Override
from alibi.evaluation.evaluate import evaluate_runs
from alibi.training import loop, updates
from tests.evaluation.runs import options_of
from tests.training.test_multihost import overrides

def refused(call):
    try:
        call()
    except ValueError as error:
        print(error, flush=True)

out = pathlib.Path(out)
other = {} if hosts.is_primary() else {"train.steps": 7, "model.dropout": 0.5}
config = replaced(make_config(), overrides(text, out / "cache") | other)
none = {"output_dir": out / "none", "lengths": (16,)}
refused(lambda: loop.train(config, str(out / "run")))
refused(lambda: evaluate_runs([whole], options_of(**none, text_file="corpus.txt")))
assert not evaluate_runs([whole], options_of(out / "two", (16, 40), dump_nll=True))
refused(lambda: evaluate_runs([whole], options_of(**none, override=Override("own_method:Own"))))
"""


@pytest.mark.slow
def test_two_hosts_evaluate_as_one_and_refuse_what_differs(
    whole: pathlib.Path, tiny_text, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """Another config, text or method on the second host. And each host scores its part of every
    batch; the sums, the rows and the NLL of each token must not show it.
    """
    one, two, folders = (
        tmp_path / "one",
        tmp_path / "two",
        [tmp_path / "first", tmp_path / "second"],
    )
    for folder, more in zip(folders, ("", "# the\n"), strict=True):
        folder.mkdir()
        (folder / "corpus.txt").write_text(tiny_text["valid"].read_text() + more)
        (folder / "own_method.py").write_text(OWN + more)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = [sys.executable, "-c", IN_TURN, str(tiny_text["train"]), str(whole), str(tmp_path)]
    for output in finish(start_hosts(words, 2, folders=folders)):
        assert output.count("the processes differ; start the same command and code on all:") == 3
        assert "\n  model.dropout: 0.0 on process 0, 0.5 on process 1" in output
        assert "\n  train.steps: 6 on process 0, 7 on process 1" in output
        for named in ("file's sha256", "own file own_method"):
            assert re.search(rf'\n  {named}: ".*" on process 0, ".*" on process 1', output)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "none").exists()
    assert not evaluate_runs([whole], options_of(output_dir=one, lengths=(16, 40), dump_nll=True))
    alone, together = (read_rows(folder / "results.jsonl") for folder in (one, two))
    assert [row.length for row in together] == [16, 40]
    same = (
        "run",
        "step",
        "train_length",
        "evaluator",
        "cell",
        "options",
        "split",
        "seed",
    )
    for row, expected in zip(together, alone, strict=True):
        assert [getattr(row, key) for key in same] == [getattr(expected, key) for key in same]
        counts = [
            [one.results[key] for key in ("tokens", "bytes", "words")] for one in (row, expected)
        ]
        assert counts[0] == counts[1]
        assert row.results["nll_nats"] == pytest.approx(expected.results["nll_nats"], rel=1e-6)
    for path in sorted((one / "nll").iterdir()):
        with np.load(path) as expected, np.load(two / "nll" / path.name) as dump:
            np.testing.assert_array_equal(dump["targets"], expected["targets"])
            np.testing.assert_allclose(dump["nll_nats"], expected["nll_nats"], atol=1e-5)
