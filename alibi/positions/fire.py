"""FIRE: a function of the distance, progressively scaled by the query's position (Li et al. 2023, arXiv 2310.04418)."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from alibi.positions.base import MOST_TOKENS, About, Params, PositionMethod
from alibi.positions.bias import Bias, KnownPositions, per_head, shared, static
from alibi.positions.distance import DistanceBias, DistanceTable
from alibi.positions.relu_network import Network, relu_network, relu_network_by_parts

HIDDEN = 32  # units between the one input of the network and its heads
EPSILON = 1e-6  # added to the denominator, as in the paper's code


class LogDistance(DistanceBias):
    """psi(d) = log(c d + 1) at the distance d on either side, where each head has the same c."""

    symmetric = True
    c: Float[Array, " heads"] = per_head()

    def at(self, distance: Integer[Array | np.ndarray, "*shape"]) -> Float[Array, "heads ..."]:
        distance = jnp.asarray(distance).astype(jnp.float32)[None]
        return jnp.log1p(self.c.reshape(-1, *(1,) * (distance.ndim - 1)) * distance)


class FireBias(Bias):
    """f(psi(|i - j|) / psi(max(threshold, i))) with psi(x) = log(c x + 1), for query i and key j (section 3.1).

    Attributes:
      hidden_kernel, hidden_bias, kernel: of f, a network with one hidden layer of ReLUs. A bias of its outputs,
        which the paper's code has, would add a constant to each row of logits, and softmax ignores that.
      log_distance: psi of the distance.
      c, threshold: learned, above 0; the threshold in tokens.
      by_parts: f is evaluated by the parts in which it is linear.
    """

    hidden_kernel: Float[Array, " hidden"] = shared()
    hidden_bias: Float[Array, " hidden"] = shared()
    kernel: Float[Array, "hidden heads"] = per_head(axis=1)
    log_distance: Bias = shared()
    c: Float[Array, ""] = shared()
    threshold: Float[Array, ""] = shared()
    by_parts: bool = static(default=False)

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*#batch heads q k"]:
        log_distance = self.log_distance(query_positions, key_positions)
        of_rows = 1.0 / self.scale(query_positions.astype(jnp.float32))[..., None, :, None]
        of_rows = of_rows.reshape((1,) * (log_distance.ndim - of_rows.ndim) + of_rows.shape)
        if self.by_parts:
            return relu_network_by_parts(log_distance, of_rows, self.network)
        relative = (log_distance * of_rows)[..., 0, :, :]  # the same for each head
        return jnp.moveaxis(relu_network(relative, self.network), -1, -3)

    @property
    def network(self) -> Network:
        return Network(self.hidden_kernel, self.hidden_bias, self.kernel)

    def scale(self, positions: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """What the logarithms of distances are divided by for queries at these positions."""
        return jnp.log1p(self.c * jnp.maximum(positions, self.threshold)) + EPSILON

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        sides = query_positions, key_positions
        by_parts = cast(FireBias, super().tabulated(*sides)).replace(by_parts=True)
        table = FireBeforeThreshold(self).tabulated(*sides)
        in_order = isinstance(table, DistanceTable) and table.first_distance is not None
        return FireByTables(by_parts, table) if in_order else by_parts


class FireBeforeThreshold(DistanceBias):
    """FIRE's bias of queries before the threshold, all of whose distances are divided by the same number."""

    symmetric = True
    bias: FireBias = shared()

    def at(self, distance: Integer[Array | np.ndarray, "*shape"]) -> Float[Array, "heads ..."]:
        relative = jnp.log1p(self.bias.c * jnp.asarray(distance).astype(jnp.float32)) / self.bias.scale(jnp.zeros(()))
        return jnp.moveaxis(relu_network(relative, self.bias.network), -1, 0)


class FireByTables(Bias):
    """FIRE's bias where queries and keys stand at consecutive positions.

    Attributes:
      bias: the bias, whose `log_distance` is a table.
      before_threshold: what it is for queries before the threshold, as a table.
    """

    bias: FireBias = shared()
    before_threshold: Bias = shared()

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        del query_positions, key_positions
        return self

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*#batch heads q k"]:
        sides = query_positions, key_positions
        all_before = (query_positions < self.bias.threshold).all()
        return jax.lax.cond(all_before, lambda: self.before_threshold(*sides), lambda: self.bias(*sides))


@dataclasses.dataclass(frozen=True)
class Fire(PositionMethod):
    """A learned function of the distance relative to the query's position, in each layer its own.

    Attributes:
      threshold: tokens, of which a learned multiple is the least position by which distances are scaled.
    """

    about = About(
        formula="f(ln(c (i - j) + 1) / ln(c max(T, i) + 1)), f a network with 32 hidden units, c and T learned",
        source="Li et al. 2023, [arXiv 2310.04418](https://arxiv.org/abs/2310.04418), section 3.1",
        caveats="after the threshold no function of the distance alone, so each pair of query and key is computed",
    )

    threshold: int = 512

    def __post_init__(self) -> None:
        if not 1 <= self.threshold <= MOST_TOKENS:
            raise ValueError(
                f"fire needs a threshold from 1 to {MOST_TOKENS:,} tokens, such as 512, and got {self.threshold}"
            )

    def init_layer(self, key: PRNGKeyArray) -> Params:
        def uniform(number: int, shape: tuple[int, ...], inputs: int) -> Array:
            bound = inputs**-0.5  # as PyTorch starts its linear layers
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
