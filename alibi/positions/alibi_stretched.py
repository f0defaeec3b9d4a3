"""ALiBi with flatter slopes for sequences longer than in training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from alibi.positions.alibi import Alibi
from alibi.positions.base import About, Params
from alibi.positions.shapes import PerHead


@dataclasses.dataclass(frozen=True)
class AlibiInterpolated(Alibi):
    """Slopes times L / L' for sequences of L' tokens, more than the L of training.

    The farthest key then gets the bias that it had in training; shorter sequences are as with
    `Alibi`.
    """

    about = About(
        formula="-m_h min(1, L / L') (i - j) in sequences of L' tokens",
        source="Al-Khateeb et al. 2023, [arXiv 2310.13017](https://arxiv.org/abs/2310.13017)",
        caveats="changes only the evaluation of a trained model",
    )

    def sides(self, params: Params) -> list[PerHead]:
        with jax.ensure_compile_time_eval():  # concrete under jit too, as `alibi_slopes`
            return [slopes / max(1.0, self.scale) for slopes in super().sides(params)]


@dataclasses.dataclass(frozen=True)
class AlibiNtk(Alibi):
    """The flattest slope divided by a = L' / L, the steepest unchanged, the others divided by
    powers of a below 1.

    L' is the length of the computed sequences, L that of training; a is at least 1. The power is
    linear in the logarithm of the slope, so for 2^(-8h/n) head h is divided by a^((h - 1) / (n -
    1)), as in the source, and any other slopes keep their order. A single head is the steepest and
    stays unchanged.

    Raises:
      ValueError: a slope of 0, or too small for its logarithm in float32.
    """

    about = About(
        formula="-m_h a^(-p_h) (i - j), a = max(1, L' / L), p_h = ln(m_max / m_h) / ln(m_max / m_min)",
        source="[keezen/ntk_alibi](https://github.com/keezen/ntk_alibi)",
        caveats="changes only the evaluation of a trained model; p_h is (h - 1) / (H - 1) for H a power of two",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_logarithms()

    def sides(self, params: Params) -> list[PerHead]:
        flattened = []
        for slopes in super().sides(params):
            heights = -np.log(np.asarray(slopes, np.float64))
            power = (heights - heights.min()) / (np.ptp(heights) or 1.0)
            flattened.append(np.exp(-heights) * max(1.0, self.scale) ** -power)
        with jax.ensure_compile_time_eval():
            return [jnp.asarray(slopes, jnp.float32) for slopes in flattened]
