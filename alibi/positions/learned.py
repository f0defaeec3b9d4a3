"""Learned position embeddings: a table with a row for each position of training."""

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.positions.base import Params, PositionMethod, Positions


@dataclasses.dataclass(frozen=True)
class Learned(PositionMethod):
    """One learned vector for each position, added to the token embeddings (paper, section 2.2).

    Attributes:
      num_positions: rows of the table; 0: the training length. Beyond them the method
        is undefined and `check_length` raises ValueError.
    """

    num_positions: int = 0
    learns: ClassVar[bool] = True

    @property
    def max_length(self) -> int:
        return self.num_positions or self.train_length

    def init(self, key: PRNGKeyArray) -> Params:
        # N(0, width^-0.5), the same as the token embeddings.
        return {"table": self.width**-0.5 * jax.random.normal(key, (self.max_length, self.width))}

    def embed(
        self, params: Params, x: Float[Array, "*batch length width"], positions: Positions
    ) -> Float[Array, "*batch length width"]:
        embedding = params["table"][positions]
        return x + embedding.reshape((1,) * (x.ndim - embedding.ndim) + embedding.shape).astype(x.dtype)
