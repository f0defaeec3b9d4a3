"""Learned position embeddings: a table with a row for each position in training."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from alibi.positions.base import MOST_TOKENS, About, Params, PositionMethod
from alibi.positions.shapes import Features, Positions


@dataclasses.dataclass(frozen=True)
class Learned(PositionMethod):
    """A learned vector for each position, added to the token embeddings (paper, section 2.1).

    Attributes:
      num_positions: rows of the table; 0: the training length. Longer sequences are undefined.

    Raises:
      ValueError: `num_positions` below the training length or above 2^24.
    """

    about = About(
        formula="embedding of position p: row p of a learned table",
        source="Gehring et al. 2017, [arXiv 1705.03122](https://arxiv.org/abs/1705.03122)",
        caveats="not defined beyond its table",
    )

    num_positions: int = 0

    def __post_init__(self) -> None:
        if self.num_positions and not self.train_length <= self.num_positions <= MOST_TOKENS:
            raise ValueError(
                f"learned needs num_positions of at least the training length {self.train_length} and at most "
                f"{MOST_TOKENS:,}, or 0 for just that length; got {self.num_positions}"
            )

    @property
    def max_length(self) -> int:
        return self.num_positions or self.train_length

    def init(self, key: PRNGKeyArray) -> Params:
        # N(0, width^-0.5), as the token embeddings.
        return {
            "table": self.width**-0.5
            * jax.random.normal(key, (self.max_length, self.width), jnp.float32)
        }

    def embed(self, params: Params, x: Features, positions: Positions) -> Features:
        # A position outside the table, which only a caller's own positions can name, gives NaN, not
        # the last row.
        inside = jnp.where(positions < 0, self.max_length, positions)
        embedding = params["table"].at[inside].get(mode="fill", fill_value=jnp.nan)
        return x + embedding.reshape((1,) * (x.ndim - embedding.ndim) + embedding.shape).astype(
            x.dtype
        )
