"""Learned position embeddings: a table with a row for each position in training."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from alibi.config.fields import number
from alibi.positions.base import MOST_TOKENS, About, Params, PositionMethod
from alibi.positions.shapes import Features, Positions


@dataclasses.dataclass(frozen=True)
class Learned(PositionMethod):
    """A learned vector for each position, added to the token embeddings (paper, section 2.1).

    Config: `position=learned,position_options.num_positions=1024`

    Attributes:
      num_positions: rows in the table. 0 means the training length. Longer sequences are undefined.

    Raises:
      ValueError: `num_positions` below the training length.
    """

    about = About(
        formula="embedding of position p: row p of a learned table",
        source="Gehring et al. 2017, [arXiv 1705.03122](https://arxiv.org/abs/1705.03122)",
        caveats="not defined beyond its table",
    )

    num_positions: int = number(0, at_least=0, at_most=MOST_TOKENS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < self.train_length:
            raise ValueError(
                f"learned needs num_positions of at least the training length {self.train_length}, or 0 for just that "
                f"length; got {self.num_positions}"
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
        # A caller's own positions may lie outside the table: NaN, not the last row.
        inside = jnp.where(positions < 0, self.max_length, positions)
        embedding = params["table"].at[inside].get(mode="fill", fill_value=jnp.nan)
        return x + embedding.reshape((1,) * (x.ndim - embedding.ndim) + embedding.shape).astype(
            x.dtype
        )
