"""Bytes on each device in a training step, from shapes and shardings. Nothing is allocated or compiled."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from alibi.attention.backends import DENSE_WEIGHTS
from alibi.config import Config
from alibi.parallel.sharding import batch_parts, batch_sharding, tree_shardings
from alibi.runs.checkpoint import TrainState
from alibi.training.setup import micro_batches

FLOAT32 = 4  # bytes
# under fsdp with remat or a loop over layers: the current layer and the next layer
GATHERED_LAYERS = 2


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes on each device.

    Attributes:
      parameters, optimizer: the state, exact, from its shapes, dtypes and shardings.
      gradients: as large as the parameters, or twice as large if micro-batches add up.
      activations: what layers keep for the backward pass, from `layer_bytes_per_token`.
      gathered: other devices' parameters under fsdp, in the products' dtype, and with
        `mesh.gather=update` the vocabulary's in float32 too, whose rows tokens look up.
      logits: float32 logits and their gradient, for a chunk of tokens, and the gradient of the softmax's
        matrix, which each device has whole under fsdp.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    gathered: int
    logits: int

    @property
    def total(self) -> int:
        """The peak: the state, and either the loss (activations, logits) or the update (gradients,
        updates), whichever is larger.

        The backward pass begins with the gradient of the softmax's matrix alone, and ends without
        activations.
        """
        accumulated = self.gradients - self.parameters
        at_loss = self.activations + self.gathered + self.logits
        at_update = 2 * self.parameters
        return self.parameters + self.optimizer + accumulated + max(at_loss, at_update)


def step_memory(
    config: Config, vocab_size: int, mesh: AbstractMesh, state: TrainState
) -> StepMemory:
    """Returns an update's bytes on each device in `mesh`.

    The state is exact, the rest an estimate, which `benchmarks/compile_plan.py` compares with a compiled
    TPU program (results/benchmarks/planning.md).
    """
    model, tensor, parts = config.model, mesh.shape["tensor"], batch_parts(batch_sharding(mesh))
    micro = micro_batches(config, parts)
    tokens = config.train.batch_tokens // parts // micro
    dense = tokens * parts * config.train_length * model.num_heads <= DENSE_WEIGHTS
    layer, layer_input = layer_bytes_per_token(config, tensor, dense=dense), FLOAT32 * model.width
    wide = "up" in model.kept and (1 + model.gated) * model.feed_forward
    attended = "attention" in model.kept and not dense and model.num_heads * (model.head_dim + 1)
    kept = (
        layer_input
        + wide * jnp.dtype(model.dtype).itemsize // tensor
        + attended * FLOAT32 // tensor
    )
    layers = model.num_layers * kept + layer if model.remat else model.num_layers * layer
    columns = max(vocab_size, model.vocab_rows)
    split = tensor if columns % tensor == 0 else 1
    if model.embedding == "adaptive":  # only its head has logits for all tokens
        columns, split = model.cutoffs[0] + len(model.cutoffs), 1
    parameters = _local_bytes(state.params, mesh)
    return StepMemory(
        parameters=parameters,
        optimizer=_local_bytes(state.opt_state, mesh),
        gradients=parameters * (2 if micro > 1 else 1),
        activations=tokens * (layers + layer_input),  # the final norm reads the last layer's output
        gathered=_gathered_bytes(config, state.params, mesh),
        logits=FLOAT32 * (2 * min(model.logits_chunk, tokens) + model.width) * columns // split,
    )


def layer_bytes_per_token(config: Config, tensor: int, *, dense: bool) -> int:
    """Returns the bytes per token that a layer keeps for the backward pass on each of `tensor` devices.

    With b bytes per number in the products (`model.dtype`), width w, feed-forward features f, h heads
    with w / h features and length L:

        2 x 4 w                each norm's input, float32 (the residual stream)
      + 2 b w                  the norms' results, which the products read
      + (4 b w + 4 w + 4 h) / tensor   queries, keys, values and attention's result: as the next product reads it,
                               and in float32 with an lse per head, as blocked attention keeps them, and b w more
                               for a gate on the result
      + 2 b f / tensor         features before and after the activation, or 3 b f if they are gated
      + 4 h L / tensor         attention's weights, if it is dense
      + masks of 1 byte        for each dropout with a rate above 0: 2 w, f / tensor, and h L / tensor if dense

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
    (arXiv 2205.05198), equation 2, s b h (10 + 24 / t) with 5 a s / (h t) for dense attention. Here the
    residual stream is float32, and blocked attention keeps its result and lse, not the weights (Dao et
    al. 2022). Not counted are position methods' arrays, and the float32 results of bfloat16 layers on
    CPUs.
    """
    model, b = config.model, jnp.dtype(config.model.dtype).itemsize
    weights = model.num_heads * config.train_length if dense else 0
    whole = (2 * FLOAT32 + 2 * b) * model.width
    of_queries, of_keys = (heads * model.head_dim for heads in (model.num_heads, model.kv_heads))
    split = b * ((2 + model.attention_gate) * of_queries + 2 * of_keys)
    split += (3 if model.gated else 2) * b * model.feed_forward
    split += FLOAT32 * (weights if dense else of_queries + model.num_heads)
    whole += 2 * model.width if model.dropout else 0
    split += model.feed_forward if model.activation_dropout else 0
    split += weights if model.attention_dropout else 0
    return whole + split // tensor


def _local_bytes(tree: Any, mesh: AbstractMesh) -> int:
    """Returns the bytes that `tree` takes on each device."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(tree_shardings(tree, mesh)), strict=True)
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in leaves
    )


def _gathered_bytes(config: Config, params: Any, mesh: AbstractMesh) -> int:
    """Returns `StepMemory.gathered`. The compiler may keep parameters from one pass to the other, so all
    layers count. With remat or a loop over layers only the embedding and `GATHERED_LAYERS` layers
    count, unless all are gathered once for an update.
    """
    if mesh.shape["fsdp"] == 1:
        return 0
    unsplit = AbstractMesh((1, 1, mesh.shape["tensor"]), mesh.axis_names)
    layers = {name: tree for name, tree in params.items() if name.startswith("layers")}
    received, of_layers = (
        _local_bytes(tree, unsplit) - _local_bytes(tree, mesh) for tree in (params, layers)
    )
    model, of_vocabulary = config.model, received - of_layers
    if (model.remat or model.scan_layers) and config.mesh.gather == "layer":
        received -= of_layers * max(model.num_layers - GATHERED_LAYERS, 0) // model.num_layers
    received = received * jnp.dtype(model.dtype).itemsize // FLOAT32
    looked_up = config.mesh.gather == "update" and model.dtype != "float32"
    return received + looked_up * of_vocabulary
