"""A call as the fused kernels get it.

Both kernel modules, `mosaic` for TPUs and `triton` for GPUs, have three functions. All get the
plan, the operands, and `needed`, whether each tile is computed, `[batch, heads, q_blocks,
k_blocks]`:

    forward(..., dtype)                  the result, in `dtype`, and `Backward.lse`
    backward_queries(..., backward)      the gradient for queries
    backward_keys(..., backward, names)  the gradients for keys and values, for each query head, and
                                         for the arrays in the bias with these names, as a
                                         dictionary, in the shapes of `Operands.bias` before `KernelPlan.unit`
"""

import dataclasses
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from alibi.attention.call import AttentionCall
from alibi.attention.skipping import tile_distances
from alibi.attention.tiles import Tiling, make_tiling
from alibi.positions.bias import consecutive
from alibi.positions.metric import Metric

# Queries, and keys, of a tile; powers of two, since the sum along diagonals halves a tile again and
# again.
BLOCK, GPU_BLOCK = 512, 128
INTERPRET_GPU = False  # whether a CPU interprets the kernels for GPUs instead of those for TPUs
LANES = 128  # numbers in a row of a TPU's registers
MOST_TILES = 2**17  # that a TPU's kernel lists in scalar memory, of 1 MiB


@dataclasses.dataclass(frozen=True)
class KernelPlan(Tiling):
    """The call's tiles, a sequence and a head at a time, and the kernels' other static values.

    Attributes:
      shared_by: query heads for each key head.
      scale: the factor for products of queries and keys.
      first: positions of the first query and the first key, or None unless both stand at
        consecutive known positions, and there is no `metric`.
      level_from: as the bias has it.
      symmetric: slopes count |p_i - p_j|.
      metric: the distance of places that slopes count in place of it, or None.
      on_gpu: the kernels are those for GPUs.
      interpret: the kernels run as JAX operations, for tests on a CPU.
      most_tiles: the most tiles that the call can need, known when it is traced.
    """

    shared_by: int
    scale: float
    first: tuple[int, int] | None
    level_from: int | None
    symmetric: bool
    metric: Metric | None
    on_gpu: bool
    interpret: bool
    most_tiles: int

    @property
    def block(self) -> int:
        """Queries, and keys, in a tile."""
        return self.q_block

    @property
    def unit(self) -> float:
        """The logits' factor in the kernels: GPUs compute exponentials to base 2."""
        return math.log2(math.e) if self.on_gpu else 1.0


class Operands(NamedTuple):
    """The call's arrays, in whole blocks.

    Attributes:
      bias: float32. "slopes" `[heads]`, or "diagonals" `[heads, q_blocks + k_blocks, 1, block]`, from
        the largest i - j to the least, so that a tile reads two neighbouring rows, both times
        `KernelPlan.unit`. Or "query_term" `[batch, heads, 1, q]` and "key_term" `[batch, heads, 1, k]`.
      sink: float32, times `KernelPlan.unit`, or None.
      sides: "query_positions", "key_positions", "query_segments" and "key_segments" if they are
        needed, `[batch or 1, 1, length]`, int32, and "mask", `[batch or 1, heads or 1, q, k]`, int8.
    """

    query: Float[Array, "batch heads q head_dim"]
    key: Float[Array, "batch kv_heads k head_dim"]
    value: Float[Array, "batch kv_heads k value_dim"]
    bias: dict[str, Array]
    sink: Float[Array, " heads"] | None
    sides: dict[str, Array]

    @property
    def hides(self) -> bool:
        """Whether segments or a mask may hide a pair in any tile."""
        return "query_segments" in self.sides or "mask" in self.sides


class Backward(NamedTuple):
    """More arrays for the backward pass.

    Attributes:
      dout: the gradient of the result.
      lse: log(sum(exp(logits))) for each query, times `KernelPlan.unit`.
      delta: the sum of dout * result over features.
    """

    dout: Float[Array, "batch heads q value_dim"]
    lse: Float[Array, "batch heads 1 q"]
    delta: Float[Array, "batch heads 1 q"]


def make_plan(call: AttentionCall) -> KernelPlan:
    """Returns the call's plan, in blocks that suit the platform.

    Raises:
      ValueError: a precision that the kernels don't have.
    """
    longest = max(call.query.shape[-3], call.key.shape[-3])
    whole = max(LANES, 1 << (longest - 1).bit_length())
    plan = _in_blocks(
        call, min(call.options.block or (GPU_BLOCK if _on_gpu(call) else BLOCK), whole)
    )
    if call.options.block or plan.on_gpu or plan.most_tiles <= MOST_TILES:
        return plan
    return _in_blocks(call, 2 * plan.block)


def _in_blocks(call: AttentionCall, block: int) -> KernelPlan:
    tiling, first = make_tiling(call), None
    tiling = dataclasses.replace(tiling, batch_group=1, head_group=1, q_block=block, k_block=block)
    metric = None if call.bias is None else call.bias.metric
    if metric is None and call.known_positions is not None and consecutive(*call.known_positions):
        queries, keys = call.known_positions
        first = int(queries[0]), int(keys[0])
    return KernelPlan(
        **vars(tiling) | {"precision": _precision(call)},
        shared_by=call.query.shape[-2] // call.key.shape[-2],
        scale=call.query.shape[-1] ** -0.5,
        first=first,
        level_from=None if call.bias is None else call.bias.level_from,
        symmetric=call.bias is not None and call.bias.symmetric,
        metric=metric,
        on_gpu=_on_gpu(call),
        interpret=call.options.platform == "cpu",
        most_tiles=_most_tiles(call, tiling),
    )


def _on_gpu(call: AttentionCall) -> bool:
    return call.options.platform == "gpu" or (call.options.platform == "cpu" and INTERPRET_GPU)


def _precision(call: AttentionCall) -> lax.Precision | None:
    """Returns the precision for products: the highest, or None for the default, in which bfloat16 is
    exact.
    """
    wanted = call.precision
    wanted = cast(Any, jax.config).jax_default_matmul_precision if wanted is None else wanted
    names = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    precisions = {lax.Precision(name) if isinstance(name, str) else name for name in names}
    if (
        not precisions <= {None, lax.Precision.DEFAULT, lax.Precision.HIGHEST}
        or len(precisions) > 1
    ):
        raise ValueError(f"it takes the default precision or the highest, and got {wanted}")
    highest = lax.Precision.HIGHEST in precisions and call.query.dtype != jnp.bfloat16
    return lax.Precision.HIGHEST if highest else None


def _most_tiles(call: AttentionCall, tiling: Tiling) -> int:
    """Returns how many tiles a call needs if its bias skips none, at least one for each query block
    and each key block.
    """
    if call.known_positions is None:
        return tiling.groups * tiling.q_blocks * tiling.k_blocks
    sides = zip(call.known_positions, tiling.padding, strict=True)
    queries, keys = (np.pad(side, (0, more), mode="edge") for side, more in sides)
    (seen,) = tiling.sight.of_tiles(*tile_distances(queries, keys, tiling))
    of_rows, of_columns = (np.maximum(seen.sum(axis=axis), 1).sum() for axis in (1, 0))
    return tiling.groups * int(max(of_rows, of_columns))
