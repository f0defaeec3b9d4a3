"""Functions of tests with small runs."""

import json
import os
import pathlib
import signal
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jaxtyping import PyTree

from alibi.config import Config, make_config
from alibi.model.decoder import build_model
from alibi.optimizers import make_optimizer
from alibi.parallel.sharding import make_mesh
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.training import loop, updates
from alibi.training.step import Batch, abstract_state
from tests.refusals import assert_refused


def final_state(config: Config, workdir: pathlib.Path) -> TrainState:
    mesh = make_mesh(make_config().mesh, jax.devices()[:1])
    run = RunDirectory(workdir)
    model = build_model(config, run.provenance()["vocab_size"])
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        abstract = abstract_state(
            model, make_optimizer(config.optimizer, config.train.steps)[0], mesh
        )
        return checkpoints.restore(checkpoints.latest, abstract)


def assert_same(left: PyTree, right: PyTree) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), left, right
    )


def rows(workdir: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def figures(workdir: pathlib.Path) -> list[dict]:
    """Returns the rows without times, which differ between equal runs."""
    times = ("tokens_per_second", "data_wait_seconds")
    return [{key: row[key] for key in row if key not in times} for row in rows(workdir)]


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Calls `act` when update `step` begins."""
    get = updates.Feed.get

    def acting(feed: updates.Feed, at: int, *, last: bool) -> Batch:
        if at == step:
            act()
        return get(feed, at, last=last)

    monkeypatch.setattr(updates.Feed, "get", acting)


def interrupt(
    config: Config,
    workdir: pathlib.Path,
    update: int,
    number: int = signal.SIGINT,
    train: Callable[[Config, str], object] = loop.train,
) -> None:
    """Trains until a signal comes as update `update` begins, at whose end the run stops."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, update - 1, lambda: os.kill(os.getpid(), number))
        stopped = f"stopped at update {update} of .*; the same command goes on there"
        assert_refused(stopped, train, config, str(workdir), raised=loop.Interrupted)
