"""ALiBi: attention with linear biases (paper, section 3)."""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from alibi.positions.base import Params, PositionMethod, check_integers, rows_and_columns
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


@flax.struct.dataclass
class AlibiBias:
    """-m_h (i - j) for any block of positions.

    Attributes:
      slopes: m of each head, float32 `[heads]`.
      symmetric: use |i - j| in place of i - j.
    """

    slopes: Float[Array, " heads"]
    symmetric: bool = flax.struct.field(pytree_node=False, default=False)

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*#batch heads q k"]:
        """The bias of one block, float32."""
        check_integers("query", query_positions)
        check_integers("key", key_positions)
        # Subtracting before the cast keeps nearby keys apart, however long the sequence is.
        rows, columns = rows_and_columns(query_positions, key_positions)
        distance = rows - columns
        if self.symmetric:
            distance = jnp.abs(distance)
        distance = jnp.expand_dims(distance.astype(jnp.float32), -3)
        slopes = self.slopes.astype(jnp.float32).reshape((1,) * (distance.ndim - 3) + (-1, 1, 1))
        return -slopes * distance

    def of_heads(self, heads: Integer[Array, " some"]) -> "AlibiBias":
        """The same bias for these heads alone."""
        return dataclasses.replace(self, slopes=self.slopes[heads])


@dataclasses.dataclass(frozen=True)
class Alibi(PositionMethod):
    """No position embedding; each head's logits fall linearly with distance, at a fixed slope.

    Attributes:
      slopes: slope convention, `"paper"`, `"closed_form"` or `"random"` (see `alibi_slopes`).
      draw: which random ones; no other slopes depend on it.
    """

    slopes: str = "paper"
    draw: int = 0

    def __post_init__(self) -> None:
        alibi_slopes(self.num_heads, self.slopes, self.draw)  # raises for an unknown convention

    def bias(self, params: Params) -> AlibiBias:
        del params
        return AlibiBias(alibi_slopes(self.num_heads, self.slopes, self.draw))
