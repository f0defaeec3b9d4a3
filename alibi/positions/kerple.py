"""KERPLE: learned kernels over distance (Chi et al. 2022, arXiv 2205.09921)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.config.fields import number
from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import per_head, static
from alibi.positions.distance import DistanceBias
from alibi.positions.shapes import AtDistances, Distances, PerHead

LEAST = 0.01  # the paper's code clips both parameters to it after each update
GREATEST = 2.0  # exponent for a kernel that is conditionally positive definite


class KerpleLogBias(DistanceBias):
    """-r1 log(1 + r2 d) for a key at distance d.

    Attributes:
      r1, r2: a number for each head, above 0.
      symmetric: the distance counts on both sides.
    """

    bounded = True
    r1: PerHead = per_head()
    r2: PerHead = per_head()
    symmetric: bool = static(default=False)

    def at(self, distance: Distances) -> AtDistances:
        distance = jnp.asarray(distance).astype(jnp.float32)[None]
        r1, r2 = (
            r.astype(jnp.float32).reshape(-1, *(1,) * (distance.ndim - 1))
            for r in (self.r1, self.r2)
        )
        return -r1 * self.kernel(distance, r2)

    def kernel(self, distance: Float[Array, "1 ..."], r2: AtDistances) -> AtDistances:
        """Returns the factor that -r1 multiplies: 0 at distance 0, never less at a greater one."""
        return jnp.log1p(r2 * distance)


class KerplePowerBias(KerpleLogBias):
    """-r1 d^r2 for a key at distance d."""

    def kernel(self, distance: Float[Array, "1 ..."], r2: AtDistances) -> AtDistances:
        # Through a clipped logarithm, so that no gradient is 0 times infinity at distance 0.
        power = jnp.exp(r2 * jnp.log(jnp.maximum(distance, 1.0)))
        return jnp.where(distance > 0, power, 0.0)


@dataclasses.dataclass(frozen=True)
class KerpleLog(PositionMethod):
    """A bias that falls with the logarithm of distance, with two learned numbers in each head, which
    all layers share.

    Config: `position=kerple_log`
    """

    about = About(
        formula="-r1 ln(1 + r2 (i - j)), r1 and r2 of each head learned",
        source="Chi et al. 2022, [arXiv 2205.09921](https://arxiv.org/abs/2205.09921), equation 6",
        caveats="a logarithm falls too slowly to skip keys",
    )

    shift_invariant = True
    limits: ClassVar = {"r1": (LEAST, np.inf), "r2": (LEAST, np.inf)}

    def init(self, key: PRNGKeyArray) -> Params:
        return {"r1": drawn(key, 0, self.num_heads, 2.0), "r2": drawn(key, 1, self.num_heads, 1.0)}

    def bias(self, params: Params) -> KerpleLogBias:
        return KerpleLogBias(params["r1"], params["r2"], symmetric=not self.causal)


@dataclasses.dataclass(frozen=True)
class KerplePower(PositionMethod):
    """A bias that falls with a power of distance, with two learned numbers in each head, which all
    layers share.

    Config: `position=kerple_power,position_options.exponent=1.0`

    Attributes:
      exponent: a fixed r2 for all heads. With 1 this is ALiBi with trained slopes, but without their
        logarithms. Defaults to an r2 that each head learns.
    """

    about = About(
        formula="-r1 (i - j)^r2, 0 < r2 <= 2, r1 and r2 of each head learned",
        source="Chi et al. 2022, [arXiv 2205.09921](https://arxiv.org/abs/2205.09921), equation 5",
        caveats="its authors prefer the logarithm",
    )

    shift_invariant = True
    limits: ClassVar = {"r1": (LEAST, np.inf), "r2": (LEAST, GREATEST)}

    exponent: float | None = number(None, above=0, at_most=GREATEST)

    def init(self, key: PRNGKeyArray) -> Params:
        r1 = {"r1": drawn(key, 0, self.num_heads, 1.0)}
        return r1 if self.exponent else r1 | {"r2": drawn(key, 1, self.num_heads, GREATEST)}

    def bias(self, params: Params) -> KerplePowerBias:
        r2 = jnp.full_like(params["r1"], self.exponent) if self.exponent else params["r2"]
        return KerplePowerBias(params["r1"], r2, symmetric=not self.causal)


def drawn(key: PRNGKeyArray, index: int, heads: int, greatest: float) -> PerHead:
    """Returns a number for each head, uniform from 0 to `greatest` and then at least `LEAST`."""
    return jnp.maximum(
        jax.random.uniform(jax.random.split(key)[index], (heads,), jnp.float32, maxval=greatest),
        LEAST,
    )
