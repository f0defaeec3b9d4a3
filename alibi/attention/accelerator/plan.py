"""A call of attention as the fused kernels get it.

Both modules of kernels, `mosaic` for TPUs and `triton` for GPUs, have three functions. All get the
plan, the operands, and `needed`, whether each tile is computed, `[batch, heads, q_blocks,
k_blocks]`:

    forward(..., dtype)                  the result, in `dtype`, and `Backward.lse`
    backward_queries(..., backward)      the gradient of the queries
    backward_keys(..., backward, names)  the gradients of keys and of values, for each query head, and
                                         those of the arrays of the bias with these names, as a
                                         dictionary, in the shapes of `Operands.bias` before `Plan.unit`
"""

import dataclasses
import math
from typing import Any, NamedTuple

from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static values of a call.

    Attributes:
      batch, heads: numbers of sequences and of query heads.
      group: query heads for each head of keys and values.
      q_blocks, k_blocks: numbers of blocks.
      block: queries, and keys, of a tile.
      q_length, k_length: queries and keys of the call, without those that fill the last block.
      causal, window, logit_cap, precision: those of the call.
      scale: the factor of the products of queries and keys.
      first: positions of the first query and the first key if both stand at consecutive positions
        known when the call is traced; else None.
      symmetric: slopes count |p_i - p_j|.
      most_tiles: the most tiles that the call can need, known when it is traced.
      on_gpu: the kernels are those for GPUs.
      interpret: the kernels run as JAX operations, for tests on a CPU.
    """

    batch: int
    heads: int
    group: int
    q_blocks: int
    k_blocks: int
    block: int
    q_length: int
    k_length: int
    causal: bool
    window: int | None
    logit_cap: float | None
    precision: Any
    scale: float
    first: tuple[int, int] | None
    symmetric: bool
    most_tiles: int
    on_gpu: bool
    interpret: bool

    @property
    def unit(self) -> float:
        """The factor of the logits in the kernels: GPUs compute exponentials to base 2."""
        return math.log2(math.e) if self.on_gpu else 1.0


class Operands(NamedTuple):
    """The arrays of a call, in whole blocks.

    Attributes:
      bias: "slopes" `[heads]`; or "diagonals" `[heads, q_blocks + k_blocks, 1, block]`, from the
        largest i - j to the least, so that a tile reads two neighbouring rows of them; both times
        `Plan.unit`; or "query_term" `[batch, heads, 1, q]` and "key_term" `[batch, heads, 1, k]`;
        float32.
      sink: float32, times `Plan.unit`, or None.
      sides: "query_positions", "key_positions", "query_segments" and "key_segments", those that are
        needed, `[batch or 1, 1, length]`, int32.
    """

    query: Float[Array, "batch heads q head_dim"]
    key: Float[Array, "batch kv_heads k head_dim"]
    value: Float[Array, "batch kv_heads k value_dim"]
    bias: dict[str, Array]
    sink: Float[Array, " heads"] | None
    sides: dict[str, Array]


class Backward(NamedTuple):
    """The further arrays of the backward pass.

    Attributes:
      dout: the gradient of the result.
      lse: for each query the logarithm of the sum of the exponentials of its logits, times `Plan.unit`.
      delta: the product of the result and its gradient.
    """

    dout: Float[Array, "batch heads q value_dim"]
    lse: Float[Array, "batch heads 1 q"]
    delta: Float[Array, "batch heads 1 q"]
