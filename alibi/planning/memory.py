"""Bytes of a training step on each device, from shapes and shardings; nothing is allocated or
compiled.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from alibi.attention.backends import DENSE_WEIGHTS
from alibi.config import Config
from alibi.model.attention import DTYPES
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
      parameters, optimizer: the state, exact: from its shapes, dtypes and shardings.
      gradients: as large as the parameters; twice as large if micro-batches add up.
      activations: kept by the layers for the backward pass, by the formula of
        `layer_bytes_per_token`.
      gathered: parameters of other devices under fsdp, in the dtype of the products.
      logits: float32 logits and their gradient, for a chunk of tokens.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    gathered: int
    logits: int

    @property
    def total(self) -> int:
        """The peak: the state, and the larger of the loss (activations, logits) and the update
        (gradients, updates).

        When the backward pass begins there are no gradients yet; when it ends no activation is
        left.
        """
        accumulated = self.gradients - self.parameters
        at_loss = self.activations + self.gathered + self.logits
        at_update = 2 * self.parameters
        return self.parameters + self.optimizer + accumulated + max(at_loss, at_update)


def step_memory(
    config: Config, vocab_size: int, mesh: AbstractMesh, state: TrainState
) -> StepMemory:
    """Returns the bytes of an update on each device of `mesh`.

    The state is exact, the rest is an estimate; `benchmarks/compile_plan.py` compares it with a
    compiled TPU program (results/benchmarks/planning.md).
    """
    model, tensor, parts = config.model, mesh.shape["tensor"], batch_parts(batch_sharding(mesh))
    micro = micro_batches(config, parts)
    tokens = config.train.batch_tokens // parts // micro
    dense = tokens * parts * config.train_length * model.num_heads <= DENSE_WEIGHTS
    layer, layer_input = layer_bytes_per_token(config, tensor, dense=dense), FLOAT32 * model.width
    layers = model.num_layers * layer_input + layer if model.remat else model.num_layers * layer
    columns = max(vocab_size, model.vocab_rows)
    split = tensor if columns % tensor == 0 else 1
    if model.embedding == "adaptive":  # its head alone has logits of all tokens
        columns, split = model.cutoffs[0] + len(model.cutoffs), 1
    parameters = _local_bytes(state.params, mesh)
    return StepMemory(
        parameters=parameters,
        optimizer=_local_bytes(state.opt_state, mesh),
        gradients=parameters * (2 if micro > 1 else 1),
        activations=tokens * (layers + layer_input),  # the final norm reads the last layer's output
        gathered=_gathered_bytes(config, state.params, mesh),
        logits=2 * FLOAT32 * min(model.logits_chunk, tokens) * columns // split,
    )


def layer_bytes_per_token(config: Config, tensor: int, *, dense: bool) -> int:
    """Returns the bytes of a layer per token, kept for the backward pass on each of `tensor`
    devices.

    With b bytes per number in the products (`model.dtype`), width w, feed-forward features f, h
    heads of w / h features and length L:

        2 x 4 w                the input of each layer norm, float32 (the residual stream)
      + 2 b w                  the results of the norms, which the products read
      + (4 b w + 4 w + 4 h) / tensor   queries, keys, values, the result of attention: as the next product reads it,
                               and in float32 with an lse per head, as blocked attention keeps them; b w more for the
                               gate of the result, if there is one
      + 2 b f / tensor         the features before and after the activation; 3 b f if they are gated
      + 4 h L / tensor         the weights of attention, if it is dense
      + masks of 1 byte        for each dropout whose rate is not 0: 2 w, f / tensor, and h L / tensor if dense

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
    (arXiv 2205.05198), equation 2, s b h (10 + 24 / t) with 5 a s / (h t) for dense attention. Here
    the residual stream is float32, and blocked attention keeps its result and lse in place of the
    weights (Dao et al. 2022). Arrays of position methods are not counted, nor the float32
    results of bfloat16 layers on CPUs.
    """
    model, b = config.model, jnp.dtype(DTYPES[config.model.dtype]).itemsize
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
    """Returns the bytes of `tree` on each device."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(tree_shardings(tree, mesh)), strict=True)
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in leaves
    )


def _gathered_bytes(config: Config, params: Any, mesh: AbstractMesh) -> int:
    """Returns the bytes of parameters from other devices: of all layers, since both passes share
    them.

    With remat or a loop over layers, of `GATHERED_LAYERS` layers and the embedding.
    """
    if mesh.shape["fsdp"] == 1:
        return 0
    unsplit = AbstractMesh((1, 1, mesh.shape["tensor"]), mesh.axis_names)
    layers = {name: tree for name, tree in params.items() if name.startswith("layers")}
    received, of_layers = (
        _local_bytes(tree, unsplit) - _local_bytes(tree, mesh) for tree in (params, layers)
    )
    model = config.model
    if model.remat or model.scan_layers:
        received -= of_layers * max(model.num_layers - GATHERED_LAYERS, 0) // model.num_layers
    return received * jnp.dtype(DTYPES[model.dtype]).itemsize // FLOAT32
