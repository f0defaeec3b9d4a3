"""The feed measures how long it waits for data."""

import time

import jax
import numpy as np

from alibi.config import make_config
from alibi.data.batches import TrainBatches
from alibi.objectives import NextToken
from alibi.parallel.sharding import make_mesh
from alibi.training.step import Feed


def test_waiting_for_data_is_measured(monkeypatch):
    objective = NextToken(256, boundary_id=0)
    batches = TrainBatches(np.arange(256), length=4, batch_size=8, seed=0, objective=objective)
    read = batches.rows

    def slow(step, rows):
        time.sleep(0.2)
        return read(step, rows)

    monkeypatch.setattr(batches, "rows", slow)
    feed = Feed(batches, make_mesh(make_config().mesh, devices=jax.devices()[:1]), 1)
    # Grain is imported before the thread begins: meanwhile no other import of the process is whole.
    assert "order" in vars(batches)
    feed.get(0)
    assert feed.waited >= 0.2
    before = feed.waited
    time.sleep(0.8)  # a step that takes longer than reading does
    feed.get(1, last=True)
    assert feed.waited - before < 0.2
    feed.close()
