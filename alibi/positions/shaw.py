"""Relative position representations of keys (Shaw, Uszkoreit and Vaswani 2018, arXiv 1803.02155)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray, PyTree

from alibi.positions.base import Params, PositionMethod
from alibi.positions.bias import Bias, per_query, static
from alibi.positions.distance import rows_and_columns


class ShawBias(Bias):
    """q_i . a_{clip(j - i, -k, k)} / sqrt(head_dim), the products being at hand for each query.

    Attributes:
      products: of each query with each vector a, scaled.
      max_distance: k, in tokens.
    """

    products: Float[Array, "*batch q heads distances"] = per_query()
    max_distance: int = static()

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*batch heads q k"]:
        rows, columns = rows_and_columns(query_positions, key_positions)
        which = jnp.clip(columns - rows, -self.max_distance, self.max_distance) + self.max_distance
        which = jnp.expand_dims(which, -3)
        by_query = jnp.swapaxes(self.products, -3, -2)
        which = which.reshape((1,) * (by_query.ndim - which.ndim) + which.shape)
        which = jnp.broadcast_to(which, (*by_query.shape[:-1], which.shape[-1]))
        return jnp.take_along_axis(by_query, which, axis=-1)


@dataclasses.dataclass(frozen=True)
class Shaw(PositionMethod):
    """A learned vector for each distance up to a largest one, added to the keys (equation 4); in each layer its own.

    Attributes:
      max_distance: tokens; farther keys share one vector.
    """

    shift_invariant = True

    max_distance: int = 16

    def __post_init__(self) -> None:
        if self.max_distance < 1:
            raise ValueError(f"shaw needs a max_distance of at least 1 token, such as 16, and got {self.max_distance}")

    def init_layer(self, key: PRNGKeyArray) -> Params:
        shape = (2 * self.max_distance + 1, self.head_dim)
        return {"vectors": jax.nn.initializers.xavier_uniform()(key, shape)}

    def content_bias(
        self,
        params: Params,
        query: Float[Array, "batch q heads head_dim"],
        of_queries: PyTree[Float[Array, "batch q heads ..."]],
        of_keys: PyTree[Float[Array, "batch k heads ..."]],
    ) -> ShawBias:
        del of_queries, of_keys
        scaled = query.astype(jnp.float32) * self.head_dim**-0.5
        vectors = params["vectors"].astype(jnp.float32)
        return ShawBias(jnp.einsum("bqhd,nd->bqhn", scaled, vectors, precision="highest"), self.max_distance)
