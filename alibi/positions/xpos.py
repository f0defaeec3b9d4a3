"""xPos: rotary embeddings that decay with distance (Sun et al. 2022, arXiv 2212.10554)."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from alibi.config.fields import number
from alibi.positions.base import About, Params
from alibi.positions.rotary import Rotary, by_position
from alibi.positions.shapes import Keys, PerKey, PerQuery, Positions, Queries

LEAST_ZETA = 0.4 / 1.4  # for the fastest pair
LARGEST_EXPONENT = 80.0  # e to this power, and its inverse, times a feature are float32
# In sequences up to so many tokens attention may add -1e30 to hide later keys.
MASKED_BY_SUM = 1024
LARGEST_HIDDEN = 60.0  # -1e30 hides e to this power times a product of features


@dataclasses.dataclass(frozen=True)
class XPos(Rotary):
    """Rotary, with a factor zeta_k^(d / b) for pair k of a query and key at distance d.

    zeta_k is (2k + 0.4 head_dim) / (1.4 head_dim), below 1. Position n multiplies queries by zeta^(n /
    b) and keys by zeta^(-n / b). n counts from the sequence's middle, as in the paper's code, so that
    both are float32 in sequences twice as long.

    Attention can skip no far keys: their logits decay to 0, not to minus infinity.

    Config: `position=xpos,position_options.scale_base=512.0`

    Attributes:
      scale_base: b, in tokens. A larger b decays more slowly. 0 means half the training length, as in the
        paper's code (512 for 1,024).

    Raises:
      ValueError: as `Rotary`, and for attention that is not causal, where products with later keys
        would grow with distance.
    """

    about = About(
        formula="rotary; pair k times zeta_k^((i - j) / b), b = L / 2, zeta_k = (2k + 0.4 head_dim) / (1.4 head_dim)",
        source="Sun et al. 2022, [arXiv 2212.10554](https://arxiv.org/abs/2212.10554)",
        caveats="causal only; its authors add blockwise attention to extrapolate; defined up to 127 b tokens, or 47 b "
        "for b below 22",
    )

    only_causal = "products with later keys would grow with distance"
    follow_length = (("scale_base", "base_length"),)

    scale_base: float = number(0.0, at_least=0)

    @property
    def base_length(self) -> float:
        """b or its default, in tokens."""
        return self.scale_base or self.train_length / 2

    @property
    def max_length(self) -> int:
        """The longest sequence with float32 decays, 65,391 tokens for b = 512.

        For a small b it is the longest one in which the causal mask hides later keys.
        """
        of_token = -math.log(LEAST_ZETA) / self.base_length
        hidden = math.floor(LARGEST_HIDDEN / of_token)
        return hidden if hidden < MASKED_BY_SUM else math.floor(2 * LARGEST_EXPONENT / of_token)

    def queries(
        self, params: Params, query: Queries, positions: Positions, kept: PerQuery
    ) -> Queries:
        return self.turn(query, positions, self.decay(positions, query.ndim))

    def keys(self, params: Params, key: Keys, positions: Positions, kept: PerKey) -> Keys:
        return self.turn(key, positions, 1.0 / self.decay(positions, key.ndim))

    def decay(
        self, positions: Positions, ndim: int
    ) -> Float[Array | np.ndarray, "... length 1 pairs"]:
        """Returns the factor for each pair of query features at these positions."""
        dim = self.rotary_dim
        zeta = (np.arange(0, dim, 2) + 0.4 * dim) / (1.4 * dim)
        middle = (self.length or self.train_length) // 2
        rates = np.where(self.turned, np.log(zeta) / self.base_length, 0.0)
        exponents = by_position(positions - middle, rates, ndim)
        return (np if isinstance(exponents, np.ndarray) else jnp).exp(exponents)
