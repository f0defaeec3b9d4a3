"""BAM: a generalized Gaussian of the distance as a prior for attention (Bianchessi et al. 2025, arXiv
2505.22842).
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from alibi.config.fields import number
from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import per_head, static
from alibi.positions.distance import DistanceBias
from alibi.positions.shapes import AtDistances, Distances, PerHead
from alibi.slopes import alibi_slopes


class BamBias(DistanceBias):
    """-exp(s) (|d - mu| + epsilon)^a for a key at distance d.

    Attributes:
      scale, power, mean: s, a and mu of each head.
      epsilon: keeps the gradient finite at distance mu.
    """

    signed = True
    scale: PerHead = per_head()
    power: PerHead = per_head()
    mean: PerHead = per_head()
    epsilon: float = static()

    def at(self, distance: Distances) -> AtDistances:
        distance = jnp.asarray(distance).astype(jnp.float32)[None]
        scale, power, mean = (
            x.astype(jnp.float32).reshape(-1, *(1,) * (distance.ndim - 1))
            for x in (self.scale, self.power, self.mean)
        )
        # the derivative of JAX's abs at 0 is 1, with which a mean of 0 would never move
        away = (distance - mean) * jnp.sign(distance - mean)
        return -jnp.exp(scale + power * jnp.log(away + self.epsilon))


@dataclasses.dataclass(frozen=True)
class Bam(PositionMethod):
    """The logarithm of a generalized Gaussian of the distance. Each head learns its scale, power
    and mean in each layer.

    A power below zero favours far keys, so no key can be skipped. It starts as ALiBi. Its authors
    multiply the products, not the bias, with s ln n, too: `model.logit_scale=ssmax_queries`.

    Config: `position=bam,model.logit_scale=ssmax_queries`

    Attributes:
      epsilon: added to the distance from the mean.
    """

    about = About(
        formula="-exp(s_h) (abs(i - j - mu_h) + epsilon)^a_h, s, a and mu of each head in each layer learned",
        source="Bianchessi et al. 2025, [arXiv 2505.22842](https://arxiv.org/abs/2505.22842)",
        caveats="initial values are ours: a = 1 and mu = 0, so ALiBi. Its authors use it with "
        "`model.logit_scale=ssmax_queries`; their mean is exp(mu) - exp(-mu), and their code trains "
        "the mean only if asked",
    )

    shift_invariant = True

    epsilon: float = number(1e-5, above=0, at_most=1)

    def init_layer(self, key: PRNGKeyArray) -> Params:
        return {
            "scale": jnp.log(alibi_slopes(self.num_heads)),
            "power": jnp.ones(self.num_heads, jnp.float32),
            "mean": jnp.zeros(self.num_heads, jnp.float32),
        }

    def bias(self, params: Params) -> BamBias:
        return BamBias(params["scale"], params["power"], params["mean"], self.epsilon)
