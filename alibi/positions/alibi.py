"""ALiBi: attention with linear biases (paper, section 3)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from alibi.config.fields import number
from alibi.positions.base import MOST_TOKENS, About, Params, PositionMethod
from alibi.positions.bias import Bias, Blocks, per_head, per_query, static
from alibi.positions.distance import DistanceBias, as_array, rows_and_columns
from alibi.positions.metric import Metric, MetricBias
from alibi.positions.shapes import (
    LAYOUT,
    AtDistances,
    BlockBounds,
    Distances,
    KeyPositions,
    PerHead,
    QueryPositions,
    Tile,
)
from alibi.positions.sided import SidedBias
from alibi.slopes import MOST_BIAS_MAX, alibi_slopes


def alibi_bias(
    num_heads: int,
    length_or_positions: int | QueryPositions | Sequence[int],
    key_positions: KeyPositions | Sequence[int] | None = None,
    *,
    symmetric: bool = False,
    convention: str | Sequence[float | int] = "paper",
) -> Tile:
    """Returns ALiBi's bias -m_h (i - j) for query i and key j, float32 `[heads, q, k]`.

    `alibi_bias(num_heads, length)` is the bias for a sequence at positions 0, 1, ..., length - 1. For
    other positions give two arrays or lists.

    Add it to the logits after their scaling by 1/sqrt(head_dim). Positions are integers, so
    distances are exact at any length. Keys after the query get a positive bias, which a causal mask
    hides. `symmetric=True` gives -m_h |i - j| for attention without a mask. `convention` is passed
    to `alibi_slopes`.

    Raises:
      ValueError: positions that are no integers, a length below 1, or slopes that `alibi_slopes`
        refuses.

    Example:
      >>> alibi_bias(8, 512).shape  # heads, queries, keys
      (8, 512, 512)
      >>> alibi_bias(8, [3], [0, 1, 2, 3])[0].tolist()  # one query, four keys
      [[-1.5, -1.0, -0.5, -0.0]]
    """
    sides: tuple[Any, Any] = (length_or_positions, key_positions)
    if key_positions is None:
        if not isinstance(length_or_positions, int | np.integer) or length_or_positions < 1:
            raise ValueError(
                f"alibi_bias got {length_or_positions!r:.60} without key positions; give a sequence's length, such as "
                "512, or positions of queries and of keys"
            )
        sides = (jnp.arange(length_or_positions),) * 2
    queries, keys = (
        jnp.asarray(as_array(side)) if isinstance(side, list | tuple | range) else side
        for side in sides
    )
    return AlibiBias(alibi_slopes(num_heads, convention), symmetric)(queries, keys)


class AlibiBias(DistanceBias):
    """-m_h (i - j) for any positions.

    Attributes:
      slopes: each head's m, float32.
      symmetric: use |i - j| in place of i - j.
    """

    bounded = True
    signed = True
    in_table = False  # a product costs less than a look-up
    slopes: PerHead = per_head()
    symmetric: bool = static(default=False)

    def at(self, distance: Distances) -> AtDistances:
        # Distances are subtracted as integers, which keeps nearby keys apart however long the
        # sequence is.
        distance = jnp.asarray(distance).astype(jnp.float32)[None]
        return -self.slopes.astype(jnp.float32).reshape(-1, *(1,) * (distance.ndim - 1)) * distance

    def between(
        self, rows: Integer[Array, "*#batch q 1"], columns: Integer[Array, "*#batch 1 k"]
    ) -> Tile:
        # without the transpose that `at` needs for positions of each sequence
        distance = jnp.expand_dims(self.counted(rows - columns).astype(jnp.float32), -3)
        slopes = self.slopes.astype(jnp.float32)
        return -slopes.reshape((1,) * (distance.ndim - 3) + (-1, 1, 1)) * distance

    def upper_bound(self, blocks: Blocks) -> BlockBounds:
        nearest = (
            jnp.maximum(jnp.maximum(blocks.behind, blocks.ahead), 0)
            if self.symmetric
            else blocks.behind
        )
        bound = self.at(nearest)
        # A slope below zero favours far keys, at distances unknown here.
        bound = jnp.where((self.slopes >= 0).reshape(-1, 1, 1, 1), bound, jnp.inf)
        return jnp.moveaxis(bound, 0, 1)

    def log_sum_bound(self, blocks: Blocks) -> BlockBounds:
        # A distance occurs once on each side, so the sum is at most 1 + exp(-m) + ..., as many
        # terms as there are keys.
        slopes = self.slopes.astype(jnp.float32).reshape(1, -1, 1, 1)
        falls = slopes > 0
        slopes = jnp.where(falls, slopes, 1.0)
        count = jnp.asarray(blocks.key_count, jnp.float32)
        geometric = jnp.log(-jnp.expm1(-slopes * count)) - jnp.log(-jnp.expm1(-slopes))
        sides = jnp.log(
            jnp.where(self.symmetric & (blocks.behind < 0) & (blocks.ahead < 0), 2.0, 1.0)
        )[:, None]
        return self.upper_bound(blocks) + jnp.where(falls, geometric + sides, jnp.log(count))


class AlibiBiasByEntry(Bias):
    """-m_bh (i - j), with slopes for each batch entry and head.

    Attributes:
      slopes_of_queries: m for each query's batch entry and head, float32.
      symmetric: use |i - j| in place of i - j.
    """

    slopes_of_queries: Float[Array, "*batch q heads"] = per_query()
    symmetric: bool = static(default=False)

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        rows, columns = rows_and_columns(query_positions, key_positions)
        distance = jnp.expand_dims((rows - columns).astype(jnp.float32), -3)
        distance = jnp.abs(distance) if self.symmetric else distance
        slopes = jnp.moveaxis(self.slopes_of_queries, -1, -2)[..., None]
        return -slopes * distance.reshape((1,) * (slopes.ndim - distance.ndim) + distance.shape)


def bias_of_slopes(
    slopes: Float[Array, "*batch heads"], query_shape: tuple[int, ...], *, symmetric: bool
) -> AlibiBias | AlibiBiasByEntry:
    """Returns the bias for slopes `[heads]` or `[*batch, heads]`, and for queries with the shape
    `[*batch, q, heads, head_dim]`.

    Raises:
      ValueError: slopes with another shape.
    """
    *batch, length, heads, _ = query_shape
    if slopes.shape == (heads,):
        return AlibiBias(slopes, symmetric)
    if slopes.shape != (*batch, heads):
        raise ValueError(
            f"slopes have shape {slopes.shape}; the query's {heads} heads need ({heads},), or {(*batch, heads)} for "
            f"each batch entry; {LAYOUT}"
        )
    of_queries = jnp.broadcast_to(slopes[..., None, :], (*batch, length, heads))
    return AlibiBiasByEntry(of_queries.astype(jnp.float32), symmetric)


@dataclasses.dataclass(frozen=True)
class Alibi(PositionMethod):
    """Each head's logits fall linearly with distance, at a fixed slope. There is no embedding.

    Config: `position=alibi,position_options.slopes=closed_form`

    Attributes:
      slopes: `"paper"`, `"closed_form"` or `"random"` (`alibi_slopes` describes them), or a number
        for each head.
      draw: which random slopes to draw.
      alibi_bias_max: the flattest named slope is 2^-this. 8 in the paper.
      slopes_after: slopes for keys after the query in attention that is not causal. Defaults to
        `slopes`.
      free_tokens: tokens at the start without a bias, as keys and as queries, such as a class token.

    Raises:
      ValueError: slopes that `alibi_slopes` refuses, `slopes_after` under a causal mask or with
        `free_tokens`, more `free_tokens` than a training sequence has.
    """

    about = About(
        formula="-m_h (i - j); m_h = 2^(-8h/H) for H a power of two, otherwise by the rule of the paper's code",
        source="Press, Smith and Lewis 2022, [arXiv 2108.12409](https://arxiv.org/abs/2108.12409), section 3",
        caveats="beyond L it gains mostly because fewer tokens have little context (appendix B)",
    )

    takes_logarithms = False  # if True, slopes of 0 are refused
    has_sides = True  # keys stand before a query or after it

    slopes: str | tuple[float | int, ...] = "paper"
    draw: int = 0
    alibi_bias_max: float = 8.0
    slopes_after: str | tuple[float | int, ...] | None = None
    free_tokens: int = number(0, at_least=0, at_most=MOST_TOKENS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slopes_after is not None and self.causal:
            raise ValueError(
                f"slopes_after={self.slopes_after!r} are for keys after the query, which causal=True hides; leave it "
                "out, or set causal=False"
            )
        if self.slopes_after is not None and (self.free_tokens or not self.has_sides):
            raise ValueError(
                f"{type(self).__name__} with free_tokens={self.free_tokens} has the same slopes on both sides; leave "
                "slopes_after out"
            )
        if self.free_tokens > self.train_length:
            raise ValueError(
                f"free_tokens={self.free_tokens} are more than the {self.train_length} tokens of train_length; give "
                "fewer"
            )
        for slopes in map(np.asarray, Alibi.sides(self, {})):  # raises for wrong slopes
            if self.takes_logarithms and slopes.min() < 2.0**-MOST_BIAS_MAX:
                raise ValueError(
                    f"{type(self).__name__} takes logarithms of slopes={slopes.tolist()}, which must be above 0 (in "
                    f"float32, at least 2^-{MOST_BIAS_MAX}); with position=alibi they may be 0"
                )

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]  # elsewhere a constant
        return not self.free_tokens

    def sides(self, params: Params) -> list[PerHead]:
        """Returns slopes for keys before the query and, if they differ, for keys after it."""
        return [
            alibi_slopes(self.num_heads, slopes, self.draw, alibi_bias_max=self.alibi_bias_max)
            for slopes in (self.slopes, self.slopes_after)
            if slopes is not None
        ]

    def bias(self, params: Params) -> Bias:
        sides = self.sides(params)
        if self.free_tokens:
            return MetricBias(sides[0], Metric(free_tokens=self.free_tokens))
        if len(sides) == 2:
            return SidedBias(*map(AlibiBias, sides))
        return AlibiBias(sides[0], symmetric=not self.causal)
