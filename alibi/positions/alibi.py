"""ALiBi: attention with linear biases (paper, section 3)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from alibi.positions.base import Params, PositionMethod
from alibi.positions.bias import Blocks, KnownPositions, per_head, static
from alibi.positions.distance import DistanceBias
from alibi.slopes import alibi_slopes


def alibi_bias(
    num_heads: int,
    query_positions: Integer[Array, "*#batch q"],
    key_positions: Integer[Array, "*#batch k"],
    *,
    symmetric: bool = False,
    convention: str = "paper",
) -> Float[Array, "*#batch heads q k"]:
    """ALiBi's bias -m_h (i - j) of query i and key j, float32 `[heads, q, k]`.

    It is added to the logits after their scaling by 1/sqrt(head_dim). Positions are
    integers, so distances are exact at any length. Keys after the query get a positive
    bias, which a causal mask hides; `symmetric=True` gives -m_h |i - j| instead, for
    attention without one. `convention` is that of `alibi_slopes`, of whose random slopes
    these are the first draw.

    Raises:
      ValueError: positions that are not integers; see also `alibi_slopes`.
    """
    return AlibiBias(alibi_slopes(num_heads, convention), symmetric)(query_positions, key_positions)


class AlibiBias(DistanceBias):
    """-m_h (i - j) for any block of positions.

    Attributes:
      slopes: m of each head, float32.
      symmetric: use |i - j| in place of i - j.
    """

    bounded = True
    slopes: Float[Array, " heads"] = per_head()
    symmetric: bool = static(default=False)

    def counted(self, distance: Any) -> Any:
        return abs(distance) if self.symmetric else distance

    def at(self, distance: Integer[Array | np.ndarray, "*shape"]) -> Float[Array, "heads ..."]:
        # Distances are subtracted as integers, which keeps nearby keys apart however long the sequence is.
        distance = jnp.asarray(distance).astype(jnp.float32)[None]
        return -self.slopes.astype(jnp.float32).reshape(-1, *(1,) * (distance.ndim - 1)) * distance

    def between(
        self, rows: Integer[Array, "*#batch q 1"], columns: Integer[Array, "*#batch 1 k"]
    ) -> Float[Array, "*#batch heads q k"]:
        # A product costs less than to read it from a table.
        distance = jnp.expand_dims(self.counted(rows - columns).astype(jnp.float32), -3)
        return -self.slopes.astype(jnp.float32).reshape((1,) * (distance.ndim - 3) + (-1, 1, 1)) * distance

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> "AlibiBias":
        del query_positions, key_positions
        return self

    def upper_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        nearest = jnp.maximum(jnp.maximum(blocks.behind, blocks.ahead), 0) if self.symmetric else blocks.behind
        bound = self.at(nearest)
        # A slope below zero favours far keys, and nothing is known of how far.
        bound = jnp.where((self.slopes >= 0).reshape(-1, 1, 1, 1), bound, jnp.inf)
        return jnp.moveaxis(bound, 0, 1)

    def log_sum_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        # A distance occurs once, so the sum is at most 1 + exp(-m) + ..., as many terms as there are keys.
        slopes = self.slopes.astype(jnp.float32).reshape(1, -1, 1, 1)
        known = slopes > 0
        slopes = jnp.where(known, slopes, 1.0)
        count = jnp.asarray(blocks.key_count, jnp.float32)
        geometric = jnp.log(-jnp.expm1(-slopes * count)) - jnp.log(-jnp.expm1(-slopes))
        return self.upper_bound(blocks) + jnp.where(known, geometric, jnp.log(count))


@dataclasses.dataclass(frozen=True)
class Alibi(PositionMethod):
    """No position embedding; each head's logits fall linearly with distance, at a fixed slope.

    Attributes:
      slopes: convention, `"paper"`, `"closed_form"` or `"random"` (see `alibi_slopes`), or a number for each head.
      draw: which random ones; no other slopes depend on it.
    """

    shift_invariant = True

    slopes: str | tuple[float | int, ...] = "paper"
    draw: int = 0

    def __post_init__(self) -> None:
        alibi_slopes(self.num_heads, self.slopes, self.draw)  # raises for what are no slopes

    def bias(self, params: Params) -> AlibiBias:
        del params
        return AlibiBias(alibi_slopes(self.num_heads, self.slopes, self.draw), symmetric=not self.causal)
