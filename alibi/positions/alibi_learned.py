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

    Raises:
      ValueError: a given slope that is not above 0.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.slopes, tuple) and min(self.slopes) <= 0:
            raise ValueError(
                f"alibi_learned starts from slopes={list(self.slopes)}, which must be above 0, as their logarithms are "
                "trained; fixed ones (position=alibi) may be 0"
            )

    def init(self, key: PRNGKeyArray) -> Params:
        del key
        return {"log_slopes": jnp.log(alibi_slopes(self.num_heads, self.slopes, self.draw))}

    def bias(self, params: Params) -> AlibiBias:
        return AlibiBias(jnp.exp(params["log_slopes"].astype(jnp.float32)), symmetric=not self.causal)
