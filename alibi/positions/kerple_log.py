"""KERPLE with the logarithmic kernel (Chi et al. 2022, arXiv 2205.09921, equation 6)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import MissingFunctionError, per_head, static
from alibi.positions.distance import DistanceBias

LEAST = 0.01  # of both parameters, which the paper's code puts back to it after each update


class KerpleBias(DistanceBias):
    """-r1 times a kernel of the distance d and r2; a subclass gives the kernel.

    Attributes:
      r1, r2: of each head, above 0.
      symmetric: the distance is counted on both sides.
    """

    bounded = True
    r1: Float[Array, " heads"] = per_head()
    r2: Float[Array, " heads"] = per_head()
    symmetric: bool = static(default=False)

    def at(self, distance: Integer[Array | np.ndarray, "*shape"]) -> Float[Array, "heads ..."]:
        distance = jnp.asarray(distance).astype(jnp.float32)[None]
        r1, r2 = (r.astype(jnp.float32).reshape(-1, *(1,) * (distance.ndim - 1)) for r in (self.r1, self.r2))
        return -r1 * self.kernel(distance, r2)

    def kernel(self, distance: Float[Array, "1 ..."], r2: Float[Array, "heads ..."]) -> Float[Array, "heads ..."]:
        """What r1 multiplies: 0 at distance 0, and never less at a greater one."""
        raise MissingFunctionError(f"{type(self).__name__} needs kernel(distance, r2)")


class KerpleLogBias(KerpleBias):
    """-r1 log(1 + r2 d) of a key at distance d."""

    def kernel(self, distance: Float[Array, "1 ..."], r2: Float[Array, "heads ..."]) -> Float[Array, "heads ..."]:
        return jnp.log1p(r2 * distance)


@dataclasses.dataclass(frozen=True)
class KerpleLog(PositionMethod):
    """A bias that falls with the logarithm of distance, by two learned numbers of each head; layers share them."""

    about = About(
        formula="-r1 ln(1 + r2 (i - j)), r1 and r2 of each head learned",
        source="Chi et al. 2022, [arXiv 2205.09921](https://arxiv.org/abs/2205.09921), equation 6",
        caveats="a logarithm falls too slowly for keys to be skipped",
    )

    shift_invariant = True
    limits: ClassVar = {"r1": (LEAST, np.inf), "r2": (LEAST, np.inf)}

    def init(self, key: PRNGKeyArray) -> Params:
        of_r1, of_r2 = jax.random.split(key)
        return {
            "r1": drawn(of_r1, self.num_heads, 2.0),
            "r2": drawn(of_r2, self.num_heads, 1.0),
        }

    def bias(self, params: Params) -> KerpleLogBias:
        return KerpleLogBias(params["r1"], params["r2"], symmetric=not self.causal)


def drawn(key: PRNGKeyArray, heads: int, greatest: float) -> Float[Array, " heads"]:
    """A number of each head, uniform from 0 to `greatest`; those below `LEAST` are that."""
    return jnp.maximum(jax.random.uniform(key, (heads,), maxval=greatest), LEAST)
