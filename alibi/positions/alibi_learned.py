"""ALiBi whose slopes are trained, which the paper tried and left (footnote 11): they extrapolated worse."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from alibi.positions.alibi import Alibi, AlibiBias
from alibi.positions.base import Params
from alibi.slopes import alibi_slopes


@dataclasses.dataclass(frozen=True)
class AlibiLearned(Alibi):
    """One slope for each head, shared by the layers, that starts as `Alibi`'s of the same options and is trained.

    Its logarithm is the parameter, so that it stays above zero. The paper doesn't say how
    its own trainable slopes were made.
    """

    def init(self, key: PRNGKeyArray) -> Params:
        del key
        return {"log_slopes": jnp.log(alibi_slopes(self.num_heads, self.slopes, self.draw))}

    def bias(self, params: Params) -> AlibiBias:
        return AlibiBias(jnp.exp(params["log_slopes"].astype(jnp.float32)))
