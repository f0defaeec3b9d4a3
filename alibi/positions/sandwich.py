"""Sandwich: the bias that sinusoidal embeddings leave in the logits (Chi et al. 2023, ACL, arXiv
2212.10356).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from alibi.config.fields import number
from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import Bias, per_head, static
from alibi.positions.distance import DistanceBias
from alibi.positions.shapes import AtDistances, Distances, KnownPositions, PerHead

MOST_FEATURES = 2**13  # each pair of them is a cosine in the program of a step


@functools.cache
def cosines(features: int, distances: int) -> Float[np.ndarray, " distances"]:
    """Returns the sum over k of cos(d / 10000^(2k / features)) - 1 at distances 0, 1, ..., float64."""
    frequencies = 10_000.0 ** (-2 * np.arange(features // 2) / features)
    # One frequency at a time: memory for a single number per distance.
    return sum(
        (np.cos(np.arange(distances) * frequency) - 1.0 for frequency in frequencies),
        np.zeros(distances),
    )


class SandwichBias(DistanceBias):
    """(1 / c_h) sum over k of (cos(d / 10000^(2k / features)) - 1) for a key at distance d.

    Attributes:
      compression: each head's c.
      features: twice as many as cosines.
      longest: the largest distance in the call if known when the call is traced, else 0.
      symmetric: the distance counts on both sides.
    """

    bounded = True
    compression: PerHead = per_head()
    features: int = static()
    longest: int = static(default=0)
    symmetric: bool = static(default=False)

    def at(self, distance: Distances) -> AtDistances:
        if isinstance(distance, np.ndarray):
            # In float64: at 65,536 tokens float32 is off by thousandths of a radian.
            return self._compressed(
                jnp.asarray(cosines(self.features, int(distance.max()) + 1)[distance], jnp.float32)
            )
        frequencies = 10_000.0 ** (-2 * np.arange(self.features // 2) / self.features)
        angles = [distance.astype(jnp.float32) * np.float32(frequency) for frequency in frequencies]
        return self._compressed(
            functools.reduce(jnp.add, [jnp.cos(angle) - 1.0 for angle in angles])
        )

    def envelope(self, distance: Integer[Array, "*shape"]) -> AtDistances:
        # The sum rises in places, so the bound is its largest value at any farther key. Beyond the
        # call's distances the bound is 0, since no cosine exceeds 1.
        beyond = np.maximum.accumulate(cosines(self.features, self.longest + 1)[::-1])[::-1]
        largest = jnp.asarray(beyond, jnp.float32)[jnp.minimum(distance, self.longest)]
        return self._compressed(jnp.where(distance <= self.longest, largest, 0.0))

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        bias, sides = self, (query_positions, key_positions)
        if all(isinstance(side, np.ndarray) for side in sides):
            longest = int(max(side.max() for side in sides) - min(side.min() for side in sides))
            bias = self.replace(longest=longest)
        return DistanceBias.tabulated(bias, *sides)

    def _compressed(self, sums: Float[Array, "*shape"]) -> AtDistances:
        return sums[None] / self.compression.reshape(-1, *(1,) * sums.ndim)


@dataclasses.dataclass(frozen=True)
class Sandwich(PositionMethod):
    """The product of two tokens' sinusoidal embeddings, divided by c_h = 8 h / num_heads. Nothing is
    learned.

    Config: `position=sandwich,position_options.features=64`

    Attributes:
      features: sines and cosines in an embedding, the paper's D.

    Raises:
      ValueError: an odd number of features.
    """

    about = About(
        formula="(1 / c_h) sum over k of (cos((i - j) / 10000^(2k/128)) - 1), c_h = 8h/H",
        source="Chi et al. 2023, [arXiv 2212.10356](https://arxiv.org/abs/2212.10356)",
        caveats="designed for ALiBi's receptive field; c_h is a slope of each head",
    )

    shift_invariant = True

    features: int = number(128, at_least=2, at_most=MOST_FEATURES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features % 2:
            raise ValueError(
                f"sandwich needs an even number of features, such as 128, and got {self.features}"
            )

    def bias(self, params: Params) -> SandwichBias:
        with jax.ensure_compile_time_eval():
            compression = (
                8.0 / self.num_heads * jnp.arange(1, self.num_heads + 1, dtype=jnp.float32)
            )
        return SandwichBias(compression, self.features, symmetric=not self.causal)
