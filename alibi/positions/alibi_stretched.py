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
    """Slopes times L / L' for sequences with L' tokens, more than the training length L.

    The farthest key then gets the bias that it had in training. Shorter sequences are as in `Alibi`.

    Config: `position=alibi_interpolated,position_options.slopes=closed_form`
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
    """Divides the flattest slope by a = max(1, L' / L), keeps the steepest, and divides the others by
    powers of a with exponents between 0 and 1.

    L' is the computed length, L the training length. The exponent is linear in the slope's logarithm:
    for slopes 2^(-8h/n) it is (h - 1) / (n - 1), as in the source, and all slopes keep their order. A
    single head is the steepest.

    Config: `position=alibi_ntk,position_options.slopes=closed_form`

    Raises:
      ValueError: a slope that is 0 or has no logarithm in float32.
    """

    about = About(
        formula="-m_h a^(-p_h) (i - j), a = max(1, L' / L), p_h = ln(m_max / m_h) / ln(m_max / m_min)",
        source="[keezen/ntk_alibi](https://github.com/keezen/ntk_alibi)",
        caveats="changes only the evaluation of a trained model; p_h is (h - 1) / (H - 1) for H a power of two",
    )

    takes_logarithms = True

    def sides(self, params: Params) -> list[PerHead]:
        flattened = []
        for slopes in super().sides(params):
            heights = -np.log(np.asarray(slopes, np.float64))
            power = (heights - heights.min()) / (np.ptp(heights) or 1.0)
            flattened.append(np.exp(-heights) * max(1.0, self.scale) ** -power)
        with jax.ensure_compile_time_eval():
            return [jnp.asarray(slopes, jnp.float32) for slopes in flattened]
