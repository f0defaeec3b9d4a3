"""The loop on a tiny corpus: it learns, resumes bitwise, and stops where it must without losing what was saved."""

import errno
import fcntl
import functools
import json
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Callable

import jax
import ml_collections
import numpy as np
import pytest

from alibi.data.tokenizers import ByteTokenizer, WordTokenizer
from alibi.errors import UserError
from alibi.model.decoder import build_model
from alibi.parallel.sharding import make_mesh
from alibi.runs import RunDirectory, config_hash
from alibi.runs.lease import Claim
from alibi.training import loop, record
from alibi.training.checkpoint import Checkpoints
from alibi.training.feed import Batch
from alibi.training.optimizer import make_optimizer
from alibi.training.state import TrainState, abstract_state
from alibi.training.step import Metrics, TrainStep
from configs import base


@pytest.fixture
def eight_devices() -> None:
    """For tests of meshes; the others run on one device, which takes a third of the time to compile and to save."""


@pytest.fixture(autouse=True)
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "eight_devices" not in request.fixturenames:
        monkeypatch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:1]))


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The run of `tiny_config()`, finished without a stop; of all tests, so not to be changed."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:1]))
        loop.train(tiny_config(), str(workdir))
    return workdir


@pytest.fixture
def finished(whole: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of `whole`, for one test."""
    return shutil.copytree(whole, tmp_path / "run")


def final_state(config: ml_collections.ConfigDict, workdir: pathlib.Path, step: int | None = None) -> TrainState:
    mesh = make_mesh(base.get_config().mesh, jax.devices()[:1])
    run = RunDirectory(workdir)
    model = build_model(config, run.provenance()["vocab_size"])
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        abstract = abstract_state(model, make_optimizer(config.optimizer, config.train.steps)[0], mesh)
        return checkpoints.restore(step or checkpoints.latest, abstract)


def assert_same(left: TrainState, right: TrainState) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), left, right)


def rows(workdir: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Calls `act` when update `step` begins."""
    get = loop.Feed.get

    def acting(feed: loop.Feed, at: int, *, last: bool) -> Batch:
        if at == step:
            act()
        return get(feed, at, last=last)

    monkeypatch.setattr(loop.Feed, "get", acting)


def test_training_learns_and_records(tiny_config, tmp_path: pathlib.Path) -> None:
    config = tiny_config(train__steps=40, optimizer__learning_rate=0.01, log__every_steps=10, eval__every_steps=20)
    config.checkpoint.every_steps = 20
    status = loop.train(config, str(tmp_path / "run"))
    assert (status["state"], status["step"], status["steps"]) == ("finished", 40, 40)
    written = rows(tmp_path / "run")
    trained = {row["step"]: row["train_nll"] for row in written if "train_nll" in row}
    assert list(trained) == [10, 20, 30, 40]
    assert trained[10] < 6.0, "a mean NLL per token in nats, near ln 256 = 5.5 at the start"
    assert trained[40] < trained[10] - 1.0
    assert [row["step"] for row in written if "valid_nll" in row] == [20, 40]
    provenance = RunDirectory(tmp_path / "run").provenance()
    assert provenance["corpus"]["train"]["bytes"] == 6000
    params = final_state(config, tmp_path / "run").params
    assert provenance["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_a_run_goes_on_with_layers_as_a_loop(tiny_config, whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """From a checkpoint of layers one by one, to the same loss; Adam magnifies the rounding of tiny gradients."""
    config = tiny_config()
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(loop.Interrupted):
            loop.train(config, str(tmp_path / "run"))
    config.model.scan_layers = True
    loop.train(config, str(tmp_path / "run"))
    got, expected = (final_state(config, workdir) for workdir in (tmp_path / "run", whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), got.params, expected.params)
    np.testing.assert_allclose(rows(tmp_path / "run")[-1]["valid_nll"], rows(whole)[-1]["valid_nll"], rtol=1e-6)


def test_a_finished_run_is_not_trained_again(tiny_config, finished: pathlib.Path, monkeypatch, capsys) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    monkeypatch.setattr(loop.Feed, "get", lambda *_, **__: pytest.fail("trained again"))
    assert loop.train(tiny_config(), str(finished))["state"] == "finished"
    after = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert after == before, "a file of a finished run was touched"
    assert f"{finished} was finished before, with 6 updates; evaluate it by" in capsys.readouterr().err


def test_lost_checkpoints(tiny_config, finished: pathlib.Path, monkeypatch, capsys) -> None:
    """Training goes on from an earlier one; from none it would overwrite what is known of the run, so it refuses."""
    run = RunDirectory(finished)
    assert run.status()["saved"] == 6
    (run.checkpoints / "6").rename(run.checkpoints / "4")  # as if the one before had been kept
    finished_status = run.status()
    with monkeypatch.context() as patch:
        begun = []
        patch.setattr(loop.Feed, "get", lambda feed, step, **_: begun.append(step) or sys.exit())
        with pytest.raises(SystemExit):
            loop.train(tiny_config(), str(finished))
        assert begun == [4]
    run.write("status.json", finished_status)
    assert "was finished before, but its checkpoint of update 6 was lost since" in capsys.readouterr().err
    shutil.rmtree(run.checkpoints)
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    older = {key: value for key, value in run.status().items() if key != "saved"}  # which knows no saved step
    for status in (run.status() | {"state": "interrupted", "saved": 4}, older):
        run.write("status.json", status)
        before[finished / "status.json"] = (finished / "status.json").read_bytes()
        with pytest.raises(ValueError, match=rf"run has no checkpoint, but that of step {status.get('saved', 6)} was"):
            loop.train(tiny_config(), str(finished))
        assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    # A run that was stopped before it first saved begins again.
    run.write_status("interrupted", step=1, steps=6)
    run.check_checkpoints()


def test_interrupt_and_resume_is_bitwise(tiny_config, tmp_path: pathlib.Path, monkeypatch) -> None:
    """Ctrl-C in the middle saves; going on gives the very bits of a run without a stop, dropout's too."""
    # Stopped between two rows of metrics, after a row at update 3: the next one is of all updates since.
    config = tiny_config(model__dropout=0.2, model__attention_dropout=0.2, log__every_steps=3)
    config.mesh.update(data=-1, fsdp=2, tensor=2)
    monkeypatch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:4]))
    loop.train(config, str(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        stop_at(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(loop.Interrupted, match="stopped at update 4 of 6"):
            loop.train(config, str(tmp_path / "parts"))
    assert RunDirectory(tmp_path / "parts").status()["state"] == "interrupted"
    loop.train(config, str(tmp_path / "parts"))
    assert_same(final_state(config, tmp_path / "parts"), final_state(config, tmp_path / "whole"))
    whole, parts = (
        [row | dict.fromkeys(("tokens_per_second", "data_wait_seconds"), 0) for row in rows(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert parts == whole


def test_the_speed_is_that_of_the_last_updates_and_never_negative(monkeypatch) -> None:
    clock = iter([*range(60), *range(60, 160, 2), 155])
    monkeypatch.setattr(record.time, "perf_counter", lambda: next(clock))
    progress = record.Progress("run", 0, 1000, tokens_per_step=10, show=False)
    for step in range(110):
        progress.update(step, 1.0)
        assert progress.tokens_per_second == pytest.approx(10.0) or step < 1 or step >= 60
    assert progress.tokens_per_second == pytest.approx(10 / 2, rel=0.02)
    progress.pause(1000.0)
    progress.update(110, 1.0)
    assert progress.tokens_per_second > 0


def test_checkpoints_that_cannot_be_written_are_told_of_before_any_work(tiny_config, tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")  # root may write in any directory, but in no file
    with pytest.raises(ValueError, match="can't be written"):
        loop.train(tiny_config(), str(tmp_path / "run"))


def test_a_crash_goes_on_from_the_last_checkpoint(tiny_config, whole, tmp_path: pathlib.Path, monkeypatch) -> None:
    config = tiny_config()

    def crash() -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        stop_at(patch, 5, crash)
        with pytest.raises(MemoryError):
            loop.train(config, str(tmp_path / "parts"))
    status = RunDirectory(tmp_path / "parts").status()
    assert (status["state"], status["reason"]) == ("failed", "MemoryError: no memory")
    RunDirectory(tmp_path / "parts").write_status(**(status | {"peak_memory_bytes": 2**60}))
    assert loop.train(config, str(tmp_path / "parts"))["peak_memory_bytes"] == 2**60  # of all its processes
    assert_same(final_state(config, tmp_path / "parts"), final_state(config, whole))


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    config = tiny_config()

    compile_beside = loop._compile_beside

    def poisoning(*arguments: object) -> tuple[TrainStep, TrainState]:
        train_step, state = compile_beside(*arguments)

        def poisoned(state: TrainState, *batch: jax.Array) -> tuple[TrainState, Metrics]:
            if int(state.step) == 4:
                state = state.replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
            return train_step(state, *batch)

        return poisoned, state

    monkeypatch.setattr(loop, "_compile_beside", poisoning)
    with pytest.raises(loop.NonFiniteLossError, match=r"update 5: loss nan.*last good checkpoint is that of update 4"):
        loop.train(config, str(tmp_path / "run"))
    state = final_state(config, tmp_path / "run")
    assert int(state.step) == 4
    assert all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))
    assert "update 5" in RunDirectory(tmp_path / "run").status()["reason"]


def test_latest_and_best_checkpoints_stay(tiny_config, tmp_path: pathlib.Path, monkeypatch) -> None:
    config = tiny_config()
    losses = iter([1.0, 2.0])  # the first validation, at update 3, stays the best
    monkeypatch.setattr(loop, "make_validator", lambda *_: lambda params: next(losses))
    loop.train(config, str(tmp_path / "run"))
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest == 6
        assert checkpoints.best == (3, 1.0)
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()} == {"3", "6"}


def test_a_run_that_is_older_than_a_config_key_is_still_the_same(tiny_config, finished: pathlib.Path) -> None:
    """A new key must not shut users out of what they have trained; without it, runs computed what its default does."""
    config = tiny_config()
    run = RunDirectory(finished)
    known = config_hash(run.config())
    older = config.copy_and_resolve_references()
    with older.unlocked():
        del older.model["window"], older["imported_from"], older.eval["dtype"]
    run.write("config.json", older.to_dict())
    assert (run.config().model.window, run.config().imported_from, run.config().eval.dtype) == (0, "", "float32")
    assert config_hash(run.config()) == config_hash(older) == known
    assert run.differing(config) == run.differing(older) == {}
    assert loop.train(older, str(run.path))["state"] == "finished"  # a config file of its own time
    wide = tiny_config(model__window=5)
    assert run.differing(wide) == {"model.window": (0, 5)}


def test_another_config_is_refused_with_its_differing_keys(tiny_config, finished: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"another config:\n  model.width: 16 there, 32 now\n  seed: 0 there, 1 now\n"):
        loop.train(tiny_config(model__width=32, seed=1, log__every_steps=3), str(finished))
    with pytest.raises(ValueError, match=r"model.attention_dropout: 0.0 there, 0.5 now"):
        RunDirectory(finished).check(tiny_config(model__attention_dropout=0.5, model__attention="reference"))


def test_a_text_that_changed_is_refused_before_anything_is_overwritten(tiny_config, tmp_path: pathlib.Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five\n" * 100)
    config = tiny_config(data__train=str(text), data__tokenizer="words")
    loop.train(config, str(tmp_path / "run"))
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "tokenizer").iterdir()}
    text.write_text("six seven eight nine ten\n" * 100)
    with pytest.raises(ValueError, match=r"the train text of the run in .* has changed: its sha256 was"):
        loop.train(config, str(tmp_path / "run"))
    assert {path: path.read_bytes() for path in before} == before


def test_a_validation_that_is_no_number_is_neither_saved_nor_best(tiny_config, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "make_validator", lambda *_: lambda params: float("nan"))
    with pytest.raises(loop.NonFiniteLossError, match=r"update 3: validation loss nan; the last good .* update 2"):
        loop.train(tiny_config(), str(tmp_path / "run"))


def test_two_processes_do_not_train_in_one_directory(tiny_config, tmp_path: pathlib.Path) -> None:
    config = tiny_config()
    other = RunDirectory(tmp_path / "run")
    other.check(config)
    other.claim(config, ByteTokenizer())
    with pytest.raises(ValueError, match="another process is training in"):
        loop.train(config, str(tmp_path / "run"))
    other.release()


def test_a_run_that_began_meanwhile_is_not_mixed_with_another(tiny_config, tmp_path: pathlib.Path) -> None:
    """Between the check and the lock lies the preparing of the text, which may take an hour."""
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    configs = tiny_config(seed=1), tiny_config(seed=2)
    first.check(configs[0])
    second.check(configs[1])
    first.claim(configs[0], ByteTokenizer())
    first.release()
    with pytest.raises(ValueError, match=r"another config:\n  seed: 1 there, 2 now"):
        second.claim(configs[1], ByteTokenizer())
    assert first.config().seed == 1
    with pytest.raises(ValueError, match=r"the tokenizer of the run in .* is another"):
        second.claim(configs[0], WordTokenizer(dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>"], 0)))
    first.claim(configs[0], ByteTokenizer())  # the lock was given back
    first.release()


def test_a_full_disk_is_named_and_the_saved_stays(tiny_config, tmp_path: pathlib.Path, monkeypatch) -> None:
    config = tiny_config()
    save = Checkpoints.save

    def full(checkpoints: Checkpoints, state: TrainState, step: int, *more: object) -> None:
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(checkpoints, state, step, *more)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "_keep", lambda run, tokenizer: full(None, None, 4))  # as the run begins
        with pytest.raises(UserError, match=r"no space left to write .*/run; what was saved before is whole"):
            loop.train(config, str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", full)
        with pytest.raises(UserError, match=r"no space left to write .*/run; what was saved before is whole"):
            loop.train(config, str(tmp_path / "run"))
    assert RunDirectory(tmp_path / "run").status()["state"] == "failed"
    assert int(final_state(config, tmp_path / "run").step) in (2, 3)
    assert loop.train(config, str(tmp_path / "run"))["state"] == "finished"


def test_a_damaged_checkpoint_is_named(tiny_config, finished: pathlib.Path) -> None:
    for file in (finished / "checkpoints" / "6" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"checkpoints/6 is damaged or of another model.*delete this one"):
        final_state(tiny_config(), finished)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train__batch_tokens": 100}, r"batch_tokens=100 must be a multiple of 128 \(train_length=16 .* 8 devices"),
        ({"train__accumulation": 3}, r"use 384"),
        ({"mesh__data": 3}, "do not fit 8 devices"),
        ({"mesh__data": -1, "mesh__fsdp": -1}, "one of them may be -1"),
        ({"optimizer__warmup_steps": 6}, "warmup_steps=6 must be at least 0 and below train.steps=6"),
        ({"optimizer__name": "sgdd"}, "optimizer.name='sgdd' is unknown"),
        ({"position": "alibbi"}, "did you mean 'alibi'"),
        ({"model__num_heads": 3}, "does not divide model.width=16; use 1, 2, 4"),
        ({"model__activation": "tanh"}, "model.activation='tanh' is unknown; use one of relu, gelu, gelu_exact, silu"),
        ({"train_length": 8192, "train__batch_tokens": 65536}, "longer than the corpus, which has 6,000 tokens"),
        ({"data__train": "missing.txt"}, "missing.txt"),
        ({"data__valid": "missing.txt"}, "missing.txt.*; set data.valid, or leave it empty for no validation"),
        ({"model__attention": "flash"}, "model.attention='flash' is unknown"),
        ({"model__num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"model__dropout": 1.5}, "model.dropout=1.5 must be a rate"),
        ({"model__softmax_dropout": 1.0}, "model.softmax_dropout=1.0 must be a rate"),
        ({"model__norm_epsilon": 0.0}, "model.norm_epsilon=0.0 must be above 0"),
        ({"model__embedding": "adaptive", "model__cutoffs": (4, 400)}, "below the 256 tokens of the vocabulary"),
        ({"model__embedding": "adaptive", "model__adaptive_factor": 8}, "no feature of model.width=16"),
        ({"train__max_device_tokens": -1}, "train.max_device_tokens=-1 must be at least 0"),
        ({"log__every_steps": 0}, "log.every_steps=0 must be at least 1"),
        ({"eval__max_tokens": 0}, "eval.max_tokens=0 must be positive"),
        ({"eval__dtype": "float8"}, "eval.dtype='float8' is unknown; use one of float32, bfloat16"),
        ({"seed": -1}, r"seed=-1 must be from 0 to 2\^31 - 1"),
        ({"seed": 5_000_000_000}, "seed=5000000000 must be"),
        ({"data__max_train_bytes": 0}, "data.max_train_bytes=0 must be positive, or -1 for all"),
        ({"model__width": 0}, "model.width=0 must be at least 1"),
        ({"model__window": 2**31}, r"model.window=2147483648 must be from 1"),
        ({"optimizer__learning_rate": -1.0}, "optimizer.learning_rate=-1.0 must be"),
        ({"optimizer__b2": 1.5}, "optimizer.b2=1.5 must be from 0 to below 1"),
        ({"optimizer__eps": 0.0}, "optimizer.eps=0.0 must be above 0"),
        ({"optimizer__weight_decay": -1.0}, "optimizer.weight_decay=-1.0 must be at least 0"),
        ({"position": "rotary", "position_options__base": 0.0}, "rotary needs a base above 0"),
        ({"position": "sinusoidal", "position_options__max_period": -1.0}, "sinusoidal needs a max_period above 0"),
        ({"position_options__slopes": "foo"}, "slope convention 'foo' is unknown"),
        ({"position_options__slopes": 3}, "option slopes=3 of position method 'alibi' must be of type str"),
        ({"position": "learned", "position_options__num_positions": 8}, "at least the training length 16"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    eight_devices, tiny_config, tmp_path: pathlib.Path, overrides: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loop.train(tiny_config(**overrides), str(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_without_file_locks_a_second_process_is_refused_and_a_lost_lease_stops_before_the_next_save(
    tiny_config, tmp_path: pathlib.Path, monkeypatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    write = RunDirectory.write_status

    def write_status(run: RunDirectory, state: str, *, step: int, **more: object) -> None:
        write(run, state, step=step, **more)
        if (state, step) == ("running", 3):
            with pytest.raises(ValueError, match="another process is training in"):
                RunDirectory(tmp_path).claim(run.config(), run.tokenizer())
            lease = json.loads((tmp_path / "lease.json").read_text()) | {"token": "another's", "host": "elsewhere"}
            (tmp_path / "lease.json").write_text(json.dumps(lease))

    monkeypatch.setattr(RunDirectory, "write_status", write_status)
    monkeypatch.setattr("alibi.runs.directory.Claim", functools.partial(Claim, beat=0.1, stale=2.0))
    with pytest.raises(UserError, match=r"was lost: process .* on elsewhere .* has taken it over; this process stops"):
        loop.train(tiny_config(), str(tmp_path))
    assert RunDirectory(tmp_path).saved_steps() in ([2], [2, 3])
    assert json.loads((tmp_path / "lease.json").read_text())["host"] == "elsewhere"
    assert RunDirectory(tmp_path).status()["state"] == "running"  # as the other process has it


def test_a_work_directory_that_cannot_be_written(tiny_config, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="can't be written"):
        loop.train(tiny_config(), str(tmp_path / "file" / "run"))


@pytest.mark.parametrize(
    ("workdir", "message"),
    [
        ("s3://bucket/run", r"can't hold checkpoints: Orbax writes them to directories and gs:// only"),
        ("gs:/bucket/run", r"give gs://BUCKET/PATH, s3://BUCKET/PATH or a directory"),
        ("gs://bucket/run", r"needs the package gcsfs"),
    ],
)
def test_an_address_that_cannot_be_a_work_directory(tiny_config, monkeypatch, workdir: str, message: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=message):
        loop.train(tiny_config(), workdir)


def test_an_empty_name_is_not_the_current_directory(tiny_config) -> None:
    with pytest.raises(ValueError, match="the work directory's name is empty"):
        loop.train(tiny_config(), "")
