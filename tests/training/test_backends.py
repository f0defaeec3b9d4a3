"""What computes attention makes no difference to training."""

import jax
import numpy as np
import pytest

from alibi.model.decoder import build_model
from alibi.parallel.sharding import make_mesh
from alibi.training.optimizer import make_optimizer
from alibi.training.step import initial_state, make_train_step

VOCABULARY, STEPS = 32, 50


def loss_curve(config) -> np.ndarray:
    """Mean NLL of each of 50 updates, on four batches again and again."""
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    model = build_model(config, VOCABULARY)
    optimizer, _ = make_optimizer(config.optimizer, STEPS)
    state, step = initial_state(model, optimizer, mesh, seed=0), make_train_step(model, optimizer, seed=0)
    batches = np.random.default_rng(0).integers(0, VOCABULARY, (4, 1, 4, config.train_length + 1), dtype=np.int32)
    losses = []
    for number in range(STEPS):
        batch = batches[number % len(batches)]
        state, metrics = step(state, batch[..., :-1], batch[..., 1:])
        losses.append(float(metrics["nll_nats"] / metrics["tokens"]))
    return np.asarray(losses)


def test_the_loss_curve_is_the_same_by_tiles(tiny_config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alibi.attention.tiles.BLOCK", 8)  # three tiles of queries by three of keys, one filled up
    common = {"train_length": 20, "model__num_layers": 1, "mesh__data": 1, "optimizer__learning_rate": 0.02}
    dense, tiled = (loss_curve(tiny_config(model__attention=name, **common)) for name in ("reference", "blocked"))
    assert dense[-1] < dense[0] - 1.0, "it learned, so its attention had something to do"
    # Float32 sums in another order: 1e-7 of a loss, which Adam's division by small second moments spreads.
    np.testing.assert_allclose(tiled, dense, rtol=1e-4)
