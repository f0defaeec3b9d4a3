"""A bias that falls with the square root of distance, at a rate that each head learns."""

import dataclasses

import jax
import jax.numpy as jnp

from alibi.positions import DistanceBias, PositionMethod, per_head


class RootBias(DistanceBias):
    """-s_h sqrt(d) for a key at distance d before the query."""

    bounded = True  # never grows with distance, so distant keys can be skipped
    scale: jax.Array = per_head()

    def at(self, distance):  # in tokens, any shape; returns [heads, *shape]
        return -jnp.multiply.outer(self.scale, jnp.sqrt(distance))


@dataclasses.dataclass(frozen=True)
class Root(PositionMethod):
    """A bias with the square root of distance.

    Attributes:
      initial: each head's s before training.
    """

    shift_invariant = True

    initial: float = 1.0

    def init(self, key):  # parameters shared by all layers
        return {"scale": jnp.full(self.num_heads, self.initial, jnp.float32)}

    def bias(self, params):
        return RootBias(jnp.abs(params["scale"]))
