"""ALiBi whose slopes are trained, which the paper tried and left (footnote 11): they extrapolated worse."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from alibi.positions.alibi import Alibi, AlibiBias, TwoSidedAlibiBias
from alibi.positions.base import About, Params

NAMES = ("log_slopes", "log_slopes_after")  # of the parameters, for keys before and after the query


@dataclasses.dataclass(frozen=True)
class AlibiLearned(Alibi):
    """One slope for each head, shared by the layers, that starts as `Alibi`'s of the same options and is trained.

    Its logarithm is the parameter, so that it stays above zero. The paper doesn't say how
    its own trainable slopes were made.

    Attributes:
      per_layer: each layer has slopes of its own.

    Raises:
      ValueError: a slope of 0, or so small that float32 has no logarithm of it; see also `Alibi`.
    """

    about = About(
        formula="-m_h (i - j), log m_h learned",
        source="Press, Smith and Lewis 2022, footnote 11",
        caveats="extrapolates worse than fixed slopes, says the paper",
    )

    per_layer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_above_zero("alibi_learned")

    def init(self, key: PRNGKeyArray) -> Params:
        del key
        return {} if self.per_layer else self._logarithms()

    def init_layer(self, key: PRNGKeyArray) -> Params:
        del key
        return self._logarithms() if self.per_layer else {}

    def _logarithms(self) -> Params:
        return {name: jnp.log(slopes) for name, slopes in zip(NAMES, self.sides(), strict=False)}

    def bias(self, params: Params) -> AlibiBias | TwoSidedAlibiBias:
        return self.of_sides([jnp.exp(params[name].astype(jnp.float32)) for name in NAMES if name in params])
