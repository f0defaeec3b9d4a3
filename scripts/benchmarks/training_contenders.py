"""The contenders of `scripts/benchmark.py train`, `positions` and `adaptive`: whole training steps."""

from collections.abc import Callable
from typing import Any

import numpy as np

from alibi.config import Config, replaced
from benchmarks.processes import Contender, Step, require_torch

VOCABULARY = 256  # bytes


def project_contender(config: Config) -> Contender:
    """This project's own model and jitted training step, as train.py builds them."""
    return Contender(_project_step, (config,))


def contender_without_attention(config: Config) -> Contender:
    """The same step with an attention that costs next to nothing; its projections stay."""
    return Contender(_step_without_attention, (config,))


def torch_contender(config: Config, *, compiled: bool) -> Contender:
    """The same model, optimizer and batch in PyTorch.

    Raises:
      ValueError: PyTorch is not installed.
    """
    require_torch()
    return Contender(_torch_step, (config, compiled))


def _project_step(config: Config) -> Step:
    return training_step(config, VOCABULARY, random_batch(config))


def _step_without_attention(config: Config) -> Step:
    from alibi.attention.backends import BACKENDS, Backend

    # All three have a part in the result and in the gradients: of what has none, XLA would
    # leave out the projection too. The process is this contender's own.
    BACKENDS["reference"] = Backend(lambda call: call.query * call.key + call.value, lambda call: "")
    return _project_step(replaced(config, {"model.attention": "reference"}))


def training_step(config: Config, vocab_size: int, batch: tuple[np.ndarray, np.ndarray]) -> Step:
    """The project's step on one batch of inputs and targets `[batch, length]`, again and again."""
    import jax

    from alibi.model.decoder import build_model
    from alibi.parallel.sharding import batch_parts, batch_sharding, make_mesh
    from alibi.training.optimizer import make_optimizer
    from alibi.training.setup import micro_batches
    from alibi.training.step import abstract_state, initial_state, make_train_step

    mesh = make_mesh(config.mesh)
    model = build_model(config, vocab_size, sharding=batch_sharding(mesh))
    optimizer, schedule = make_optimizer(config.optimizer, config.train.steps)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh))
    train_step = make_train_step(model, optimizer, config.seed, schedule=schedule, state_shardings=shardings)
    shape = (micro_batches(config, batch_parts(model.sharding)), -1, config.train_length)
    inputs, targets = (jax.device_put(x.reshape(shape), batch_sharding(mesh, leading=1)) for x in batch)
    state = initial_state(model, optimizer, mesh, config.seed)
    compiled = train_step.lower(state, inputs, targets).compile()

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, metrics = compiled(state, inputs, targets)
        jax.block_until_ready(metrics)

    memory = compiled.memory_analysis()
    size = memory.argument_size_in_bytes + memory.temp_size_in_bytes if memory else None
    return Step(run, memory_bytes=size, program=compiled.as_text)


def _torch_step(config: Config, compiled: bool) -> Step:
    from benchmarks.torch_peers import make_train_step

    return torch_training_step(make_train_step(config, VOCABULARY, random_batch(config), compiled=compiled))


def torch_training_step(train_step: Callable[[], Any]) -> Step:
    """Of a function that makes one update in PyTorch and gives its loss."""

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = train_step()
        loss.item()

    return Step(run)


def random_batch(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets `[batch, length]`, random."""
    shape = (2, config.train.batch_tokens // config.train_length, config.train_length)
    inputs, targets = np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype=np.int32)
    return inputs, targets
