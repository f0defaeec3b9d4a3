"""Rotary embeddings with interpolated positions (Chen et al. 2023, arXiv 2306.15595)."""

import dataclasses
import math

import numpy as np

from alibi.positions.base import MOST_TOKENS, About
from alibi.positions.rotary import Rotary


@dataclasses.dataclass(frozen=True)
class RotaryInterpolated(Rotary):
    """Rotary at position / s, so that sequences s times as long have the angles of training.

    Attributes:
      factor: s; None: how many times as long the sequences at hand are as those of training, at
        least 1 (dynamic; in generation, by all tokens that there will be).
      original_length: tokens of the sequences that the frequencies are known from, where the run started from another
        one's checkpoint, or is one of randomised positions that is tested; 0: those of this run's training. A dynamic
        factor is counted from it, and YaRN's turns; beside a given factor the other methods don't read it.

    Raises:
      ValueError: a factor below 1, or a length that is negative or above 2^24; see also `Rotary`.
    """

    about = About(
        formula="rotary at position / s, s = max(1, L' / L) or given",
        source="Chen et al. 2023, [arXiv 2306.15595](https://arxiv.org/abs/2306.15595)",
        caveats="needs some training at the new length, 1,000 updates in its paper",
    )

    factor: float | None = None
    original_length: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor is not None and not 1 <= self.factor < math.inf:
            raise ValueError(
                "stretched rotary embeddings need a finite factor of at least 1, or None for a dynamic one, and got "
                f"{self.factor!r}"
            )
        if not 0 <= self.original_length <= MOST_TOKENS:
            raise ValueError(
                f"stretched rotary embeddings need an original_length from 1 to {MOST_TOKENS:,} tokens, or 0 for the "
                f"training length, and got {self.original_length}"
            )

    @property
    def known_length(self) -> int:
        """Tokens of the sequences that the frequencies are known from."""
        return self.original_length or self.train_length

    @property
    def assumes_train_length(self) -> bool:
        return not self.original_length and self.factor is None

    @property
    def stretch(self) -> float:
        """s, the given or the dynamic one."""
        if self.factor is not None:
            return self.factor
        return max(1.0, (self.length or self.train_length) / self.known_length)

    def frequencies(self) -> np.ndarray:
        return super().frequencies() / self.stretch
