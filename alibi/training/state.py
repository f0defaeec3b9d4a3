"""What training changes: parameters, optimizer state and the count of updates."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from alibi.model.decoder import DecoderLM
from alibi.parallel.sharding import laid_out
from alibi.runs.checkpoint import TrainState


def abstract_state(model: DecoderLM, optimizer: optax.GradientTransformation, mesh: Mesh | AbstractMesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, without allocating it."""
    return _abstract(functools.partial(_initial, model, optimizer), mesh)


def initial_state(model: DecoderLM, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
    """The state before the first update; each device makes only its own part."""
    initial = functools.partial(_initial, model, optimizer)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, _abstract(initial, mesh))
    return jax.jit(initial, out_shardings=shardings)(np.uint32(seed))


def _abstract(initial: Callable[[int], TrainState], mesh: Mesh | AbstractMesh) -> TrainState:
    return laid_out(jax.eval_shape(initial, 0), mesh)


def _initial(model: DecoderLM, optimizer: optax.GradientTransformation, seed: int | Array) -> TrainState:
    params = model.init(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))["params"]
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))
