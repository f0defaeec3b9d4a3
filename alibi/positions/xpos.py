"""xPos: rotary embeddings whose pairs decay with distance (Sun et al. 2022, arXiv 2212.10554)."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from alibi.positions.base import About, Params, Positions
from alibi.positions.rotary import Rotary, by_position

LEAST_ZETA = 0.4 / 1.4  # of the fastest pair
LARGEST_EXPONENT = 80.0  # of e, that float32 holds with features multiplied to it, and its inverse too
MASKED_BY_SUM = 1024  # tokens; in sequences up to this attention may hide later keys by adding -1e30
LARGEST_HIDDEN = 60.0  # exponent of e of a product that this hides, with features multiplied to it


@dataclasses.dataclass(frozen=True)
class XPos(Rotary):
    """Rotary, with pair k of a query and key at distance d multiplied by zeta_k^(d / scale_base).

    zeta_k is (2k + 0.4 head_dim) / (1.4 head_dim), below 1. Queries get one half of it,
    zeta^(n / scale_base) at position n, and keys the other, zeta^(-n / scale_base); n is counted from the
    middle of the sequence, as in the paper's code, so that either is a float32 up to twice as long.

    The decay gives attention no bound by which far keys could be skipped: it takes their logits to 0, not to
    minus infinity, and a logit of 0 has its weight.

    Attributes:
      scale_base: tokens; the larger, the slower the decay.

    Raises:
      ValueError: attention in both directions, in which the products with later keys would grow with distance, or a
        scale_base that is not above 0; see also `Rotary`.
    """

    about = About(
        formula="rotary; pair k times zeta_k^((i - j) / 512), zeta_k = (2k + 0.4 head_dim) / (1.4 head_dim)",
        source="Sun et al. 2022, [arXiv 2212.10554](https://arxiv.org/abs/2212.10554)",
        caveats="causal only; its authors extrapolate with blockwise attention besides; defined up to 65,391 tokens",
    )

    scale_base: float = 512.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.causal:
            raise ValueError("xpos needs causal=True: its products with keys after the query would grow with distance")
        if not 0 < self.scale_base < math.inf:
            raise ValueError(
                f"xpos needs a scale_base above 0 and finite, such as 512, or its decay would grow with distance; got "
                f"{self.scale_base}"
            )

    @property
    def max_length(self) -> int:
        """Beyond it, 65,391 tokens with a scale_base of 512, halves of the decay are no float32.

        With a small scale_base it is where products with later keys come near what the causal mask takes from them.
        """
        of_token = -math.log(LEAST_ZETA) / self.scale_base
        hidden = math.floor(LARGEST_HIDDEN / of_token)
        return hidden if hidden < MASKED_BY_SUM else math.floor(2 * LARGEST_EXPONENT / of_token)

    @property
    def remedy(self) -> str:
        return f"a scale_base above {self.scale_base:g}"

    def queries(
        self, params: Params, query: Float[Array, "*batch q heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch q heads head_dim"]:
        del params
        return self.turn(query, positions, self.decay(positions, query.ndim))

    def keys(
        self, params: Params, key: Float[Array, "*batch k heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch k heads head_dim"]:
        del params
        return self.turn(key, positions, 1.0 / self.decay(positions, key.ndim))

    def decay(self, positions: Positions, ndim: int) -> Float[Array | np.ndarray, "... length 1 pairs"]:
        """The half of each pair's decay that queries at these positions get."""
        dim = self.rotary_dim
        zeta = (np.arange(0, dim, 2) + 0.4 * dim) / (1.4 * dim)
        middle = (self.length or self.train_length) // 2
        rates = np.where(self.turned, np.log(zeta) / self.scale_base, 0.0)
        exponents = by_position(positions - middle, rates, ndim)
        return (np if isinstance(exponents, np.ndarray) else jnp).exp(exponents)
