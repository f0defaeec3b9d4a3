"""Rotary embeddings with NTK-aware scaling of their base (bloc97 2023; jquesnelle/yarn)."""

import dataclasses

import numpy as np

from alibi.positions.rotary import Rotary


@dataclasses.dataclass(frozen=True)
class RotaryNtk(Rotary):
    """Rotary with base * s^(head_dim / (head_dim - 2)): the slowest pair turns s times slower, the fastest as before.

    Attributes:
      factor: s; None: how many times as long the sequences at hand are as those of training, at
        least 1 ("dynamic NTK"; in generation, by all tokens that there will be).

    Raises:
      ValueError: a head_dim of 2, or a factor below 1; see also `Rotary`.
    """

    factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim < 4:
            raise ValueError(
                f"rotary_ntk needs a head_dim of at least 4 and got {self.head_dim}; change num_heads or width"
            )
        if self.factor is not None and not self.factor >= 1:
            raise ValueError(
                f"rotary_ntk needs a factor of at least 1, or None for a dynamic one, and got {self.factor}"
            )

    def frequencies(self) -> np.ndarray:
        factor = max(1.0, self.scale) if self.factor is None else self.factor
        base = self.base * factor ** (self.head_dim / (self.head_dim - 2))
        half = self.head_dim // 2
        return base ** (-np.arange(half) / half)
