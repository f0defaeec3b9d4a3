"""Two processes as two hosts: each reads its own rows, and together they train the same run, stopped or not."""

import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from alibi.config import make_config, replaced
from alibi.evaluation.extrapolation import Options, evaluate_runs
from alibi.model.decoder import build_model
from alibi.parallel.sharding import make_mesh
from alibi.reporting.rows import read_rows
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.training import loop
from alibi.training.optimizer import make_optimizer
from alibi.training.state import abstract_state
from tests.hosts import ON, changed, finish, free_port, said_at_the_end, start
from tests.training.trajectories import MODELS, trajectory


def overrides(text: pathlib.Path | str, cache: pathlib.Path) -> dict[str, object]:
    return {
        "data.corpus": "text", "data.train": text, "data.valid": text, "data.cache_dir": cache, "train.steps": 6,
        "train.batch_tokens": 128, "train_length": 16, "optimizer.warmup_steps": 1, "model.num_layers": 1,
        "model.width": 16, "model.num_heads": 2, "model.feed_forward": 32, "log.every_steps": 1, "eval.every_steps": 2,
        "log.tensorboard": False, "checkpoint.every_steps": 2, "eval.batch_tokens": 64,
    }  # fmt: skip


def command(workdir: pathlib.Path, text: pathlib.Path | str, cache: pathlib.Path, *more: str) -> list[str]:
    flags = [f"--config.{key}={value}" for key, value in overrides(text, cache).items()]
    return [sys.executable, "train.py", "--config=configs/base.py", f"--workdir={workdir}", *flags, *more]


def stopping_at_its_second_update(words: list[str]) -> list[str]:
    """The command train.py `words`, which gets the signal of a cluster that takes its machine back."""
    program = """
import os, signal, time
from alibi.training import loop
get = loop.Feed.get
def stopping(feed, step, **how):
    if step == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(3)  # the notice goes round in a second; the other host waits for this one
    return get(feed, step, **how)
loop.Feed.get = stopping
"""
    return changed(words, program)


def state_of(workdir: pathlib.Path, step: int) -> TrainState:
    """Parameters, optimizer state and number of updates, on one device of this process."""
    run = RunDirectory(workdir)
    config = replaced(run.config(), {"mesh.data": -1, "mesh.fsdp": 1})
    model = build_model(config, run.provenance()["vocab_size"])
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        return checkpoints.restore(step, abstract_state(model, optimizer, make_mesh(config.mesh, jax.devices()[:1])))


def assert_resumed_bitwise(whole: pathlib.Path, text: pathlib.Path, cache: pathlib.Path, parts: pathlib.Path) -> None:
    """The run of two hosts in `whole` again, in `parts`; the second host is told to stop, and both start again."""
    for codes in ([75, 75], [0, 0]):
        shared = command(parts, text, cache, "--config.mesh.fsdp=2", f"--coordinator_address=localhost:{free_port()}")
        words = [[*shared, "--num_processes=2", f"--process_id={host}"] for host in range(2)]
        if not parts.exists():
            words[1] = stopping_at_its_second_update(words[1])
        hosts = [start(one, devices=2) for one in words]
        outputs = [host.communicate(timeout=240)[0] for host in hosts]
        assert [host.returncode for host in hosts] == codes, "\n".join(outputs)
    assert re.search(r"going on from the checkpoint of update [23] of 6", outputs[0]), outputs[0]
    states = [state_of(workdir, 6) for workdir in (whole, parts)]
    assert int(states[0].step) == 6
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), *states)


def test_two_hosts_train_the_run_of_one_and_resume_it_bitwise(tiny_text, tmp_path: pathlib.Path) -> None:
    text = tiny_text["train"]
    one, two, cache = (tmp_path / name for name in ("one", "two", "cache"))
    keys = {
        key: str(value) if isinstance(value, pathlib.Path) else value for key, value in overrides(text, cache).items()
    }
    loop.train(replaced(make_config(), keys), str(one))  # on one host: this process, with devices of its own number
    port = free_port()
    shared = command(two, text, cache, "--config.mesh.fsdp=2", f"--coordinator_address=localhost:{port}")
    hosts = [start([*shared, "--num_processes=2", f"--process_id={host}"], devices=2) for host in range(2)]
    outputs = [host.communicate(timeout=240)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], "\n".join(outputs)
    run = RunDirectory(two)
    assert run.status()["state"] == "finished"
    assert (run.provenance()["process_count"], run.provenance()["device_count"]) == (2, 4)
    trained = [state_of(workdir, 6).params for workdir in (one, two)]
    # Adam turns the rounding of a key bias, whose gradient is zero, into a step; the logits don't see it.
    for params in trained:
        del params["layers_0"]["attention"]["key"]["bias"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *trained)
    # Here, since it needs this run of two hosts, which takes seconds.
    assert_resumed_bitwise(two, text, cache, tmp_path / "parts")


def pair(workdir: pathlib.Path, text: pathlib.Path | str, *more: list[str]) -> list[subprocess.Popen]:
    """Two hosts that train the run of `workdir`, each with its own `more`."""
    shared = command(workdir, text, workdir.parent / "cache", f"--coordinator_address=localhost:{free_port()}")
    return [start([*shared, "--num_processes=2", f"--process_id={i}", *more[i]], devices=1) for i in range(2)]


def test_hosts_with_other_configs_are_told_what_differs(tiny_text, tmp_path: pathlib.Path) -> None:
    other = ["--config.train.steps=7", "--config.model.dropout=0.5"]
    hosts = pair(tmp_path / "run", tiny_text["train"], [], other)
    for host in hosts:
        output = host.communicate(timeout=240)[0]
        assert host.returncode == 1, output
        assert "error: the processes differ" in output
        assert "model.dropout: 0.0 on process 0, 0.5 on process 1" in output
        assert "train.steps: 6 on process 0, 7 on process 1" in output
    assert not (tmp_path / "run").exists()


def endless(folder: pathlib.Path) -> str:
    """A glob of gigabytes of text, which takes no more of the disk than one file of it."""
    folder.mkdir()
    (folder / "0.txt").write_text("the cat sat on the mat\n" * 400_000)
    for number in range(1, 1000):
        os.link(folder / "0.txt", folder / f"{number}.txt")
    return f"{folder}/*.txt"


def begun(place: pathlib.Path, process: subprocess.Popen) -> None:
    """Returns when the first process has made `place`, after which text is prepared."""
    while not place.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    time.sleep(0.5)


@pytest.mark.parametrize("fault", [signal.SIGTERM, signal.SIGKILL])
def test_a_host_that_is_stopped_or_lost_while_text_is_prepared(tmp_path: pathlib.Path, fault: int) -> None:
    """The first one prepares it, and the second, which has waited for it, is told to stop; or the first is killed."""
    no_validation = ["--config.data.valid="]
    first, second = pair(tmp_path / "run", endless(tmp_path / "text"), no_validation, no_validation)
    begun(tmp_path / "run", first)
    if fault == signal.SIGKILL:
        first.kill()
        first.communicate()
        assert re.fullmatch(f"error: (the first|another) process was lost.*; {ON}", said_at_the_end(second))
    else:
        second.send_signal(fault)
        assert said_at_the_end(second) == "stopped before the first update; the same command goes on"
        assert said_at_the_end(first) == f"error: process 1 was stopped by a signal; {ON}"
    assert not list((tmp_path / "run").iterdir())


def test_a_host_that_loses_the_first_one_ends_in_one_line(tiny_text, tmp_path: pathlib.Path) -> None:
    """Without the stack trace of JAX's abort; what was written last, if that says so, is that the run was stopped."""
    endless = ["--config.train.steps=1000000", "--config.data.valid="]
    first, second = pair(tmp_path / "run", tiny_text["train"], endless, endless)
    run = RunDirectory(tmp_path / "run")
    while run.status()["step"] < 2:
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.1)
    first.kill()
    output = second.communicate(timeout=120)[0]
    first.communicate()
    assert second.returncode == 75, output
    # Which of the two it sees first, a broken connection or the silence of the coordinator, is chance.
    reason = re.fullmatch(
        r"error: (the first process was lost, or the network|another process was lost: its connection ended)"
        "; what was saved is whole, and the same command goes on from there",
        output.splitlines()[-1],
    )
    assert reason, output
    assert "stack trace" not in output
    assert (run.status()["state"], run.status()["reason"]) == ("interrupted", reason[1])


def assert_agree(found: dict[str, np.ndarray], alone: dict[str, np.ndarray]) -> None:
    assert found.keys() == alone.keys()
    for name, expected in alone.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, np.ndarray]]:
    """The trajectory of each model on one device."""
    return {model: trajectory(model, {}, 1) for model in MODELS}


@pytest.mark.parametrize("axes", [{"data": 8}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}])
@pytest.mark.parametrize("model", MODELS)
def test_eight_devices_train_as_one(alone, model: str, axes: dict[str, int]) -> None:
    assert alone[model]["losses"][-1] < alone[model]["losses"][0] - 0.01, "it learns"
    assert_agree(trajectory(model, axes, 8), alone[model])


def test_two_hosts_of_four_devices_train_as_one(alone, tmp_path: pathlib.Path) -> None:
    address, file = f"localhost:{free_port()}", str(tmp_path / "found.npz")
    words = [sys.executable, "-m", "tests.training.trajectories", address, "2"]
    finish([start([*words, str(host), file], devices=4) for host in range(2)])
    with np.load(file) as found:
        for model, expected in alone.items():
            assert_agree({name: found[f"{model} {name}"] for name in expected}, expected)


def test_two_hosts_evaluate_as_one(tiny_config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host scores its part of every batch; the sums, the rows and the NLL of each token must not show it."""
    workdir, one, two = (tmp_path / name for name in ("run", "one", "two"))
    # What is evaluated may come from one device, which trains it in a fraction of the time of eight.
    monkeypatch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:1]))
    loop.train(tiny_config(), str(workdir))
    words = [sys.executable, "eval_extrapolation.py", f"--workdirs={workdir}", "--lengths=16,40", "--dump_nll"]
    shared = [*words, f"--output_dir={two}", f"--coordinator_address=localhost:{free_port()}", "--num_processes=2"]
    # A process that asks for the others' ends as JAX disconnects it crashes: here they ask all the time.
    shared = changed(shared, "from alibi.parallel import peers; peers.WATCH_SECONDS = 0")
    finish([start([*shared, f"--process_id={host}"], devices=2) for host in range(2)])
    assert not evaluate_runs([workdir], Options(output_dir=one, lengths=(16, 40), dump_nll=True))
    alone, together = (read_rows(folder / "results.jsonl") for folder in (one, two))
    assert [row.eval_length for row in together] == [16, 40]
    same = ("run", "step", "train_length", "eval_length", "mode", "stride", "split", "seed", "tokens", "bytes", "words")
    for row, expected in zip(together, alone, strict=True):
        assert [getattr(row, key) for key in same] == [getattr(expected, key) for key in same]
        assert row.nll_nats == pytest.approx(expected.nll_nats, rel=1e-6)
    for path in sorted((one / "nll").iterdir()):
        with np.load(path) as expected, np.load(two / "nll" / path.name) as dump:
            np.testing.assert_array_equal(dump["targets"], expected["targets"])
            np.testing.assert_allclose(dump["nll_nats"], expected["nll_nats"], atol=1e-5)
    assert_a_stopped_host_ends_the_evaluation(words[:3], tmp_path)
    assert_a_host_without_memory_ends_the_evaluation(words[:3], tmp_path)


def assert_a_stopped_host_ends_the_evaluation(words: list[str], folder: pathlib.Path) -> None:
    """By a signal while the text is prepared."""
    words = [*words, "--lengths=16", f"--text_file={endless(folder / 'text')}", f"--output_dir={folder / 'stopped'}"]
    words += [f"--coordinator_address=localhost:{free_port()}", "--num_processes=2"]
    first, second = (start([*words, f"--process_id={host}"], devices=1) for host in range(2))
    begun(folder / "stopped", first)
    second.send_signal(signal.SIGTERM)
    assert said_at_the_end(second) == "stopped; finished rows are kept, and the same command goes on from there"
    assert said_at_the_end(first) == f"error: process 1 was stopped by a signal; {ON}"


def assert_a_host_without_memory_ends_the_evaluation(words: list[str], folder: pathlib.Path) -> None:
    """One that fails to score alone: the other one waits for it within the computation."""
    words = [*words, "--lengths=16", f"--output_dir={folder / 'memory'}"]
    words += [f"--coordinator_address=localhost:{free_port()}", "--num_processes=2"]
    fails = """
from alibi.evaluation.perplexity import Scorer
from alibi.parallel import hosts
hosts.ALIKE_SECONDS = 1
def score(*of, **more): raise MemoryError("too large")
Scorer.score = score
"""
    first = start([*words, "--process_id=0"], devices=1)
    second = start(changed([*words, "--process_id=1"], fails), devices=1)
    assert said_at_the_end(first, code=1) == "error: process 1 failed alone: MemoryError: too large"
    alone = "error: what all processes compute failed on this one alone: MemoryError: too large"
    assert said_at_the_end(second, code=1) == alone
