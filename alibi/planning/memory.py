"""The bytes that a training step takes on one device, from shapes, shardings and traces: nothing is allocated."""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import AbstractMesh

from alibi.attention.call import traced_for
from alibi.model.config import DTYPES
from alibi.model.decoder import DecoderLM, build_model, param_shapes
from alibi.parallel.sharding import batch_parts, batch_sharding, tree_shardings
from alibi.planning.residuals import kept_bytes
from alibi.runs.checkpoint import TrainState
from alibi.training.optimizer import make_optimizer
from alibi.training.setup import micro_batches, sequences_per_update
from alibi.training.state import abstract_state

# Of a chunk of tokens: the logits and their gradient, float32.
LOGITS_COPIES, LOGIT_BYTES = 2, 4
GATHERED_LAYERS = 2  # of fsdp with remat: the one that is computed, and the next one


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes on one device.

    Attributes:
      parameters, optimizer: of the state, exactly: from their shapes, dtypes and shardings.
      gradients: as large as the parameters, twice where micro-batches add up.
      activations: what the layers keep for the backward pass, and with remat besides what one of them does.
      gathered: whole parameters of layers and the embedding, in the dtype of the products, where fsdp splits them.
      logits: of one chunk of tokens.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    gathered: int
    logits: int

    @property
    def total(self) -> int:
        """The most at one time: beside the state it is what the loss needs, or the gradients and what they become.

        When the backward pass begins no gradient is there yet, and when it ends no activation is left.
        """
        accumulated = max(self.gradients - self.parameters, 0)
        at_loss = self.activations + self.gathered + self.logits
        at_update = 2 * self.parameters
        return self.parameters + self.optimizer + accumulated + max(at_loss, at_update)


def state_shapes(config: ml_collections.ConfigDict, vocab_size: int) -> TrainState:
    """Shapes and dtypes of the state, which depend on no mesh."""
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    alone = AbstractMesh((1, 1, 1), ("data", "fsdp", "tensor"))
    return abstract_state(build_model(config, vocab_size), optimizer, alone)


def step_memory(
    config: ml_collections.ConfigDict, vocab_size: int, mesh: AbstractMesh, platform: str, state: TrainState
) -> StepMemory:
    """What an update of `config` takes on each device of `mesh`, as its program is written for `platform`.

    The state is told exactly. The rest is an estimate: activations from what reverse-mode differentiation of the
    traced program keeps (`alibi.planning.residuals`), which is what XLA keeps on CPUs, while on accelerators and
    outside of loops what elementwise operations give is taken to be computed again; logits and gathered parameters by
    their sizes. It was within a tenth of six steps that XLA compiled for TPU v5e
    (results/benchmarks/planning.md), and within a quarter of those compiled for CPUs; it was compared with none for
    GPUs.
    """
    parameters = _local_bytes(state.params, mesh)
    accumulates = micro_batches(config, _parts(mesh)) > 1
    return StepMemory(
        parameters=parameters,
        optimizer=_local_bytes(state.opt_state, mesh),
        gradients=parameters * (2 if accumulates else 1),
        activations=round(_activations(config, vocab_size, mesh, platform)),
        gathered=_gathered_bytes(config, state.params, mesh),
        logits=_logits_bytes(config, vocab_size, mesh),
    )


def _parts(mesh: AbstractMesh) -> int:
    return batch_parts(batch_sharding(mesh))


def _local_bytes(tree: Any, mesh: AbstractMesh) -> int:
    """Of the part of arrays that one device holds."""
    shardings = jax.tree.leaves(tree_shardings(tree, mesh))
    leaves = zip(jax.tree.leaves(tree), shardings, strict=True)
    return sum(math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, sharding in leaves)


def _activations(config: ml_collections.ConfigDict, vocab_size: int, mesh: AbstractMesh, platform: str) -> float:
    """Of all layers: each keeps the same, so two tell what any number does."""
    model = config.model
    kept = functools.partial(_kept, config, vocab_size, mesh, platform)
    # A loop over layers keeps all that the trace of one keeps. On CPUs that is what XLA does anyway.
    fuses = platform != "cpu" and not (model.scan_layers and not model.remat)
    one, two = (kept(layers, remat=model.remat, fuses=fuses) for layers in (1, 2))
    total = one + (model.num_layers - 1) * (two - one)
    if model.remat:  # the layer that is computed again
        total += kept(2, remat=False, fuses=fuses) - kept(1, remat=False, fuses=fuses)
    return total


def _kept(
    config: ml_collections.ConfigDict,
    vocab_size: int,
    mesh: AbstractMesh,
    platform: str,
    layers: int,
    *,
    remat: bool,
    fuses: bool,
) -> float:
    """What a model of so many layers keeps of one micro-batch, its embedding included and its softmax not."""
    config = ml_collections.ConfigDict(config.to_dict())
    config.model.update(num_layers=layers, remat=remat, scan_layers=False)
    parts, tensor = _parts(mesh), mesh.shape["tensor"]
    rows = sequences_per_update(config, parts) // micro_batches(config, parts)
    tokens = rows * config.train_length

    def share(shape: tuple[int, ...]) -> float:
        """Of an array: batches are split, and along `tensor` what belongs to heads or to the feed-forward layer."""
        split = rows in shape or any(size and size % tokens == 0 for size in shape)
        of_heads = len(shape) > 3 and config.model.num_heads in shape[1:]
        of_features = shape[-1:] == (config.model.feed_forward,) != (config.model.width,)
        return (1 / parts if split else 1.0) * (1 / tensor if of_heads or of_features else 1.0)

    with traced_for(platform, mesh.size):
        model = build_model(config, vocab_size, sharding=batch_sharding(mesh))
        key = jax.eval_shape(lambda: jax.random.key(0))
        features = nn.apply(DecoderLM.features, model)
        return kept_bytes(
            lambda params, ids, key: features({"params": params}, ids, deterministic=False, rngs={"dropout": key}),
            param_shapes(model),
            jax.ShapeDtypeStruct((rows, config.train_length), np.int32),
            key,
            share=share,
            fuses=fuses,
        )


def _gathered_bytes(config: ml_collections.ConfigDict, params: Any, mesh: AbstractMesh) -> int:
    """Of the parameters that a device has besides its own part: those of all layers, since both passes share them.

    With remat, which parts the passes, and in a loop only those of `GATHERED_LAYERS`, and the embedding.
    """
    if mesh.shape["fsdp"] == 1:
        return 0
    tensor_alone = AbstractMesh((1, 1, mesh.shape["tensor"]), mesh.axis_names)
    whole = _local_bytes(params, tensor_alone) - _local_bytes(params, mesh)
    layers = {name: tree for name, tree in params.items() if name.startswith("layers")}
    of_layers = _local_bytes(layers, tensor_alone) - _local_bytes(layers, mesh)
    model = config.model
    if model.remat or model.scan_layers:
        whole -= of_layers * max(model.num_layers - GATHERED_LAYERS, 0) // model.num_layers
    return whole * jnp.dtype(DTYPES[model.dtype]).itemsize // 4


def _logits_bytes(config: ml_collections.ConfigDict, vocab_size: int, mesh: AbstractMesh) -> int:
    """Of the chunk of tokens whose logits a device has at one time; of an adaptive softmax those of its head."""
    parts, model = _parts(mesh), config.model
    tokens = config.train.batch_tokens // parts // micro_batches(config, parts)
    adaptive = model.embedding == "adaptive"
    columns = model.cutoffs[0] + len(model.cutoffs) if adaptive else vocab_size
    split = mesh.shape["tensor"] if not adaptive and vocab_size % mesh.shape["tensor"] == 0 else 1
    return LOGITS_COPIES * LOGIT_BYTES * min(model.logits_chunk, tokens) * columns // split
