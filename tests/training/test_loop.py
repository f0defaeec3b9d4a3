"""The loop on a tiny corpus: it learns, records each update, and saves finite parameters only."""

import gzip
import json
import pathlib
import re
import shlex

import jax
import numpy as np
import pytest

from alibi.config import replaced
from alibi.errors import OF_SWEEP
from alibi.evaluation.scorer import Score
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.training import loop, updates
from alibi.training.step import Metrics
from tests.refusals import assert_refused
from tests.training.runs import final_state, interrupt, rows


def scored(nll: float, tokens: int) -> Score:
    return Score(np.full(tokens, nll, np.float32), 0.0)


def test_training_learns_and_records(tiny_config, tmp_path: pathlib.Path) -> None:
    """With a sample of a prompt at each validation, which TensorBoard gets as a text."""
    config = tiny_config(
        train__steps=40, optimizer__learning_rate=0.01, log__every_steps=10, eval__every_steps=20
    )
    sampled = {"eval.sample_prompt": "the sea", "eval.sample_tokens": 5, "log.tensorboard": True}
    config = replaced(config, {"checkpoint.every_steps": 20} | sampled)
    status = loop.train(config, str(tmp_path / "run"))
    assert (status["state"], status["step"], status["steps"]) == ("finished", 40, 40)
    written = rows(tmp_path / "run")
    trained = {row["step"]: row["train_nll"] for row in written if "train_nll" in row}
    assert list(trained) == [10, 20, 30, 40]
    assert trained[10] < 6.0, "a mean NLL per token in nats, near ln 256 = 5.5 at the start"
    assert trained[40] < trained[10] - 1.0
    assert status["train_nll"] == trained[40]
    assert [row["step"] for row in written if "valid_nll" in row] == [20, 40]
    samples = {row["step"]: row["sample"] for row in written if "sample" in row}
    assert list(samples) == [20, 40], "with the validations"
    assert all(re.match("the sea.", sample, re.DOTALL) for sample in samples.values())
    provenance = RunDirectory(tmp_path / "run").provenance()
    assert provenance["corpus"]["train"]["bytes"] == 6000
    params = final_state(config, tmp_path / "run").params
    assert provenance["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_the_largest_seed_trains_and_a_trace_has_the_updates_asked_for(
    tiny_config, tmp_path: pathlib.Path
) -> None:
    """An imported checkpoint may have this seed, and an int32 would not hold it."""
    config = tiny_config(seed=2**32 - 1, train__steps=4, log__profile_steps="2:3")
    assert loop.train(config, str(tmp_path / "run"))["state"] == "finished"
    (trace,) = (tmp_path / "run" / "trace").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    traced = [event["args"]["step_num"] for event in events if event.get("name") == "update"]
    assert traced == ["2", "3"]


def test_a_finished_run_is_not_trained_again(
    tiny_config, finished: pathlib.Path, monkeypatch, capsys
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    monkeypatch.setattr(updates.Feed, "get", lambda *_, **__: pytest.fail("trained again"))
    assert loop.train(tiny_config(), str(finished))["state"] == "finished"
    after = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert after == before, "a file of a finished run was touched"
    assert (
        f"{finished} was finished before, with 6 updates; evaluate it by" in capsys.readouterr().err
    )


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    config = tiny_config()

    run = loop.Updates.run

    def poisoning(updates: loop.Updates, request: loop.StopRequest) -> None:
        train_step = updates.program.train_step

        def poisoned(state: TrainState, *batch: jax.Array) -> tuple[TrainState, Metrics]:
            if int(state.step) == 4:
                state = state.replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
            return train_step(state, *batch)

        updates.program.train_step = poisoned
        run(updates, request)

    monkeypatch.setattr(loop.Updates, "run", poisoning)
    assert_refused(
        r"update 5: .* update 4; .* a smaller optimizer\.clip_norm$",
        loop.train,
        config,
        str(tmp_path / "run"),
        raised=loop.NonFiniteLossError,
    )
    state = final_state(config, tmp_path / "run")
    assert int(state.step) == 4
    assert all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))
    assert "update 5" in RunDirectory(tmp_path / "run").status()["reason"]


def test_a_validation_that_is_no_number_is_neither_saved_nor_best(
    tiny_config, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(
        updates, "make_validator", lambda *_: lambda params: scored(float("nan"), 9)
    )
    assert_refused(
        # 0 clips nothing, and nothing is smaller
        r"update 3: validation loss nan; .* update 2; .* optimizer\.clip_norm=1$",
        loop.train,
        tiny_config(optimizer__clip_norm=0.0),
        str(tmp_path / "run"),
        raised=loop.NonFiniteLossError,
    )


@pytest.mark.parametrize(("tokens", "best"), [(32, (2, 1.0)), (64, (6, 3.0))])
def test_latest_and_best_checkpoints_stay(
    tokens, best, tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """The best of the validations that score the same tokens: the run goes on with another
    eval.max_tokens after update 3, and its losses there are no worse for that.
    """
    config = tiny_config(eval__every_steps=2)
    made = iter([scored(1.0, 32), scored(4.0, tokens), scored(3.0, tokens)])
    monkeypatch.setattr(updates, "make_validator", lambda *_: lambda params: next(made))
    interrupt(config, tmp_path / "run", 3)
    status = loop.train(config, str(tmp_path / "run"))
    assert status["best"] == {"step": best[0], "valid_nll": best[1], "valid_tokens": tokens}
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest == 6
        assert checkpoints.best == best
    assert {
        path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()
    } == {"6", "2" if best[0] == 2 else "4"}


def test_what_is_said_first_and_last(
    tiny_config,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four lines before the first update, and the next command at the end; neither where a sweep
    waits for the run.
    """
    workdir = tmp_path / "my runs" / "lr=1,wd=2"
    loop.train(tiny_config(eval__max_tokens=40), str(workdir))
    lines = capsys.readouterr().err.splitlines()
    parameters = RunDirectory(workdir).provenance()["parameters"]
    told = [line.partition(": ")[0] for line in lines[:4]]
    assert told == ["devices", "model", "corpus (bytes)", "saved in"]
    assert f"{parameters:,} parameters; 128 tokens a step, 768 in 6 steps" in lines[1]
    # two whole windows of 16
    assert lines[2].endswith("; a validation scores 32 tokens, spread evenly (eval.max_tokens)")
    assert [row["valid_tokens"] for row in rows(workdir) if "valid_nll" in row] == [32, 32]
    assert lines[-2] == "finished; evaluate it by"
    command = ["python", "eval_extrapolation.py", f"--workdirs={workdir}", "--multiples=1,2,4,8"]
    assert shlex.split(lines[-1]) == command, "a shell reads it, with the space of the folder"
    monkeypatch.setenv(OF_SWEEP, "1")
    loop.train(tiny_config(), str(tmp_path / "other"))
    quiet = capsys.readouterr().err
    assert "devices:" not in quiet
    assert "eval_extrapolation" not in quiet
