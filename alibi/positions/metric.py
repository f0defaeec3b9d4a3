"""Distances between tokens that are not i - j: in a grid, and none for tokens at the start."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from alibi.positions.bias import Bias, Blocks, per_head, static
from alibi.positions.distance import rows_and_columns
from alibi.positions.shapes import BlockBounds, KeyPositions, PerHead, QueryPositions, Tile

ROW = 2**15  # a place in a grid is its row times this, plus its column


@dataclasses.dataclass(frozen=True)
class Metric:
    """Distances between tokens, which kernels compute from a number for each token, its place.

    Attributes:
      columns: patches in a row of a grid, in which rows follow each other. 0 means a line of tokens.
      free_tokens: tokens at the start with distance 0 to all others.
      euclidean: in a grid, the straight line. Else the sum over rows and columns.
    """

    columns: int = 0
    free_tokens: int = 0
    euclidean: bool = False

    def places(self, positions: Any) -> Any:
        """Returns the tokens' places from their positions: in the order of positions, and negative
        for free tokens.
        """
        patches = positions - self.free_tokens
        if not self.columns:
            return patches
        return patches // self.columns * ROW + patches % self.columns

    def between(self, queries: Any, keys: Any) -> Float[Array, "..."]:
        """Returns the distances, float32, between places that broadcast against each other."""
        if not self.columns:
            distance = abs(queries - keys).astype(jnp.float32)
        else:
            rows, columns = (
                abs(of(queries) - of(keys)).astype(jnp.float32)
                for of in (
                    lambda x: jax.lax.shift_right_arithmetic(x, jnp.int32(ROW.bit_length() - 1)),
                    lambda x: x & (ROW - 1),
                )
            )
            distance = (
                jnp.sqrt(rows * rows + columns * columns) if self.euclidean else rows + columns
            )
        if not self.free_tokens:
            return distance
        return jnp.where(jnp.minimum(queries, keys) < 0, 0.0, distance)


class MetricBias(Bias):
    """-m_h times a distance.

    Attributes:
      slopes: each head's m, float32.
      metric: the distance.
    """

    slopes: PerHead = per_head()
    metric: Metric = static()

    @property
    def bounded(self) -> bool:
        return not self.metric.free_tokens

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        places = map(self.metric.places, rows_and_columns(query_positions, key_positions))
        distance = jnp.expand_dims(self.metric.between(*places), -3)
        slopes = self.slopes.astype(jnp.float32)
        return -slopes.reshape((1,) * (distance.ndim - 3) + (-1, 1, 1)) * distance

    def upper_bound(self, blocks: Blocks) -> BlockBounds:
        # so many rows, or tokens of a line, lie between the nearest two
        apart = jnp.maximum(jnp.maximum(blocks.behind, blocks.ahead), 0) // (
            self.metric.columns or 1
        )
        slopes = self.slopes.astype(jnp.float32).reshape(1, -1, 1, 1)
        # a slope below zero favours far keys
        return jnp.where(slopes >= 0, -slopes * apart[:, None].astype(jnp.float32), jnp.inf)
