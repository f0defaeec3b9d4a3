"""Rotary embeddings with NTK-aware scaling of their base (bloc97 2023; jquesnelle/yarn)."""

import dataclasses

import numpy as np

from alibi.positions.base import About
from alibi.positions.rotary_interpolated import RotaryInterpolated


@dataclasses.dataclass(frozen=True)
class RotaryNtk(RotaryInterpolated):
    """Rotary with base * s^(head_dim / (head_dim - 2)): the slowest pair turns s times slower, the fastest as before.

    With a dynamic s this is "dynamic NTK". Of a partial embedding head_dim is the part.

    Raises:
      ValueError: a head_dim of 2; see also `RotaryInterpolated`.
    """

    about = About(
        formula="rotary with base * s^(head_dim / (head_dim - 2))",
        source="bloc97 2023, [jquesnelle/yarn](https://github.com/jquesnelle/yarn)",
        caveats="said to work untrained up to a few times the training length",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary_dim < 4:
            raise ValueError(
                f"rotary_ntk needs a head_dim of at least 4 and got {self.rotary_dim}; change num_heads, width or share"
            )

    def frequencies(self) -> np.ndarray:
        base = self.base * self.stretch ** (self.rotary_dim / (self.rotary_dim - 2))
        half = self.rotary_dim // 2
        return base ** (-np.arange(half) / half)
