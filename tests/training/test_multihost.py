"""Two processes as two hosts: each reads its own rows, and together they train the same run,
stopped or not.
"""

import pathlib
import re
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
from tests.hosts import ROOT, finish, start_hosts
from tests.training.runs import assert_same, final_state, rows


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


def test_a_process_that_waits_for_another_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *_, **__: said.append(capsys.readouterr().err)
    )
    hosts.join("localhost:9", 2, 0)
    assert said[0].startswith("waiting for the other processes at localhost:9, for 300 s at most")


def overrides(text: pathlib.Path, cache: pathlib.Path) -> dict[str, object]:
    text, cache = str(text), str(cache)
    return {
        "data.corpus": "text", "data.train": text, "data.valid": text, "data.cache_dir": cache, "train.steps": 6,
        "train.batch_tokens": 128, "train_length": 16, "optimizer.warmup_steps": 1, "model.num_layers": 1,
        "model.width": 16, "model.num_heads": 2, "model.feed_forward": 32, "log.every_steps": 1, "eval.every_steps": 2,
        "log.tensorboard": False, "checkpoint.every_steps": 2, "eval.batch_tokens": 64,
        "eval.max_tokens": 500,
    }  # fmt: skip


OWN = """
import dataclasses

from alibi.positions.alibi import Alibi


@dataclasses.dataclass(frozen=True)
class Own(Alibi):
    pass
"""


# Commands one after the other in a pair of processes, whose starts would take most of the time. The
# second host gets a signal in its second update; in the next seconds JAX tells the first one.
IN_TURN = """
import os, pathlib, signal, sys, time
from alibi.cli import command_line, train
from alibi.config import make_config, replaced
from alibi.config.override import Override
from alibi.evaluation.evaluate import evaluate_runs
from alibi.parallel import hosts
from alibi.runs import RunDirectory
from alibi.training import loop, updates
from tests.evaluation.runs import options_of
from tests.training.test_multihost import overrides

def code(name, *more):
    return command_line.execute(train.main, ["train.py", *words, f"--workdir={out / name}", *more])

def refused(call):
    try:
        call()
    except ValueError as error:
        print(error, flush=True)

def stopping(feed, step, **how):
    if step == 1 and second:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(3)
    return get(feed, step, **how)

text, one, out, *words = sys.argv[1:]
out, second, get, initial_state = pathlib.Path(out), "--process_id=1" in words, updates.Feed.get, updates.initial_state
assert code("two", "--config.eval.sample_prompt=the", "--config.eval.sample_tokens=4") == 0
hosts.join = lambda *place, **how: None

differing = {"train.steps": 7, "model.dropout": 0.5} if second else {}
config = replaced(make_config(), overrides(text, out / "cache") | differing)
none = {"output_dir": out / "none", "lengths": (16,)}
refused(lambda: loop.train(config, str(out / "none")))
refused(lambda: evaluate_runs([one], options_of(**none, text_file="corpus.txt")))
assert not evaluate_runs([one], options_of(out / "together", (16, 40), dump_nll=True))

updates.initial_state = lambda *of: initial_state(*of[:-1], seed=of[-1] + second)
assert code("other") == 1
updates.initial_state = initial_state

updates.Feed.get = stopping  # after the others, since JAX tells of this update again in each run
assert code("parts") == 75
print(hosts.is_primary() and RunDirectory(out / "parts").status()["state"], flush=True)
updates.Feed.get = get
assert code("parts") == 0
refused(lambda: evaluate_runs([one], options_of(**none, override=Override("own_method:Own"))))
"""


@pytest.mark.slow
def test_two_hosts_train_and_evaluate_the_run_of_one_and_resume_it_bitwise(
    whole: pathlib.Path, tiny_text, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """They train without a stop, and each scores its part of every batch; the sums, the rows and the
    NLL of each token must not show it. Another config, text or method on the second host is refused.
    Then a run begins whose second host computes other parameters: both fail, and nothing is saved.
    A signal to the second host stops both after the same update, and they go on.
    """
    text, folders = tiny_text["train"], [tmp_path / "first", tmp_path / "second"]
    for folder, more in zip(folders, ("", "# the\n"), strict=True):
        folder.mkdir()
        (folder / "corpus.txt").write_text(tiny_text["valid"].read_text() + more)
        (folder / "own_method.py").write_text(OWN + more)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    keys = overrides(text, tmp_path / "cache")
    flags = [f"--config.{key}={value}" for key, value in keys.items()] + ["--config.mesh.fsdp=2"]
    words = [str(text), str(whole), str(tmp_path), f"--config={ROOT}/configs/base.py", *flags]
    pair = start_hosts([sys.executable, "-c", IN_TURN, *words], 2, folders=folders)
    one, two, parts = (tmp_path / name for name in ("one", "two", "parts"))
    loop.train(replaced(make_config(), keys), str(one))
    outputs = finish(pair)
    assert "\ninterrupted\n" in outputs[0]
    assert re.search(r"going on from the checkpoint of update [23] of 6", outputs[0]), outputs[0]
    for output in outputs:
        assert "error: after update 1, process 0 and process 1 hold different parameters" in output
        assert "Start all alike, with the same processors, devices, packages" in output
        assert output.count("the processes differ; start the same command and code on all:") == 3
        assert "\n  model.dropout: 0.0 on process 0, 0.5 on process 1" in output
        assert "\n  train.steps: 6 on process 0, 7 on process 1" in output
        for named in ("file's sha256", "own file own_method"):
            assert re.search(rf'\n  {named}: ".*" on process 0, ".*" on process 1', output)
    assert not (tmp_path / "none").exists()
    failed = RunDirectory(tmp_path / "other")
    assert (failed.status()["state"], failed.saved_steps()) == ("failed", [])
    check_trained(one, two, parts)
    check_evaluated(whole, tmp_path / "alone", tmp_path / "together")


def check_trained(one: pathlib.Path, two: pathlib.Path, parts: pathlib.Path) -> None:
    run = RunDirectory(two)
    made, alone = rows(two), rows(one)
    scores, expected = ([row for row in of if "valid_nll" in row] for of in (made, alone))
    # 31 windows of 16, spread over 6,000 tokens
    assert [row["valid_tokens"] for row in (*scores, *expected)] == [496] * 6
    for score, single in zip(scores, expected, strict=True):
        assert score["valid_nll"] == pytest.approx(single["valid_nll"], abs=1e-4)
    samples = [row["sample"] for row in made if "sample" in row]
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


def check_evaluated(run: pathlib.Path, one: pathlib.Path, two: pathlib.Path) -> None:
    assert not evaluate_runs([run], options_of(output_dir=one, lengths=(16, 40), dump_nll=True))
    alone, together = (read_rows(folder / "results.jsonl") for folder in (one, two))
    assert [row.length for row in together] == [16, 40]
    for row, expected in zip(together, alone, strict=True):
        same = [(one.measurement, one.train_length, one.seed) for one in (row, expected)]
        assert same[0] == same[1]
        counts = [
            [one.results[key] for key in ("tokens", "bytes", "words")] for one in (row, expected)
        ]
        assert counts[0] == counts[1]
        assert row.results["nll_nats"] == pytest.approx(expected.results["nll_nats"], rel=1e-6)
    for path in sorted((one / "nll").iterdir()):
        with np.load(path) as expected, np.load(two / "nll" / path.name) as dump:
            np.testing.assert_array_equal(dump["targets"], expected["targets"])
            np.testing.assert_allclose(dump["nll_nats"], expected["nll_nats"], atol=1e-5)
