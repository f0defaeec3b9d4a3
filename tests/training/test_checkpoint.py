"""Checkpoints of the two layouts of layers: each is read by models of either, with nothing lost."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.model.decoder import build_model
from alibi.model.layers import stacked
from alibi.parallel.sharding import batch_sharding, make_mesh
from alibi.training.checkpoint import Checkpoints
from alibi.training.optimizer import make_optimizer
from alibi.training.state import abstract_state, initial_state
from alibi.training.step import make_train_step

VOCABULARY = 48


@pytest.mark.parametrize("scanned", [False, True])
def test_a_checkpoint_of_the_other_layout_is_read(tiny_config, tmp_path: pathlib.Path, scanned: bool) -> None:
    """Parameters and Adam's moments after an update, split over 8 devices, for a method with parameters by layer."""
    config = tiny_config(position="fox", mesh__data=2, mesh__fsdp=2, mesh__tensor=2, model__num_layers=2)
    mesh = make_mesh(config.mesh)
    model = build_model(config, VOCABULARY, sharding=batch_sharding(mesh))
    scan = model.clone(config=dataclasses.replace(model.config, scan_layers=True))
    saving, reading = (scan, model) if scanned else (model, scan)
    optimizer, _ = make_optimizer(config.optimizer, 10)
    batch = jnp.arange(8 * 16, dtype=jnp.int32).reshape(1, 8, 16) % VOCABULARY
    batch = jax.device_put(batch, batch_sharding(mesh, leading=1))
    state, _ = make_train_step(saving, optimizer, 0)(initial_state(saving, optimizer, mesh, seed=0), batch, batch)
    abstract = abstract_state(reading, optimizer, mesh)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, 1, {})
        checkpoints.wait()
        restored = checkpoints.restore(1, abstract)
        params = checkpoints.restore_params(1, abstract.params)
    jax.tree.map(np.testing.assert_array_equal, params, restored.params)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, abstract)
    one, other = (restored, state) if scanned else (state, restored)
    jax.tree.map(np.testing.assert_array_equal, stacked(one.params), other.params)
    jax.tree.map(np.testing.assert_array_equal, stacked(one.opt_state), other.opt_state)
    assert any(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(restored.opt_state)), "Adam's moments are there"


def test_parameters_are_read_without_an_optimizer(tiny_config, tmp_path: pathlib.Path) -> None:
    """An evaluation needs the parameters alone; whatever became of the rest."""
    config = tiny_config(model__num_layers=1)
    model, optimizer = build_model(config, VOCABULARY), make_optimizer(config.optimizer, 10)[0]
    mesh = make_mesh(config.mesh)
    state = initial_state(model, optimizer, mesh, seed=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, 1, {})
        checkpoints.wait()
    (tmp_path / "1" / "optimizer" / "_METADATA").write_text("damaged")
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        params = checkpoints.restore_params(1, abstract_state(model, optimizer, mesh).params)
    jax.tree.map(np.testing.assert_array_equal, params, state.params)


def test_stacked_parameters_are_split_as_those_of_one_layer(tiny_config) -> None:
    config = tiny_config(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, model__scan_layers=True)
    model, optimizer = build_model(config, VOCABULARY), make_optimizer(config.optimizer, 10)[0]
    layers = abstract_state(model, optimizer, make_mesh(config.mesh)).params["layers"]
    assert layers["attention"]["query"]["kernel"].sharding.spec == jax.P(None, "fsdp", "tensor", None)
    assert layers["down"]["kernel"].sharding.spec == jax.P(None, "tensor", "fsdp")
