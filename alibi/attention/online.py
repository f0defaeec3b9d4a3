"""The online softmax, with which attention goes through the tiles of keys (Rabe and Staats 2021, Dao
et al. 2022).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from alibi.positions.bias import MASKED


class Online(NamedTuple):
    """The softmax for some queries over the keys so far.

    Attributes:
      largest: each query's largest logit.
      total: the exponentials' sum, relative to the largest.
      attended: the values' sum, weighted with these exponentials.
    """

    largest: Float[Array, "*rows 1"]
    total: Float[Array, "*rows 1"]
    attended: Float[Array, "*rows value_dim"]

    @classmethod
    def start(cls, rows: tuple[int, ...], value_dim: int, sink: Any) -> "Online":
        """Returns the softmax before the first tile.

        Args:
          sink: one more key's logit, with value zero, or None for no such key.
        """
        return cls(
            jnp.full((*rows, 1), MASKED if sink is None else sink, jnp.float32),
            jnp.full((*rows, 1), 0.0 if sink is None else 1.0, jnp.float32),
            jnp.zeros((*rows, value_dim), jnp.float32),
        )

    def add(
        self,
        logits: Float[Array, "*rows keys"],
        attend: Callable[[Array], Array],
        exponential: Callable[[Array], Array] = jnp.exp,
        *,
        differentiated: bool = False,
    ) -> "Online":
        """Returns the softmax after one more tile.

        Args:
          attend: sums the tile's values, weighted with its argument `[*rows, keys]`.
          differentiated: JAX differentiates this call. The result does not depend on `largest`, so
            this gradient is left out.
        """
        largest = jnp.maximum(self.largest, logits.max(axis=-1, keepdims=True))
        largest = jax.lax.stop_gradient(largest) if differentiated else largest
        exponentials = exponential(logits - largest)
        rescale = exponential(self.largest - largest)
        more = attend(exponentials)
        return Online(
            largest,
            self.total * rescale + exponentials.sum(axis=-1, keepdims=True),
            self.attended * rescale + more,
        )

    def result(
        self, unit: float = 1.0
    ) -> tuple[Float[Array, "*rows value_dim"], Float[Array, "*rows 1"]]:
        """Returns the attended values, and lse = log(sum(exp(logits))).

        Args:
          unit: a factor for logits and the logarithm.
        """
        # A query without visible keys has gathered exp(MASKED - MASKED) = 1 for each key, and gets
        # zeros; with an lse of -MASKED all its weights are zero in the backward pass. NaN shows in
        # the total, since XLA's maximum may pass over it.
        unseen = (self.largest <= MASKED / 2) & (self.total == self.total)
        total = jnp.where(unseen, 1.0, self.total)
        out = jnp.where(unseen, 0.0, self.attended / total)
        return out, jnp.where(unseen, -MASKED, self.largest + unit * jnp.log(total))
