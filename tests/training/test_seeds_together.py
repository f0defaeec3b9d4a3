"""Seeds that train in one program are the runs that each would be by itself."""

import dataclasses
import functools
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import Config, replaced
from alibi.evaluation.scorer import Score
from alibi.parallel.sharding import make_mesh
from alibi.runs import RunDirectory
from alibi.training import loop, updates
from tests.refusals import assert_refused
from tests.training.runs import figures, final_state, interrupt, stop_at

SEEDS = (0, 7)


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:1]))


@pytest.fixture(scope="module")
def config(tiny_config) -> Config:
    """A task whose examples are read alone, with dropout, two micro-batches, the loss in chunks, and
    validations.
    """
    return tiny_config(
        data__corpus="tasks",
        data__task="copy",
        data__train="train",
        data__valid="valid",
        data__task_length=16,
        data__max_train_bytes=4_000,
        data__max_valid_bytes=400,
        data__isolate_documents="restart",
        objective__name="answers",
        train__accumulation=2,
        model__dropout=0.1,
        model__num_layers=1,
        model__logits_chunk=8,
    )


@pytest.fixture(scope="module")
def alone(config: Config, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder with a run of each seed, trained by itself."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:1]))
        for seed in SEEDS:
            loop.train(dataclasses.replace(config, seed=seed), str(folder / str(seed)))
    return folder


def workdirs(folder: pathlib.Path) -> dict[int, str]:
    return {seed: str(folder / str(seed)) for seed in SEEDS}


def check_equal(config: Config, together: pathlib.Path, alone: pathlib.Path) -> None:
    """Losses and parameters to 1e-6, and the same rows, checkpoints and config of each seed."""
    for seed in SEEDS:
        config = dataclasses.replace(config, seed=seed)
        ours, theirs = (RunDirectory(folder / str(seed)) for folder in (together, alone))
        assert ours.config() == config
        assert ours.saved_steps() == theirs.saved_steps()
        assert ours.status()["state"] == "finished"
        assert ours.status()["best"]["step"] == theirs.status()["best"]["step"]
        for one, other in zip(figures(ours.path), figures(theirs.path), strict=True):
            assert one.keys() == other.keys()
            for key in one:
                # the norm of the update has that of the bias of keys, see below
                rtol = 1e-4 if key == "update_norm" else 1e-6
                np.testing.assert_allclose(one[key], other[key], rtol=rtol, err_msg=key)
        states = (final_state(config, run.path) for run in (ours, theirs))
        jax.tree.map_with_path(_check_close, *(state.params for state in states))


def _check_close(path: tuple, got: jax.Array, expected: jax.Array) -> None:
    """The distance of a leaf is at most 1e-6 of its norm. The bias of keys adds the same to all logits of a
    query: its gradient is rounding alone, from which Adam makes full updates, and it changes nothing.
    """
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if not name.endswith("key/bias"):
        assert jnp.linalg.norm(got - expected) <= 1e-6 * jnp.linalg.norm(expected), name


def test_seeds_are_as_each_by_itself(config, alone, tmp_path, capsys) -> None:
    statuses = loop.train_seeds(config, workdirs(tmp_path))
    check_equal(config, tmp_path, alone)
    assert [status["step"] for status in statuses] == [6, 6]
    first, second = (final_state(config, tmp_path / name).params for name in ("0", "7"))
    assert not jax.tree.all(jax.tree.map(np.array_equal, first, second)), "the seeds are one"
    assert f"--workdirs={tmp_path / '0'},{tmp_path / '7'}" in capsys.readouterr().err
    loop.train_seeds(config, workdirs(tmp_path))
    assert "was finished before" in capsys.readouterr().err


def test_they_go_on_together_or_by_themselves(config, alone, tmp_path) -> None:
    """After a stop at update 4. One that has gone further must be trained by itself, as the others."""
    interrupt(config, tmp_path, 4, train=lambda *_: loop.train_seeds(config, workdirs(tmp_path)))
    assert RunDirectory(tmp_path / "7").status()["state"] == "interrupted"
    assert RunDirectory(tmp_path / "7").saved_steps()[-1] == 4
    loop.train_seeds(config, workdirs(tmp_path))
    check_equal(config, tmp_path, alone)


def test_they_are_refused_beside_a_tracker_of_one_run(config, tmp_path) -> None:
    tracked = replaced(config, {"log.wandb": True})
    assert_refused("log.wandb .*--seeds", loop.train_seeds, tracked, workdirs(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_seeds_at_different_updates_train_by_themselves(config, alone, tmp_path) -> None:
    places = workdirs(tmp_path) | {0: str(alone / "0")}
    assert_refused("/0 is at update 6, .*/7 is at update 0", loop.train_seeds, config, places)
    assert RunDirectory(tmp_path / "7").status()["state"] == "missing", "a refusal began a run"


def poison(patch: pytest.MonkeyPatch, update: int) -> None:
    """Makes the second seed's loss NaN after so many updates."""
    run = loop.Updates.run

    def poisoning(updates: loop.Updates, request: loop.StopRequest) -> None:
        step = updates.program.train_step

        def poisoned(state, *batch):
            if int(state.step[0]) == update:
                state = state.replace(
                    params=jax.tree.map(lambda x: x.at[1].set(jnp.nan), state.params)
                )
            return step(state, *batch)

        updates.program.train_step = poisoned
        run(updates, request)

    patch.setattr(loop.Updates, "run", poisoning)


def test_after_a_seed_diverged_a_stop_names_the_command_that_goes_on(
    config, tmp_path, monkeypatch
) -> None:
    """The same command would be refused, since the seeds are at different updates (see above)."""
    goes_on = rf"stopped at update 5 .* go on there by --seeds=0 --workdir={tmp_path}/0$"
    with monkeypatch.context() as patch:
        poison(patch, 1)
        stop_at(patch, 4, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert_refused(
            goes_on, lambda: loop.train_seeds(config, workdirs(tmp_path)), raised=loop.Interrupted
        )


def test_a_seed_that_diverges_ends_alone(config, alone, tmp_path, monkeypatch) -> None:
    """The others finish as if it were not there; its last good checkpoint stays."""
    with monkeypatch.context() as patch:
        poison(patch, 4)
        assert_refused(
            r"^[^;]*/7: update 5: loss nan",
            lambda: loop.train_seeds(config, workdirs(tmp_path)),
            raised=loop.NonFiniteLossError,
        )
    status = {seed: RunDirectory(tmp_path / str(seed)).status() for seed in SEEDS}
    assert [status[seed]["state"] for seed in SEEDS] == ["finished", "failed"]
    assert "update 5" in status[7]["reason"]
    loop.train(dataclasses.replace(config, seed=7), str(tmp_path / "7"))  # from update 4
    check_equal(config, tmp_path, alone)


def test_seeds_are_saved_at_the_same_updates_though_one_alone_improves(
    config, tmp_path, monkeypatch
) -> None:
    """Else a lost machine would leave newest checkpoints of different updates, and none in common.
    Of both seeds in turn, a single one improves at updates 4 and 6.
    """
    config = replaced(config, {"eval.every_steps": 2, "checkpoint.every_steps": 0})
    losses = map(np.float32, [3, 3, 2, 4, 5, 2])
    monkeypatch.setattr(
        updates, "make_validator", lambda *_: lambda params: Score(np.full(9, next(losses)), 0.0)
    )
    loop.train_seeds(replaced(config, {"checkpoint.keep": 9}), workdirs(tmp_path))
    runs = [RunDirectory(folder) for folder in workdirs(tmp_path).values()]
    assert [run.status()["best"]["step"] for run in runs] == [4, 6]
    assert [run.saved_steps() for run in runs] == [[2, 4, 6]] * 2


def test_several_devices_are_refused(config, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:2]))
    assert_refused("one device, .* 2", lambda: loop.train_seeds(config, workdirs(tmp_path)))
