"""A function of distance on both sides of a query: the same, or another head's."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Integer

from alibi.positions.bias import Bias, shared
from alibi.positions.distance import DistanceBias
from alibi.positions.shapes import AtDistances, Distances, PerHead


class SidedBias(DistanceBias):
    """A bias for keys before and after the query, from biases for keys before it.

    Attributes:
      before: read at the distance to a key up to the query.
      after: read at the distance to a key after it. Defaults to `before`.
    """

    before: DistanceBias = shared()
    after: Bias | None = shared()

    @classmethod
    def of(cls, bias: DistanceBias, *, symmetric: bool) -> DistanceBias:
        """Returns a bias that is the same on both sides, or differs.

        It differs as `bias` itself does if that has two sides, else head h of H has the values of
        head H - 1 - h for keys after the query.
        """
        if symmetric:
            return cls(bias, None)
        has_sides = bias.signed and not bias.symmetric
        return bias if has_sides else cls(bias, bias.with_reversed_heads())

    @property
    def symmetric(self) -> bool:
        return self.after is None

    @property
    def signed(self) -> bool:
        return not self.symmetric

    @property
    def in_table(self) -> bool:
        return self.before.in_table or self.signed

    @property
    def bounded(self) -> bool:
        return self.before.bounded and (self.after is None or self.after.bounded)

    @property
    def slopes(self) -> PerHead | None:
        return self.before.slopes if self.symmetric else None

    def at(self, distance: Distances) -> AtDistances:
        return self._by_side("at", distance)

    def envelope(self, distance: Integer[Array, "*shape"]) -> AtDistances:
        return self._by_side("envelope", distance)

    def _by_side(self, function: str, distance: Any) -> AtDistances:
        before = getattr(self.before, function)(abs(distance))
        if self.after is None:
            return before
        return jnp.where(distance[None] < 0, getattr(self.after, function)(abs(distance)), before)
