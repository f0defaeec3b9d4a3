"""Whole training steps, which several benchmarks time."""

from typing import Any

import numpy as np

from alibi.config import Config, replaced
from benchmarks.processes import Step

VOCABULARY = 256  # bytes


def compile_step(config: Config, vocab_size: int, mesh: Any) -> tuple[Any, ...]:
    """Returns the model, the optimizer, a batch's shape with its sharding, and the compiled
    training step, as train.py makes them on `mesh`.
    """
    import jax

    from alibi.model.decoder import build_model
    from alibi.model.loss import training_loss
    from alibi.parallel.sharding import batch_parts, batch_sharding
    from alibi.training.optimizer import make_optimizer
    from alibi.training.setup import micro_batches
    from alibi.training.step import abstract_state, make_train_step

    sharding = batch_sharding(mesh)
    model = build_model(config, vocab_size, sharding=sharding)
    optimizer, schedule = make_optimizer(config.optimizer, config.train.steps)
    state = abstract_state(model, optimizer, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    train_step = make_train_step(
        model,
        optimizer,
        config.seed,
        loss=training_loss(config),
        schedule=schedule,
        state_shardings=shardings,
    )
    micro = micro_batches(config, batch_parts(sharding))
    shape = (micro, config.train.batch_tokens // config.train_length // micro, config.train_length)
    batch = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(mesh, leading=1))
    return model, optimizer, batch, train_step.lower(state, batch, batch).compile()


def training_step(config: Config, vocab_size: int) -> Step:
    """Returns this project's own model and jitted training step, as train.py builds them, on a
    batch.
    """
    import jax

    from alibi.parallel.sharding import make_mesh
    from alibi.training.step import initial_state

    mesh = make_mesh(config.mesh)
    model, optimizer, batch, compiled = compile_step(config, vocab_size, mesh)
    inputs, targets = (
        jax.device_put(x.reshape(batch.shape), batch.sharding)
        for x in make_batch(config, vocab_size)
    )
    state = initial_state(model, optimizer, mesh, config.seed)

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, metrics = compiled(state, inputs, targets)
        jax.block_until_ready(metrics)

    memory = compiled.memory_analysis()
    size = memory.argument_size_in_bytes + memory.temp_size_in_bytes if memory else None
    return Step({"run": run}, {"step_memory_bytes": size}, program=compiled.as_text)


def step_without_attention(config: Config, vocab_size: int) -> Step:
    """Returns the same step with an attention that costs next to nothing; its projections stay."""
    from alibi.attention.backends import BACKENDS, Backend

    # All three are part of the result and of the gradients: XLA would leave out the projection of
    # an array that is not. The process belongs to this contender alone.
    BACKENDS["reference"] = Backend(lambda call: call.query * call.key + call.value)
    return training_step(replaced(config, {"model.attention": "reference"}), vocab_size)


def torch_step(config: Config, vocab_size: int, compiled: bool) -> Step:
    """Returns the same model, optimizer and batch in PyTorch."""
    from benchmarks.torch_peer import make_train_step

    train_step = make_train_step(
        config, vocab_size, make_batch(config, vocab_size), compiled=compiled
    )

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = train_step()
        loss.item()

    return Step({"run": run})


def make_batch(config: Config, vocab_size: int) -> np.ndarray:
    """Returns random inputs and targets, `[2, batch, length]`: bytes uniformly, words by Zipf's law."""
    shape = (2, config.train.batch_tokens // config.train_length, config.train_length)
    if vocab_size == VOCABULARY:
        return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)
    return zipf_words(vocab_size, shape)


def zipf_words(vocab_size: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns words that follow Zipf's law with Mandelbrot's shift: as many in each band of a vocabulary as
    in a text.
    """
    weights = 1 / (np.arange(vocab_size) + 2.7)
    return (
        np.random.default_rng(0)
        .choice(vocab_size, size=shape, p=weights / weights.sum())
        .astype(np.int32)
    )
