"""A bias that is scaled together with its logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from alibi.positions.bias import Bias, Blocks, per_head, shared
from alibi.positions.distance import rows_and_columns
from alibi.positions.shapes import (
    BlockBounds,
    KeyPositions,
    PerHead,
    QueryPositions,
    Tile,
    Weights,
)


class ScaledBias(Bias):
    """A bias times s ln n for a query that sees n keys: its position plus one.

    Attributes:
      bias: the bias before it is scaled.
      scale: each head's s, float32.
    """

    bias: Bias = shared()
    scale: PerHead = per_head()

    @property
    def bounded(self) -> bool:
        return self.bias.bounded

    @property
    def adds_values(self) -> bool:
        return self.bias.adds_values

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        tile = self.bias(query_positions, key_positions)
        rows, _ = rows_and_columns(query_positions, key_positions)
        of_rows = jnp.expand_dims(log_keys(rows), -3)
        factors = tile, of_rows, self.scale[:, None, None]
        rank = max(x.ndim for x in factors)
        tile, of_rows, scale = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in factors)
        return tile * (of_rows * scale)

    def upper_bound(self, blocks: Blocks) -> BlockBounds:
        # A bound of at most 0 is scaled least for the first query in a block. No bound is known for a
        # bias above 0, or for a learned s below 0.
        unscaled, scale = self.bias.upper_bound(blocks), self.scale[None, :, None, None]
        least = scale * log_keys(jnp.asarray(blocks.first_query))[:, None, :, None]
        return jnp.where((scale >= 0) & (unscaled <= 0), least * unscaled, jnp.inf)

    def of_values(
        self, weights: Weights, query_positions: QueryPositions, key_positions: KeyPositions
    ) -> Float[Array, "*batch heads q value_dim"]:
        return self.bias.of_values(weights, query_positions, key_positions)


def log_keys(positions: Array) -> Float[Array, "*shape"]:
    """Returns ln n for queries at these positions. Padding, below 0, counts as position 0."""
    return jnp.log(jnp.maximum(positions + 1, 1).astype(jnp.float32))
