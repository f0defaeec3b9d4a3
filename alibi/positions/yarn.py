"""YaRN: rotary embeddings of which only slow pairs are interpolated (Peng et al. 2023, arXiv 2309.00071)."""

import dataclasses
import math

import numpy as np

from alibi.positions.base import About
from alibi.positions.rotary import Rotary
from alibi.positions.rotary_interpolated import RotaryInterpolated


@dataclasses.dataclass(frozen=True)
class Yarn(RotaryInterpolated):
    """Fast pairs turn as in training, slow ones s times slower, those between by a ramp; logits are sharpened.

    Fast is a pair that turns more than `fast` times in a sequence of training, slow one that turns
    less than `slow` times. Queries and keys are multiplied by temperature * ln(s) + 1.

    Attributes:
      fast, slow: turns in a sequence of training (beta in the paper).
      temperature: 0 leaves queries and keys as they are.

    Raises:
      ValueError: a base of at most 1, turns that are not 0 < slow < fast, or a negative temperature; see also
        `RotaryInterpolated`.
    """

    about = About(
        formula="rotary, slow pairs at position / s, a ramp to the fast ones; queries, keys times 0.1 ln s + 1",
        source="Peng et al. 2023, [arXiv 2309.00071](https://arxiv.org/abs/2309.00071)",
        caveats="made for a few hundred updates at the new length",
    )

    fast: float = 32.0
    slow: float = 1.0
    temperature: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base > 1:
            raise ValueError(f"yarn needs a base above 1, such as 10000, and got base={self.base}")
        if not 0 < self.slow < self.fast < math.inf:
            raise ValueError(
                f"yarn needs 0 < slow < fast turns, such as 1 and 32, and got slow={self.slow}, fast={self.fast}"
            )
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"yarn needs a temperature of at least 0, such as 0.1, and got {self.temperature}")

    @property
    def assumes_train_length(self) -> bool:
        return not self.original_length  # turns are counted in sequences of it, whatever the factor

    @property
    def amplitude(self) -> float:
        return self.temperature * math.log(self.stretch) + 1.0

    def frequencies(self) -> np.ndarray:
        low = max(math.floor(self._pair_of(self.fast)), 0)
        high = min(math.ceil(self._pair_of(self.slow)), self.rotary_dim - 1)
        # As in the paper's code, where both ends may be one pair.
        ramp = np.clip((np.arange(self.rotary_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        of_training = Rotary.frequencies(self)
        return of_training / self.stretch * ramp + of_training * (1.0 - ramp)

    def _pair_of(self, turns: float) -> float:
        """The pair, no whole number, that turns so many times in a sequence of training."""
        wavelengths = math.log(self.known_length / (2 * math.pi * turns))
        return self.rotary_dim * wavelengths / (2 * math.log(self.base))
