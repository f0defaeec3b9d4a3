"""ALiBi: attention with linear biases (paper, section 3)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import Blocks, KnownPositions, per_head, static
from alibi.positions.distance import DistanceBias
from alibi.slopes import MOST_BIAS_MAX, alibi_slopes


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

    def up_to(self, farthest: int) -> "AlibiBias":
        del farthest
        return self

    def upper_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        nearest = jnp.maximum(jnp.maximum(blocks.behind, blocks.ahead), 0) if self.symmetric else blocks.behind
        bound = self.at(nearest)
        # A slope below zero favours far keys, and nothing is known of how far.
        bound = jnp.where((self.slopes >= 0).reshape(-1, 1, 1, 1), bound, jnp.inf)
        return jnp.moveaxis(bound, 0, 1)

    def log_sum_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        # A distance occurs once on each side, so the sum is at most 1 + exp(-m) + ..., as many terms as there are keys.
        slopes = self.slopes.astype(jnp.float32).reshape(1, -1, 1, 1)
        known = slopes > 0
        slopes = jnp.where(known, slopes, 1.0)
        count = jnp.asarray(blocks.key_count, jnp.float32)
        geometric = jnp.log(-jnp.expm1(-slopes * count)) - jnp.log(-jnp.expm1(-slopes))
        sides = jnp.log(jnp.where(self.symmetric & (blocks.behind < 0) & (blocks.ahead < 0), 2.0, 1.0))[:, None]
        return self.upper_bound(blocks) + jnp.where(known, geometric + sides, jnp.log(count))


class TwoSidedAlibiBias(DistanceBias):
    """-m_h d for keys at a distance d before the query, and -n_h d for those after it.

    Attributes:
      before, after: m and n of each head, float32, at least 0.
    """

    bounded = True
    before: Float[Array, " heads"] = per_head()
    after: Float[Array, " heads"] = per_head()

    def counted(self, distance: Any) -> Any:
        return distance

    def at(self, distance: Integer[Array | np.ndarray, "*shape"]) -> Float[Array, "heads ..."]:
        distance = jnp.asarray(distance).astype(jnp.float32)[None]
        before, after = (m.reshape(-1, *(1,) * (distance.ndim - 1)) for m in (self.before, self.after))
        return jnp.where(distance < 0, after, -before) * distance


@dataclasses.dataclass(frozen=True)
class Alibi(PositionMethod):
    """No position embedding; each head's logits fall linearly with distance, at a fixed slope.

    Attributes:
      slopes: convention, `"paper"`, `"closed_form"` or `"random"` (see `alibi_slopes`), or a number for each head.
      draw: which random ones; no other slopes depend on it.
      alibi_bias_max: of slopes that have a name, 8 in the paper.
      slopes_after: slopes of their own for keys after the query, where attention is not causal; None: the same.

    Raises:
      ValueError: slopes that `alibi_slopes` refuses, or `slopes_after` under a causal mask.
    """

    about = About(
        formula="-m_h (i - j); m_h = 2^(-8h/H) for H a power of two, else as the paper's code has it",
        source="Press, Smith and Lewis 2022, [arXiv 2108.12409](https://arxiv.org/abs/2108.12409), section 3",
        caveats="beyond L it gains mostly by having fewer tokens with little context (appendix B)",
    )

    shift_invariant = True

    slopes: str | tuple[float | int, ...] = "paper"
    draw: int = 0
    alibi_bias_max: float = 8.0
    slopes_after: str | tuple[float | int, ...] | None = None

    def __post_init__(self) -> None:
        if self.slopes_after is not None and self.causal:
            raise ValueError(
                f"slopes_after={self.slopes_after!r} are for keys after the query, which causal=True hides; leave it "
                "out, or set causal=False"
            )
        self.sides()  # raises for what are no slopes

    def sides(self) -> list[Float[Array, " heads"]]:
        """The slopes of the options: those of keys before the query, and those of keys after it if they differ."""
        given = [slopes for slopes in (self.slopes, self.slopes_after) if slopes is not None]
        return [alibi_slopes(self.num_heads, one, self.draw, alibi_bias_max=self.alibi_bias_max) for one in given]

    def check_above_zero(self, name: str) -> None:
        """Raises ValueError for a slope that float32 has no logarithm of, which the method called `name` can't take."""
        for slopes in map(np.asarray, self.sides()):
            if slopes.min() < 2.0**-MOST_BIAS_MAX:
                raise ValueError(
                    f"{name} starts from slopes={slopes.tolist()}, which must be above 0 (in float32, at least "
                    f"2^-{MOST_BIAS_MAX}), as it takes their logarithms; fixed ones (position=alibi) may be 0"
                )

    def flattened(self, slopes: Float[Array, " heads"]) -> Float[Array, " heads"]:
        """The slopes for sequences of the length at hand, where a method makes them depend on it."""
        return slopes

    def bias(self, params: Params) -> AlibiBias | TwoSidedAlibiBias:
        del params
        with jax.ensure_compile_time_eval():  # known also under jit, as those of `alibi_slopes`
            return self.of_sides([self.flattened(slopes) for slopes in self.sides()])

    def of_sides(self, sides: list[Float[Array, " heads"]]) -> AlibiBias | TwoSidedAlibiBias:
        """The bias of these slopes, which are as `sides` gives them."""
        return TwoSidedAlibiBias(*sides) if len(sides) == 2 else AlibiBias(sides[0], symmetric=not self.causal)
