"""Runs of 20 updates on any devices, for the test that devices and hosts don't show in them; a program for two hosts.

python -m tests.training.trajectories ADDRESS PROCESSES PROCESS FILE
"""

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from alibi.config import make_config
from alibi.model.decoder import build_model
from alibi.parallel import peers
from alibi.parallel.sharding import batch_sharding, local_rows, make_mesh
from alibi.training.optimizer import make_optimizer
from alibi.training.state import initial_state
from alibi.training.step import make_train_step

VOCABULARY, UPDATES, SEQUENCES, LENGTH = 48, 20, 16, 8
ADAPTIVE = "model.embedding=adaptive,model.cutoffs=16:32,model.adaptive_factor=2"
MODELS = {"alibi": "position=alibi", "t5": "position=t5", "adaptive": ADAPTIVE}


def trajectory(model: str, axes: dict[str, int], devices: int) -> dict[str, np.ndarray]:
    """The loss of each update, and the parameters after the last one by their paths, on a mesh of `axes`."""
    # With momentum, not Adam, which turns the rounding errors of gradients that are zero into whole steps.
    config = make_config(
        f"{MODELS[model]},length={LENGTH},optimizer.name=nag,optimizer.warmup_steps=2,optimizer.learning_rate=0.05,"
        "optimizer.weight_decay=0,model.num_layers=1,model.width=16,model.num_heads=2,model.feed_forward=32,mesh.data=1",
        **{f"mesh__{axis}": size for axis, size in axes.items()},
    )
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    sharding = batch_sharding(mesh)
    decoder = build_model(config, VOCABULARY, sharding=sharding)
    optimizer, _ = make_optimizer(config.optimizer, UPDATES)
    state = initial_state(decoder, optimizer, mesh, seed=0)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = make_train_step(decoder, optimizer, 0, state_shardings=shardings)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (UPDATES, SEQUENCES, LENGTH + 1), dtype=np.int32)
    rows, losses = local_rows(sharding, SEQUENCES), []
    for update in tokens:
        halves = (update[None, rows, :-1], update[None, rows, 1:])
        batch = (jax.make_array_from_process_local_data(batch_sharding(mesh, leading=1), half) for half in halves)
        state, metrics = step(state, *batch)
        losses.append(float(metrics["nll_nats"] / metrics["tokens"]))
    params = multihost_utils.process_allgather(state.params, tiled=True)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    return {"losses": np.array(losses)} | {path: np.asarray(leaf) for path, leaf in leaves.items()}


def main(address: str, processes: str, process: str, file: str) -> None:
    peers.join(address, int(processes), int(process))
    found = {model: trajectory(model, {"data": 2, "fsdp": 2, "tensor": 2}, 8) for model in MODELS}
    if process == "0":
        np.savez(file, **{f"{model} {name}": array for model in found for name, array in found[model].items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
