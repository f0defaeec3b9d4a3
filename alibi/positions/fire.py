"""FIRE: a function of the distance, progressively scaled by the query's position (Li et al. 2023,
arXiv 2310.04418).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from alibi.positions.base import MOST_TOKENS, About, Params, PositionMethod
from alibi.positions.bias import Bias, per_head, shared, static
from alibi.positions.distance import DistanceBias, DistanceTable
from alibi.positions.shapes import (
    AtDistances,
    Distances,
    KeyPositions,
    KnownPositions,
    PerHead,
    QueryPositions,
    Tile,
)

HIDDEN = 32  # units of the network
AT_ONCE = 4  # units evaluated by a pass over the numbers
SLAB = 16  # rows of numbers that are summed together: the sums of a pass stay in the nearest cache
EPSILON = 1e-6  # added to the denominator, as in the paper's code


class Network(NamedTuple):
    """The sum over units u of kernel[u, h] relu(hidden_kernel[u] x + hidden_bias[u]), for head h."""

    hidden_kernel: Float[Array, " units"]
    hidden_bias: Float[Array, " units"]
    kernel: Float[Array, "units heads"]


def relu_network(x: Float[Array, "*shape"], network: Network) -> Float[Array, "*shape heads"]:
    """Returns the network of x, by the formula."""
    kernel, bias = (
        p.reshape((1,) * x.ndim + p.shape) for p in (network.hidden_kernel, network.hidden_bias)
    )
    return jnp.matmul(
        jax.nn.relu(x[..., None] * kernel + bias), network.kernel, precision="highest"
    )


class LogDistance(DistanceBias):
    """psi(d) = log(c d + 1) at distance d on either side, with the same c in each head."""

    symmetric = True
    c: PerHead = per_head()

    def at(self, distance: Distances) -> AtDistances:
        distance = jnp.asarray(distance).astype(jnp.float32)[None]
        return jnp.log1p(self.c.reshape(-1, *(1,) * (distance.ndim - 1)) * distance)


class FireBias(Bias):
    """f(psi(|i - j|) / psi(max(threshold, i))) with psi(x) = log(c x + 1), for query i and key j
    (section 3.1).

    Attributes:
      hidden_kernel, hidden_bias, kernel: parameters of f, a network with a hidden layer of ReLUs.
        The paper's code also has a bias of the outputs, which adds a constant to each row of
        logits; softmax ignores it.
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
        relative = jnp.log1p(
            self.bias.c * jnp.asarray(distance).astype(jnp.float32)
        ) / self.bias.scale(jnp.zeros((), jnp.float32))
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
        all_before = (query_positions.astype(jnp.float32) < self.bias.threshold).all()
        return jax.lax.cond(
            all_before, lambda: self.before_threshold(*sides), lambda: self.bias(*sides)
        )


@dataclasses.dataclass(frozen=True)
class Fire(PositionMethod):
    """A learned function of the distance relative to the query's position; each layer has its own.

    Attributes:
      threshold: tokens; a learned multiple of it is the least divisor of distances. 0: a quarter of
        the training length, as in the paper's code (512 for 2,048).

    Raises:
      ValueError: a threshold below 0 or above 2^24.
    """

    about = About(
        formula="f(ln(c (i - j) + 1) / ln(c max(T, i) + 1)), f a network with 32 hidden units, c and T "
        "learned, T from L / 4 on",
        source="Li et al. 2023, [arXiv 2310.04418](https://arxiv.org/abs/2310.04418), section 3.1",
        caveats="beyond the threshold it is not a function of the distance, so each pair of query and key is computed",
    )

    threshold: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= MOST_TOKENS:
            raise ValueError(
                f"fire needs a threshold from 1 to {MOST_TOKENS:,} tokens, or 0 for a quarter of the training length, "
                f"and got {self.threshold}"
            )

    def init_layer(self, key: PRNGKeyArray) -> Params:
        def uniform(number: int, shape: tuple[int, ...], inputs: int) -> Array:
            bound = inputs**-0.5  # as PyTorch initializes linear layers
            return jax.random.uniform(
                jax.random.fold_in(key, number), shape, jnp.float32, -bound, bound
            )

        return {
            "hidden_kernel": uniform(0, (HIDDEN,), 1),
            "hidden_bias": uniform(1, (HIDDEN,), 1),
            "kernel": uniform(2, (HIDDEN, self.num_heads), HIDDEN),
            "c": jnp.asarray(0.1, jnp.float32),
            "threshold_multiple": jnp.asarray(1.0, jnp.float32),
        }

    def bias(self, params: Params) -> FireBias:
        c, threshold = jnp.abs(params["c"]), self.threshold or max(self.train_length // 4, 1)
        return FireBias(
            hidden_kernel=params["hidden_kernel"],
            hidden_bias=params["hidden_bias"],
            kernel=params["kernel"],
            log_distance=LogDistance(jnp.broadcast_to(c, self.num_heads)),
            c=c,
            threshold=jnp.abs(params["threshold_multiple"]) * threshold,
        )


@jax.custom_vjp
def relu_network_by_parts(
    x: Float[Array, "*batch heads q k"], of_rows: Float[Array, "*#batch 1 q 1"], network: Network
) -> Float[Array, "*batch heads q k"]:
    """Returns the network of x times a number of its row, in time proportional to the units that
    bend among them.

    A network of one number with a hidden layer of ReLUs is a line that bends once for each unit.
    For the numbers of a tile, which lie close together, most units are on for all numbers or off
    for all. The units that are on make a line together, and only the few that bend among the
    numbers are evaluated for each of them.

    Differentiable once, in reverse mode.
    """
    x = x * of_rows
    on, bends = _units(x, network)
    slope, start = _line(network, on)

    def add(total: Array, units: Array, bend: Array, of_pass: Network) -> Array:
        for kernel, bias, of_heads in zip(*of_pass, strict=True):
            before = x * kernel + bias
            total = total + jnp.where(before > 0, before * _for_heads(of_heads, x), 0.0)
        return total

    line = x * _for_heads(slope, x) + _for_heads(start, x)
    return _over_bending(network, bends, add, line)


def _units(x: Array, network: Network) -> tuple[Bool[Array, " units"], Bool[Array, " units"]]:
    """Returns which units are on for all numbers, and which bend among them."""
    least, most = (
        end * network.hidden_kernel + network.hidden_bias > 0 for end in (x.min(), x.max())
    )
    return least & most, least != most


def _over_bending(
    network: Network, bends: Bool[Array, " units"], add: Callable[..., Any], state: Any
) -> Any:
    """Returns the state after `add(state, units, bend, network of these units)` for all units that
    bend, `AT_ONCE` units a pass.

    The last pass may have units that do not bend, as `bend` says; their outputs are 0.
    """
    order, bent = jnp.argsort(~bends), bends.sum()

    def next_units(number: Array, state: Any) -> Any:
        place = number * AT_ONCE + jnp.arange(AT_ONCE)
        units, bend = order[jnp.minimum(place, order.size - 1)], place < bent
        kernel, bias, of_heads = (p[units] for p in network)
        of_pass = Network(kernel, bias, jnp.where(bend[:, None], of_heads, 0.0))
        return add(state, units, bend, of_pass)

    return jax.lax.fori_loop(0, -(-bent // AT_ONCE), next_units, state)


def _line(
    network: Network, on: Bool[Array, " units"]
) -> tuple[Float[Array, " heads"], Float[Array, " heads"]]:
    """Returns slope and start of the sum of the units that are on for all numbers."""
    kernel = jnp.where(on[:, None], network.kernel, 0.0)
    slope, start = (
        jnp.matmul(p, kernel, precision="highest")
        for p in (network.hidden_kernel, network.hidden_bias)
    )
    return slope, start


def _for_heads(x: Float[Array, " heads"], like: Array) -> Float[Array, "*ones heads 1 1"]:
    return x.reshape((1,) * (like.ndim - 3) + (-1, 1, 1))


def _forward(
    x: Array, of_rows: Array, network: Network
) -> tuple[Array, tuple[Array, Array, Network]]:
    return relu_network_by_parts(x, of_rows, network), (x, of_rows, network)


def _backward(saved: tuple[Array, Array, Network], g: Array) -> tuple[Array, Array, Network]:
    # The network's gradients follow from two sums over the numbers for which a unit is on: of g,
    # and of g x.
    unscaled, of_rows, network = saved
    x = unscaled * of_rows
    on, bends = _units(x, network)
    slope, _ = _line(network, on)
    g_by_head, x_by_head = (
        jnp.moveaxis(a, -3, 0).reshape(x.shape[-3], -1, x.shape[-1]) for a in (g, x)
    )
    of_gx = jnp.vecdot(g_by_head, x_by_head, precision="highest").sum(axis=1)
    of_all = jnp.stack([g_by_head.sum(axis=(1, 2)), of_gx])
    sums = jnp.where(on[:, None, None], of_all[None], 0.0)

    def add(
        state: tuple[Array, Array], units: Array, bend: Array, of_pass: Network
    ) -> tuple[Array, Array]:
        slopes, sums = state
        for kernel, bias, of_heads in zip(*of_pass, strict=True):
            slopes = slopes + jnp.where(
                x * kernel + bias > 0, _for_heads(of_heads * kernel, x), 0.0
            )
        more = _sums_where_on(g_by_head, x_by_head, of_pass)
        # Units that do not bend have a kernel of zero here, and their sums already.
        return slopes, sums.at[units].add(jnp.where(bend[:, None, None], more, 0.0))

    slopes = jnp.broadcast_to(_for_heads(slope, x), x.shape)
    slopes, sums = _over_bending(network, bends, add, (slopes, sums))
    of_g, of_gx = sums[:, 0], sums[:, 1]
    kernel, bias = network.hidden_kernel[:, None], network.hidden_bias[:, None]
    of_network = Network(
        (network.kernel * of_gx).sum(axis=1),
        (network.kernel * of_g).sum(axis=1),
        kernel * of_gx + bias * of_g,
    )
    dx = g * slopes
    by_row = jnp.vecdot(dx, unscaled, precision="highest")[..., None]
    shared = tuple(axis for axis, size in enumerate(of_rows.shape) if size == 1)
    return dx * of_rows, by_row.sum(axis=shared, keepdims=True), of_network


def _sums_where_on(
    g: Float[Array, "heads rows k"], x: Float[Array, "heads rows k"], units: Network
) -> Float[Array, "units two heads"]:
    """Returns the sums of g and of g x for each head, over the numbers for which each of these
    units is on.
    """
    heads, rows, columns = x.shape
    slab = next(size for size in range(SLAB, 0, -1) if rows % size == 0)
    kernel, bias = (p.reshape(-1, 1, 1, 1) for p in (units.hidden_kernel, units.hidden_bias))

    def add(sums: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        g_slab, x_slab = (
            jax.lax.dynamic_slice_in_dim(a, start, slab, axis=1)[None] for a in (g, x)
        )
        seen = jnp.where(x_slab * kernel + bias > 0, g_slab, 0.0)
        return (sums[0] + seen, sums[1] + seen * x_slab), None

    zeros = jnp.zeros((kernel.size, heads, slab, columns), jnp.float32)
    sums, _ = jax.lax.scan(add, (zeros, zeros), jnp.arange(0, rows, slab))
    return jnp.stack([of_slab.sum(axis=(2, 3)) for of_slab in sums], axis=1)


relu_network_by_parts.defvjp(_forward, _backward)
