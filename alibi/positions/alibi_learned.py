"""ALiBi with trained slopes, which the paper tried and dropped (footnote 11): they extrapolated
worse.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from alibi.positions.alibi import Alibi
from alibi.positions.base import About, Params
from alibi.positions.shapes import PerHead

NAMES = ("log_slopes", "log_slopes_after")  # for keys before and after the query


@dataclasses.dataclass(frozen=True)
class AlibiLearned(Alibi):
    """A trained slope for each head, which all layers share. It starts as in `Alibi` with the same
    options.

    The parameter is the logarithm, so the slope stays above zero. The paper doesn't describe its own
    trainable slopes.

    Config: `position=alibi_learned,position_options.per_layer=True`

    Attributes:
      per_layer: each layer has its own slopes.

    Raises:
      ValueError: as `Alibi`, and for a slope that is 0 or has no logarithm in float32.
    """

    about = About(
        formula="-m_h (i - j), log m_h learned",
        source="Press, Smith and Lewis 2022, footnote 11",
        caveats="extrapolates worse than fixed slopes in the paper; here its perplexity stays level too",
    )

    takes_logarithms = True

    per_layer: bool = False

    def init(self, key: PRNGKeyArray) -> Params:
        return {} if self.per_layer else self._logarithms()

    def init_layer(self, key: PRNGKeyArray) -> Params:
        return self._logarithms() if self.per_layer else {}

    def _logarithms(self) -> Params:
        return {
            name: jnp.log(slopes) for name, slopes in zip(NAMES, super().sides({}), strict=False)
        }

    def sides(self, params: Params) -> list[PerHead]:
        return [jnp.exp(params[name].astype(jnp.float32)) for name in NAMES if name in params]
