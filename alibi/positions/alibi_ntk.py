"""ALiBi with slopes that are flattened head by head for longer sequences (dynamic NTK-ALiBi; keezen/ntk_alibi)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from alibi.positions.alibi import Alibi
from alibi.positions.base import About


@dataclasses.dataclass(frozen=True)
class AlibiNtk(Alibi):
    """The flattest slope divided by a = L' / L, the steepest as it was, those between by powers of a between 0 and 1.

    L' are the tokens of the sequences at hand, L those of training; a is at least 1. The power is linear in
    the logarithm of the slope, so in 2^(-8h/n) head h is divided by a^((h - 1) / (n - 1)), as the method's source has
    it, and any other slopes keep their order. One head alone is the steepest, and stays as it was.

    Raises:
      ValueError: a slope of 0, or so small that float32 has no logarithm of it.
    """

    about = About(
        formula="-m_h a^(-p_h) (i - j), a = max(1, L' / L), p_h = ln(m_max / m_h) / ln(m_max / m_min), "
        "which is (h - 1) / (H - 1) for H a power of two",
        source="[keezen/ntk_alibi](https://github.com/keezen/ntk_alibi)",
        caveats="changes only how a trained model is tested",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_above_zero("alibi_ntk")

    def flattened(self, slopes: Float[Array, " heads"]) -> Float[Array, " heads"]:
        heights = -np.log(np.asarray(slopes, np.float64))
        power = (heights - heights.min()) / (np.ptp(heights) or 1.0)
        return jnp.asarray(np.exp(-heights) * max(1.0, self.scale) ** -power, jnp.float32)
