"""Whole training steps, which several benchmarks time: this project's, plain Flax's and PyTorch's."""

import dataclasses
from collections.abc import Callable
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
    from alibi.optimizers import make_optimizer
    from alibi.parallel.sharding import batch_parts, batch_sharding
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
        gather=config.mesh.gather,
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
    return _jax_step(compiled, state, state.params, inputs, targets)


def _jax_step(compiled: Any, state: Any, params: Any, *batch: Any) -> Step:
    """Returns a compiled step, from a state and a batch to the next state and something to wait for."""
    import jax

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, metrics = compiled(state, *batch)
        jax.block_until_ready(metrics)

    memory, device = compiled.memory_analysis(), jax.local_devices()[0]
    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "step_memory_bytes": memory and memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "accelerator": None if device.platform == "cpu" else device.device_kind,
    }
    return Step({"run": run}, facts, program=compiled.as_text)


def step_without_attention(config: Config, vocab_size: int) -> Step:
    """Returns the same step with an attention that costs next to nothing. Its projections stay."""
    from alibi.attention.backends import BACKENDS

    # All three are part of the result and of the gradients: XLA would leave out the projection of
    # an array that is not. The process belongs to this contender alone.
    BACKENDS["reference"] = dataclasses.replace(
        BACKENDS["reference"], run=lambda call: call.query * call.key + call.value
    )
    return training_step(replaced(config, {"model.attention": "reference"}), vocab_size)


def flax_program(
    config: Config, vocab_size: int, attention: Callable | None = None
) -> tuple[Any, Any, Callable]:
    """Returns the same model without positions as Flax's own layers make it, which is the plain way to
    write it, the same optimizer, and a function from (parameters, its state) and a batch to the next
    ones and the loss.

    Its residual stream and logits are in `model.dtype`, the loss is float32.

    Args:
      attention: the layers' `attention_fn`, which masks. Defaults to Flax's under a causal mask.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    from alibi.optimizers import make_optimizer

    sizes = config.model

    class FlaxLM(nn.Module):  # with our names, by which cycles are counted by part
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            embed = nn.Embed(vocab_size, sizes.width, dtype=sizes.dtype, name="embedding")
            x = embed(tokens) * sizes.width**0.5
            mask = None if attention else nn.make_causal_mask(tokens)
            for index in range(sizes.num_layers):
                x = FlaxLayer(name=f"layers_{index}")(x, mask)
            return embed.attend(nn.LayerNorm(dtype=sizes.dtype, name="final_norm")(x))

    class FlaxLayer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            layer = nn.MultiHeadDotProductAttention(
                sizes.num_heads,
                dtype=sizes.dtype,
                attention_fn=attention or nn.dot_product_attention,
                name="attention",
            )
            x = x + layer(nn.LayerNorm(dtype=sizes.dtype, name="attention_norm")(x), mask=mask)
            up = nn.Dense(sizes.feed_forward, dtype=sizes.dtype, name="up")
            down = nn.Dense(sizes.width, dtype=sizes.dtype, name="down")
            normed = nn.LayerNorm(dtype=sizes.dtype, name="feed_forward_norm")(x)
            return x + down(nn.relu(up(normed)))

    model, (optimizer, _) = FlaxLM(), make_optimizer(config.optimizer, config.train.steps)

    def mean_nll(params: Any, inputs: Any, targets: Any) -> Any:
        logits = model.apply({"params": params}, inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def update(both: tuple[Any, Any], inputs: Any, targets: Any) -> tuple[tuple[Any, Any], Any]:
        params, state = both
        loss, gradients = jax.value_and_grad(mean_nll)(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return model, optimizer, update


def flax_step(config: Config, vocab_size: int) -> Step:
    """Returns plain Flax's step with the attention of `causal_attention`."""
    import jax

    model, optimizer, update = flax_program(config, vocab_size, causal_attention)
    inputs, targets = map(jax.numpy.asarray, make_batch(config, vocab_size))
    params = jax.jit(model.init)(jax.random.key(config.seed), inputs)["params"]
    both = params, jax.jit(optimizer.init)(params)
    compiled = jax.jit(update, donate_argnums=0).lower(both, inputs, targets).compile()
    return _jax_step(compiled, both, params, inputs, targets)


def causal_attention(query: Any, key: Any, value: Any) -> Any:
    """Returns `jax.nn.dot_product_attention`, by cuDNN on GPUs."""
    import jax

    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )


def torch_step(config: Config, vocab_size: int, compiled: bool, attention: str = "sdpa") -> Step:
    """Returns the same model, optimizer and batch in PyTorch, on a GPU if there is one."""
    import torch

    from benchmarks.torch_peer import make_train_step

    # The paper's layout makes tensors where the CPU is.
    on_gpu = torch.cuda.is_available() and config.model.embedding != "adaptive"
    batch = make_batch(config, vocab_size)
    with torch.device("cuda" if on_gpu else "cpu"):
        train_step, model = make_train_step(
            config, vocab_size, batch, compiled=compiled, attention=attention
        )

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = train_step()
        loss.item()

    facts = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    if on_gpu:
        run(2)  # the second holds the optimizer's state too
        facts["step_memory_bytes"] = torch.cuda.max_memory_allocated()
        facts["accelerator"] = torch.cuda.get_device_name()
    return Step({"run": run}, facts)


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
