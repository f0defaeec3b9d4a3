"""Relative position representations (Shaw et al. 2018, arXiv 1803.02155)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.config.fields import number
from alibi.positions.base import MOST_DISTANCE, About, Params, PositionMethod
from alibi.positions.bias import Bias, consecutive, per_query, shared, static
from alibi.positions.products import looked_up
from alibi.positions.shapes import (
    KeyPositions,
    KnownPositions,
    PerKey,
    PerQuery,
    Queries,
    QueryPositions,
    Tile,
    Weights,
)


class ShawBias(Bias):
    """q_i . a_{clip(j - i, -k, k)} / sqrt(head_dim), looked up in each query's products with all
    vectors.

    Attributes:
      products: each query's scaled products with the vectors a, from `lowest` = -k to k, or to 0 under
        a causal mask.
      in_order: queries and keys stand at consecutive positions.
    """

    products: Float[Array, "*batch q heads distances"] = per_query()
    lowest: int = static()
    in_order: bool = static(default=False, kw_only=True)

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        return looked_up(
            self.products, self.lowest, query_positions, key_positions, in_order=self.in_order
        )

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        return self.replace(in_order=consecutive(query_positions, key_positions))


class ShawValuesBias(ShawBias):
    """The same bias, with a vector for each distance that is added to the values.

    Attributes:
      value_vectors: vectors for the same distances as the products.
    """

    adds_values = True
    value_vectors: Float[Array, "distances head_dim"] = shared()

    def of_values(
        self, weights: Weights, query_positions: QueryPositions, key_positions: KeyPositions
    ) -> Float[Array, "*batch heads q head_dim"]:
        # The transpose of the lookup sums the weights of each distance.
        def look_up(products: Array) -> Array:
            return self.replace(products=products)(query_positions, key_positions)

        sums = jax.vjp(look_up, self.products)[1](weights.astype(self.products.dtype))[0]
        return jnp.einsum("...qhn,nd->...hqd", sums, self.value_vectors, precision="highest")


@dataclasses.dataclass(frozen=True)
class Shaw(PositionMethod):
    """A learned vector for each distance up to k, added to the keys (equation 4), others in each layer.

    Config: `position=shaw,position_options.max_distance=32`

    Attributes:
      max_distance: k, in tokens. Farther keys share a vector.
      values: add further vectors to the values (equation 3), which changed little in the paper.
    """

    about = About(
        formula="q_i . a_clip(j - i, -k, k) / sqrt(head_dim); as an option vectors are added to the values too",
        source="Shaw et al. 2018, [arXiv 1803.02155](https://arxiv.org/abs/1803.02155), equations 3 to 5",
        caveats="vectors of values change little (paper); beyond k all keys are alike",
    )

    shift_invariant = True

    max_distance: int = number(16, at_least=1, at_most=MOST_DISTANCE)
    values: bool = False

    def init_layer(self, key: PRNGKeyArray) -> Params:
        shape = (2 * self.max_distance + 1, self.head_dim)
        names = ["vectors", *["value_vectors"] * self.values]
        make = jax.nn.initializers.xavier_uniform()
        return {
            name: make(jax.random.fold_in(key, index), shape, jnp.float32)
            for index, name in enumerate(names)
        }

    def content_bias(
        self, params: Params, query: Queries, of_queries: PerQuery, of_keys: PerKey
    ) -> ShawBias:
        scaled = query.astype(jnp.float32) * self.head_dim**-0.5
        seen = slice(self.max_distance + 1 if self.causal else None)
        vectors = params["vectors"].astype(jnp.float32)[seen]
        products = jnp.einsum("bqhd,nd->bqhn", scaled, vectors, precision="highest")
        if not self.values:
            return ShawBias(products, -self.max_distance)
        of_values = params["value_vectors"].astype(jnp.float32)[seen]
        return ShawValuesBias(products, -self.max_distance, of_values)
