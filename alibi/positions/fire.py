"""FIRE: a function of the distance, progressively scaled by the query's position (Li et al. 2023, arXiv 2310.04418)."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.positions.base import MOST_TOKENS, About, Params, PositionMethod
from alibi.positions.bias import Bias, per_head, shared, static
from alibi.positions.distance import DistanceBias, DistanceTable
from alibi.positions.relu_network import Network, relu_network, relu_network_by_parts
from alibi.positions.shapes import AtDistances, Distances, KeyPositions, KnownPositions, PerHead, QueryPositions, Tile

HIDDEN = 32  # units of the network
EPSILON = 1e-6  # added to the denominator, as in the paper's code


class LogDistance(DistanceBias):
    """psi(d) = log(c d + 1) at distance d on either side, with the same c in each head."""

    symmetric = True
    c: PerHead = per_head()

    def at(self, distance: Distances) -> AtDistances:
        distance = jnp.asarray(distance).astype(jnp.float32)[None]
        return jnp.log1p(self.c.reshape(-1, *(1,) * (distance.ndim - 1)) * distance)


class FireBias(Bias):
    """f(psi(|i - j|) / psi(max(threshold, i))) with psi(x) = log(c x + 1), for query i and key j (section 3.1).

    Attributes:
      hidden_kernel, hidden_bias, kernel: parameters of f, a network with a hidden layer of ReLUs. The paper's code
        also has a bias of the outputs, which adds a constant to each row of logits; softmax ignores it.
      log_distance: psi of the distance.
      c, threshold: learned, above 0; the threshold in tokens.
      by_parts: f is evaluated by its linear parts.
    """

    hidden_kernel: Float[Array, " hidden"] = shared()
    hidden_bias: Float[Array, " hidden"] = shared()
    kernel: Float[Array, "hidden heads"] = per_head(axis=1)
    log_distance: Bias = shared()
    c: Float[Array, ""] = shared()
    threshold: Float[Array, ""] = shared()
    by_parts: bool = static(default=False)

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        log_distance = self.log_distance(query_positions, key_positions)
        of_rows = 1.0 / self.scale(query_positions.astype(jnp.float32))[..., None, :, None]
        of_rows = of_rows.reshape((1,) * (log_distance.ndim - of_rows.ndim) + of_rows.shape)
        if self.by_parts:
            return relu_network_by_parts(log_distance, of_rows, self.network)
        relative = (log_distance * of_rows)[..., 0, :, :]  # equal in all heads
        return jnp.moveaxis(relu_network(relative, self.network), -1, -3)

    @property
    def network(self) -> Network:
        return Network(self.hidden_kernel, self.hidden_bias, self.kernel)

    def scale(self, positions: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the divisor of the logarithms of distances for queries at these positions."""
        return jnp.log1p(self.c * jnp.maximum(positions, self.threshold)) + EPSILON

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        sides = query_positions, key_positions
        by_parts = cast(FireBias, super().tabulated(*sides)).replace(by_parts=True)
        table = FireBeforeThreshold(self).tabulated(*sides)
        in_order = isinstance(table, DistanceTable) and table.first_distance is not None
        return FireByTables(by_parts, table) if in_order else by_parts


class FireBeforeThreshold(DistanceBias):
    """FIRE's bias of queries before the threshold: the divisor of their distances is the same."""

    symmetric = True
    bias: FireBias = shared()

    def at(self, distance: Distances) -> AtDistances:
        relative = jnp.log1p(self.bias.c * jnp.asarray(distance).astype(jnp.float32)) / self.bias.scale(jnp.zeros(()))
        return jnp.moveaxis(relu_network(relative, self.bias.network), -1, 0)


class FireByTables(Bias):
    """FIRE's bias for queries and keys at consecutive positions.

    Attributes:
      bias: the bias, with a table as its `log_distance`.
      before_threshold: the bias of queries before the threshold, as a table.
    """

    bias: FireBias = shared()
    before_threshold: Bias = shared()

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        return self

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        sides = query_positions, key_positions
        all_before = (query_positions < self.bias.threshold).all()
        return jax.lax.cond(all_before, lambda: self.before_threshold(*sides), lambda: self.bias(*sides))


@dataclasses.dataclass(frozen=True)
class Fire(PositionMethod):
    """A learned function of the distance relative to the query's position; each layer has its own.

    Attributes:
      threshold: tokens; a learned multiple of it is the least divisor of distances.

    Raises:
      ValueError: a threshold below 1 or above 2^24.
    """

    about = About(
        formula="f(ln(c (i - j) + 1) / ln(c max(T, i) + 1)), f a network with 32 hidden units, c and T learned",
        source="Li et al. 2023, [arXiv 2310.04418](https://arxiv.org/abs/2310.04418), section 3.1",
        caveats="beyond the threshold it is not a function of the distance, so each pair of query and key is computed",
    )

    threshold: int = 512

    def __post_init__(self) -> None:
        if not 1 <= self.threshold <= MOST_TOKENS:
            raise ValueError(
                f"fire needs a threshold from 1 to {MOST_TOKENS:,} tokens, such as 512, and got {self.threshold}"
            )

    def init_layer(self, key: PRNGKeyArray) -> Params:
        def uniform(number: int, shape: tuple[int, ...], inputs: int) -> Array:
            bound = inputs**-0.5  # as PyTorch initializes linear layers
            return jax.random.uniform(jax.random.fold_in(key, number), shape, minval=-bound, maxval=bound)

        return {
            "hidden_kernel": uniform(0, (HIDDEN,), 1),
            "hidden_bias": uniform(1, (HIDDEN,), 1),
            "kernel": uniform(2, (HIDDEN, self.num_heads), HIDDEN),
            "c": jnp.asarray(0.1),
            "threshold_multiple": jnp.asarray(1.0),
        }

    def bias(self, params: Params) -> FireBias:
        c = jnp.abs(params["c"])
        return FireBias(
            hidden_kernel=params["hidden_kernel"],
            hidden_bias=params["hidden_bias"],
            kernel=params["kernel"],
            log_distance=LogDistance(jnp.broadcast_to(c, self.num_heads)),
            c=c,
            threshold=jnp.abs(params["threshold_multiple"]) * self.threshold,
        )
