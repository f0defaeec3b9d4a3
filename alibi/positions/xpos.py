"""xPos: rotary embeddings whose pairs decay with distance (Sun et al. 2022, arXiv 2212.10554)."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from alibi.positions.base import About, Params
from alibi.positions.rotary import Rotary, by_position
from alibi.positions.shapes import Keys, PerKey, PerQuery, Positions, Queries

LEAST_ZETA = 0.4 / 1.4  # of the fastest pair
LARGEST_EXPONENT = 80.0  # e to this power, and its inverse, times a feature are float32
# tokens: in sequences up to this length attention may hide later keys by adding -1e30
MASKED_BY_SUM = 1024
LARGEST_HIDDEN = 60.0  # e to this power times a product of features is hidden by -1e30


@dataclasses.dataclass(frozen=True)
class XPos(Rotary):
    """Rotary, with pair k of a query and key at distance d multiplied by zeta_k^(d / b).

    zeta_k is (2k + 0.4 head_dim) / (1.4 head_dim), below 1. Queries are multiplied by zeta^(n /
    b) at position n and keys by zeta^(-n / b); n counts from the middle of the sequence, as in the
    paper's code, so that both are float32 in sequences twice as long.

    Attention can skip no far keys: the decay takes their logits to 0, not to minus infinity.

    Attributes:
      scale_base: b, in tokens; the larger, the slower the decay. 0: half the training length, as in
        the paper's code (512 for 1,024).

    Raises:
      ValueError: attention that is not causal, in which products with later keys would grow with
        distance, or a scale_base below 0; see also `Rotary`.
    """

    about = About(
        formula="rotary; pair k times zeta_k^((i - j) / b), b = L / 2, zeta_k = (2k + 0.4 head_dim) / (1.4 head_dim)",
        source="Sun et al. 2022, [arXiv 2212.10554](https://arxiv.org/abs/2212.10554)",
        caveats="causal only; its authors add blockwise attention to extrapolate; defined up to 127 b tokens, or 47 b "
        "for b below 22",
    )

    scale_base: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.causal:
            raise ValueError(
                "xpos needs causal=True (objective=next_token): products with later keys would grow with distance"
            )
        if not 0 <= self.scale_base < math.inf:
            raise ValueError(
                f"xpos needs a scale_base above 0 and finite, or 0 for half the training length, or its decay would "
                f"grow with distance; got {self.scale_base}"
            )

    @property
    def base_length(self) -> float:
        """b, given or by the training length, in tokens."""
        return self.scale_base or self.train_length / 2

    @property
    def max_length(self) -> int:
        """The length whose decays are float32, 65,391 tokens for b = 512.

        For a small b, the length up to which the causal mask hides later keys.
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
        """Returns the factor of each pair of features of queries at these positions."""
        dim = self.rotary_dim
        zeta = (np.arange(0, dim, 2) + 0.4 * dim) / (1.4 * dim)
        middle = (self.length or self.train_length) // 2
        rates = np.where(self.turned, np.log(zeta) / self.base_length, 0.0)
        exponents = by_position(positions - middle, rates, ndim)
        return (np if isinstance(exponents, np.ndarray) else jnp).exp(exponents)
