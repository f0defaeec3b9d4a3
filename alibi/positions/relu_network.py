"""A network of one number, with one hidden layer of ReLUs: a line that bends once for each unit.

For the numbers of a tile, which lie close together, most units are on for all of them or off for all. Those that are on
make one line together, and only the few that bend among the numbers are evaluated for each of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

AT_ONCE = 4  # units that one pass over the numbers evaluates
SLAB = 16  # rows of numbers that are added up together, so that the sums of a pass stay in the nearest cache


class Network(NamedTuple):
    """The sum over units u of kernel[u, h] relu(hidden_kernel[u] x + hidden_bias[u]), for head h."""

    hidden_kernel: Float[Array, " units"]
    hidden_bias: Float[Array, " units"]
    kernel: Float[Array, "units heads"]


def relu_network(x: Float[Array, "*shape"], network: Network) -> Float[Array, "*shape heads"]:
    """The network of x, by the formula."""
    kernel, bias = (p.reshape((1,) * x.ndim + p.shape) for p in (network.hidden_kernel, network.hidden_bias))
    return jnp.matmul(jax.nn.relu(x[..., None] * kernel + bias), network.kernel, precision="highest")


@jax.custom_vjp
def relu_network_by_parts(
    x: Float[Array, "*batch heads q k"], of_rows: Float[Array, "*#batch 1 q 1"], network: Network
) -> Float[Array, "*batch heads q k"]:
    """The network of x times a number of its row, in time that goes by how many units bend among these products.

    Differentiable once, in reverse mode.
    """
    x = x * of_rows
    on, bending = _units(x, network)
    slope, start = _line(network, on)

    def add(number: Array, total: Array) -> Array:
        units, bend = bending.of_pass(number)
        for kernel, bias, of_heads in zip(*_some(network, units, bend), strict=True):
            before = x * kernel + bias
            total = total + jnp.where(before > 0, before * _for_heads(of_heads, x), 0.0)
        return total

    return jax.lax.fori_loop(0, bending.passes, add, x * _for_heads(slope, x) + _for_heads(start, x))


class Bending(NamedTuple):
    """The units that are on for some of the numbers only.

    Attributes:
      order: all units, those that bend first.
      bent: how many bend.
    """

    order: Int[Array, " units"]
    bent: Int[Array, ""]

    @property
    def passes(self) -> Int[Array, ""]:
        return -(-self.bent // AT_ONCE)

    def of_pass(self, number: Array) -> tuple[Int[Array, " at_once"], Bool[Array, " at_once"]]:
        """The numbers of the next `AT_ONCE` units, and which of them bend: at the end some may not."""
        place = number * AT_ONCE + jnp.arange(AT_ONCE)
        return self.order[jnp.minimum(place, self.order.size - 1)], place < self.bent


def _units(x: Array, network: Network) -> tuple[Bool[Array, " units"], Bending]:
    """Which units are on for all numbers, and those that bend among them."""
    least, most = (end * network.hidden_kernel + network.hidden_bias > 0 for end in (x.min(), x.max()))
    return least & most, Bending(jnp.argsort(least == most), (least != most).sum())


def _line(network: Network, on: Bool[Array, " units"]) -> tuple[Float[Array, " heads"], Float[Array, " heads"]]:
    """Slope and start of what the units make together that are on for all numbers."""
    kernel = jnp.where(on[:, None], network.kernel, 0.0)
    slope, start = (jnp.matmul(p, kernel, precision="highest") for p in (network.hidden_kernel, network.hidden_bias))
    return slope, start


def _some(network: Network, units: Int[Array, " some"], bend: Bool[Array, " some"]) -> Network:
    """Some units of the network, of which those that do not bend add nothing."""
    kernel, bias, of_heads = (p[units] for p in network)
    return Network(kernel, bias, jnp.where(bend[:, None], of_heads, 0.0))


def _for_heads(x: Float[Array, " heads"], like: Array) -> Float[Array, "*ones heads 1 1"]:
    return x.reshape((1,) * (like.ndim - 3) + (-1, 1, 1))


def _forward(x: Array, of_rows: Array, network: Network) -> tuple[Array, tuple[Array, Array, Network]]:
    return relu_network_by_parts(x, of_rows, network), (x, of_rows, network)


def _backward(saved: tuple[Array, Array, Network], g: Array) -> tuple[Array, Array, Network]:
    """The network's gradients follow from two sums over the numbers for which a unit is on: of g, and of g x."""
    unscaled, of_rows, network = saved
    x = unscaled * of_rows
    on, bending = _units(x, network)
    slope, _ = _line(network, on)
    g_by_head, x_by_head = (jnp.moveaxis(a, -3, 0).reshape(x.shape[-3], -1, x.shape[-1]) for a in (g, x))
    sums = jnp.where(on[:, None, None], _sums(g_by_head, x_by_head)[None], 0.0)

    def add(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        slopes, sums = state
        units, bend = bending.of_pass(number)
        of_pass = _some(network, units, bend)
        for kernel, bias, of_heads in zip(*of_pass, strict=True):
            slopes = slopes + jnp.where(x * kernel + bias > 0, _for_heads(of_heads * kernel, x), 0.0)
        more = _sums_where_on(g_by_head, x_by_head, of_pass)
        # Units that do not bend come with a kernel of zero, and have their sums already.
        return slopes, sums.at[units].add(jnp.where(bend[:, None, None], more, 0.0))

    slopes = jnp.broadcast_to(_for_heads(slope, x), x.shape)
    slopes, sums = jax.lax.fori_loop(0, bending.passes, add, (slopes, sums))
    of_g, of_gx = sums[:, 0], sums[:, 1]
    kernel, bias = network.hidden_kernel[:, None], network.hidden_bias[:, None]
    of_network = Network(
        (network.kernel * of_gx).sum(axis=1), (network.kernel * of_g).sum(axis=1), kernel * of_gx + bias * of_g
    )
    dx = g * slopes
    by_row = jnp.vecdot(dx, unscaled, precision="highest")[..., None]
    shared = tuple(axis for axis, size in enumerate(of_rows.shape) if size == 1)
    return dx * of_rows, by_row.sum(axis=shared, keepdims=True), of_network


def _sums(g: Float[Array, "heads rows k"], x: Float[Array, "heads rows k"]) -> Float[Array, "two heads"]:
    """The sums of g and of g x for each head."""
    return jnp.stack([g.sum(axis=(1, 2)), jnp.vecdot(g, x, precision="highest").sum(axis=1)])


def _sums_where_on(
    g: Float[Array, "heads rows k"], x: Float[Array, "heads rows k"], units: Network
) -> Float[Array, "units two heads"]:
    """The sums of g and of g x for each head, over the numbers for which each of these units is on."""
    heads, rows, columns = x.shape
    slab = next(size for size in range(SLAB, 0, -1) if rows % size == 0)
    kernel, bias = (p.reshape(-1, 1, 1, 1) for p in (units.hidden_kernel, units.hidden_bias))

    def add(sums: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        g_slab, x_slab = (jax.lax.dynamic_slice_in_dim(a, start, slab, axis=1)[None] for a in (g, x))
        seen = jnp.where(x_slab * kernel + bias > 0, g_slab, 0.0)
        return (sums[0] + seen, sums[1] + seen * x_slab), None

    zeros = jnp.zeros((kernel.size, heads, slab, columns))
    sums, _ = jax.lax.scan(add, (zeros, zeros), jnp.arange(0, rows, slab))
    return jnp.stack([of_slab.sum(axis=(2, 3)) for of_slab in sums], axis=1)


relu_network_by_parts.defvjp(_forward, _backward)
