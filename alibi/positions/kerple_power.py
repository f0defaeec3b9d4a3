"""KERPLE with the power kernel (Chi et al. 2022, arXiv 2205.09921, equation 5)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.kerple_log import LEAST, KerpleBias, drawn

GREATEST = 2.0  # exponent of a kernel that is conditionally positive definite


class KerplePowerBias(KerpleBias):
    """-r1 d^r2 of a key at distance d."""

    def kernel(self, distance: Float[Array, "1 ..."], r2: Float[Array, "heads ..."]) -> Float[Array, "heads ..."]:
        # By the logarithm, which at distance 0 is that of 1, so that no gradient has 0 times infinity in it.
        power = jnp.exp(r2 * jnp.log(jnp.maximum(distance, 1.0)))
        return jnp.where(distance > 0, power, 0.0)


@dataclasses.dataclass(frozen=True)
class KerplePower(PositionMethod):
    """A bias that falls with a power of distance, by two learned numbers of each head, which layers share.

    Attributes:
      exponent: one r2 for all heads, which is not trained; None: each head learns its own. With 1 it is ALiBi, whose
        slopes are trained by themselves and not by their logarithms.

    Raises:
      ValueError: an exponent that is not above 0, or above 2.
    """

    about = About(
        formula="-r1 (i - j)^r2, 0 < r2 <= 2, r1 and r2 of each head learned",
        source="Chi et al. 2022, [arXiv 2205.09921](https://arxiv.org/abs/2205.09921), equation 5",
        caveats="its authors prefer the logarithm",
    )

    shift_invariant = True
    limits: ClassVar = {"r1": (LEAST, np.inf), "r2": (LEAST, GREATEST)}

    exponent: float | None = None

    def __post_init__(self) -> None:
        if self.exponent is not None and not 0 < self.exponent <= GREATEST:
            raise ValueError(
                f"kerple_power needs an exponent above 0 and of at most {GREATEST:g}, such as 1, or None for one that "
                f"each head learns, and got {self.exponent}"
            )

    def init(self, key: PRNGKeyArray) -> Params:
        of_r1, of_r2 = jax.random.split(key)
        r1 = {"r1": drawn(of_r1, self.num_heads, 1.0)}
        if self.exponent is not None:
            return r1
        return r1 | {"r2": drawn(of_r2, self.num_heads, GREATEST)}

    def bias(self, params: Params) -> KerplePowerBias:
        r2 = jnp.full_like(params["r1"], self.exponent) if self.exponent else params["r2"]
        return KerplePowerBias(params["r1"], r2, symmetric=not self.causal)
