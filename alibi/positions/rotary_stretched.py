"""Rotary embeddings stretched for sequences longer than in training: interpolation, NTK and YaRN."""

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Float

from alibi.config.fields import choice, number
from alibi.positions.base import MOST_TOKENS, About, PositionMethod
from alibi.positions.rotary import Rotary
from alibi.positions.shapes import Positions


@dataclasses.dataclass(frozen=True)
class RotaryInterpolated(Rotary):
    """Rotary at position / s, so that sequences s times as long have the angles of training.

    Config: `position=rotary_interpolated,position_options.factor=4.0`

    Attributes:
      factor: s. Defaults to None, a dynamic s: the computed length (in generation the final length)
        divided by `original_length`, at least 1.
      original_length: tokens in the sequences from which the model learned its rotations, if the run
        started from another run's checkpoint. 0 means this run's training length. Dynamic factors and
        YaRN's turns depend on it.
    """

    about = About(
        formula="rotary at position / s, s = max(1, L' / L) or given",
        source="Chen et al. 2023, [arXiv 2306.15595](https://arxiv.org/abs/2306.15595)",
        caveats="needs some training at the new length, 1,000 updates in its paper",
    )

    # frequencies depend on the learned length whatever the factor
    counts_turns: ClassVar[bool] = False

    factor: float | None = number(None, at_least=1)
    original_length: int = number(0, at_least=0, at_most=MOST_TOKENS)

    @property
    def learned_length(self) -> int:
        """Tokens in the sequences from which the model learned its rotations."""
        return self.original_length or self.train_length

    @property
    def stretch(self) -> float:
        """s, fixed or dynamic."""
        length = self.length or self.train_length
        return max(1.0, length / self.learned_length) if self.factor is None else self.factor

    def frequencies(self) -> np.ndarray:
        return super().frequencies() / self.stretch

    def check_meaning(self, trained: PositionMethod, of: str, option: str) -> None:
        """Raises ValueError if positions would be stretched from another length than was learned."""
        super().check_meaning(trained, of, option)
        if self.original_length or not isinstance(trained, Rotary):
            return
        learned = getattr(trained, "original_length", 0) or trained.train_length
        if learned != self.train_length and (self.factor is None or self.counts_turns):
            raise ValueError(
                f"{of} knows positions from sequences of {learned:,} tokens, and this position method would take "
                f"{self.train_length:,} for that; set {option}original_length={learned}"
            )


@dataclasses.dataclass(frozen=True)
class RotaryNtk(RotaryInterpolated):
    """Rotary with base * s^(head_dim / (head_dim - 2)): the slowest pair turns s times slower, the
    fastest as before. With `share_of=frequencies` the slowest pairs don't turn, and the slowest
    turning pair is slowed less.

    With a dynamic s this is "dynamic NTK". If a share is turned, head_dim counts its features.

    Config: `position=rotary_ntk,position_options.factor=4.0`

    Raises:
      ValueError: as `Rotary`, and for a head_dim of 2.
    """

    about = About(
        formula="rotary with base * s^(head_dim / (head_dim - 2))",
        source="bloc97 2023, [jquesnelle/yarn](https://github.com/jquesnelle/yarn)",
        caveats="reported to work without training up to a few times the training length",
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


@dataclasses.dataclass(frozen=True)
class Yarn(RotaryInterpolated):
    """Fast pairs turn as in training, slow pairs s times slower, a ramp lies between, and logits are
    sharpened.

    Fast pairs turn more than `fast` times in a training sequence, slow pairs less than `slow` times.
    Queries and keys are multiplied by temperature * ln(s) + 1. If a head turns a share of its features,
    only the turned ones are multiplied, or all with `share_of=frequencies`.

    Config: `position=yarn,position_options.factor=4.0,position_options.fast=32.0`

    Attributes:
      fast, slow: turns in a training sequence (beta in the paper). fast=0 means 32 turns in 4,096
        tokens, as the paper chose for Llama 2, and as many per token at other lengths: pairs with
        wavelengths up to 128 tokens are fast. It is at least twice `slow`.
      temperature: how much logits are sharpened. 0 means not at all.
      ramp: linear in "pairs", as in the paper, or in a pair's "turns" in a training sequence, as in
        Llama 3.1 (fast=4, slow=1, temperature=0, factor=8, original_length=8192; arXiv 2407.21783).

    Raises:
      ValueError: as `Rotary`, and for slow >= fast.
    """

    about = About(
        formula="rotary, slow pairs at position / s, a ramp to the fast ones; queries, keys times 0.1 ln s + 1",
        source="Peng et al. 2023, [arXiv 2309.00071](https://arxiv.org/abs/2309.00071)",
        caveats="designed for a few hundred updates at the new length",
    )

    counts_turns = True

    base: float = number(10_000.0, above=1)
    fast: float = number(0.0, at_least=0)
    slow: float = number(1.0, above=0)
    temperature: float = number(0.1, at_least=0)
    ramp: str = choice("pairs", ("pairs", "turns"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.slow < self.fast_turns:
            raise ValueError(
                "yarn needs slow < fast turns, such as 1 and 32, or fast=0 for the training length, and got "
                f"slow={self.slow}, fast={self.fast}"
            )

    @property
    def fast_turns(self) -> float:
        """`fast`, or its default for the learned length."""
        return self.fast or max(2 * self.slow, 32 * self.learned_length / 4096)

    def turn(
        self,
        x: Float[Array, "*batch length heads head_dim"],
        positions: Positions,
        amplitude: Any = 1.0,
    ) -> Float[Array, "*batch length heads head_dim"]:
        amplitude = amplitude * (self.temperature * math.log(self.stretch) + 1.0)
        return super().turn(x, positions, amplitude)

    def frequencies(self) -> np.ndarray:
        of_training = Rotary.frequencies(self)
        slowed = self._ramp(of_training)
        return of_training / self.stretch * slowed + of_training * (1.0 - slowed)

    def _ramp(self, of_training: np.ndarray) -> np.ndarray:
        """Returns how much of each pair's frequency is divided by s, from 0 to 1, `[rotary_dim / 2]`."""
        if self.ramp == "turns":
            turns = self.learned_length * of_training / (2 * math.pi)
            return np.clip((self.fast_turns - turns) / (self.fast_turns - self.slow), 0.0, 1.0)

        # the pair, a fraction, that turns so many times in a training sequence
        def pair(turns: float) -> float:
            wavelengths = math.log(self.learned_length / (2 * math.pi * turns))
            return self.rotary_dim * wavelengths / (2 * math.log(self.base))

        low = max(math.floor(pair(self.fast_turns)), 0)
        high = min(math.ceil(pair(self.slow)), self.rotary_dim - 1)
        # As in the paper's code, where both ends may be the same pair.
        return np.clip((np.arange(self.rotary_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
