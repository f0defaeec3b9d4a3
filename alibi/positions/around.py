"""A position method around another one, of which it changes one thing."""

import dataclasses

from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from alibi.positions.base import Params, PositionMethod, Positions
from alibi.positions.bias import Bias, KnownPositions


@dataclasses.dataclass(frozen=True)
class Around(PositionMethod):
    """All functions of another method; a subclass overrides those that it changes.

    Attributes:
      other: the other method.
    """

    other: PositionMethod = dataclasses.field(init=False)

    @property
    def makers(self) -> frozenset[type]:
        return super().makers - {Around} | self.other.makers

    @property
    def known_length(self) -> int | None:
        return self.other.known_length

    @property
    def assumes_train_length(self) -> bool:
        return self.other.assumes_train_length

    def place(self, positions: KnownPositions, batch: int, key: PRNGKeyArray | None) -> KnownPositions:
        return self.other.place(positions, batch, key)

    def init(self, key: PRNGKeyArray) -> Params:
        return self.other.init(key)

    def init_layer(self, key: PRNGKeyArray) -> Params:
        return self.other.init_layer(key)

    def within_limits(self, params: PyTree) -> PyTree:
        return self.other.within_limits(params)

    def embed(
        self, params: Params, x: Float[Array, "*batch length width"], positions: Positions
    ) -> Float[Array, "*batch length width"]:
        return self.other.embed(params, x, positions)

    def queries(
        self, params: Params, query: Float[Array, "*batch q heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch q heads head_dim"]:
        return self.other.queries(params, query, positions)

    def keys(
        self, params: Params, key: Float[Array, "*batch k heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch k heads head_dim"]:
        return self.other.keys(params, key, positions)

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length heads head_dim"],
        padding: Bool[Array, "batch length"] | None,
        before: PyTree[Float[Array, "batch heads ..."]] | None,
    ) -> PyTree[Float[Array, "batch length heads ..."]]:
        return self.other.keep(params, x, key, padding, before)

    def bias(self, params: Params) -> Bias | None:
        return self.other.bias(params)

    def content_bias(
        self,
        params: Params,
        query: Float[Array, "batch q heads head_dim"],
        of_queries: PyTree[Float[Array, "batch q heads ..."]],
        of_keys: PyTree[Float[Array, "batch k heads ..."]],
    ) -> Bias | None:
        return self.other.content_bias(params, query, of_queries, of_keys)
