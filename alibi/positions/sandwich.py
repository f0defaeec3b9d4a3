"""Sandwich: the bias that sinusoidal embeddings would leave in the logits (Chi et al. 2023, ACL, arXiv 2212.10356)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import Bias, KnownPositions, per_head, static
from alibi.positions.distance import DistanceBias

MOST_FEATURES = 2**13  # each two of them are a cosine, in each step's program too


@functools.cache
def cosines(features: int, distances: int) -> Float[np.ndarray, " distances"]:
    """The sum over k of cos(d / 10000^(2k / features)) - 1 at distances 0, 1, ..., float64."""
    frequencies = 10_000.0 ** (-2 * np.arange(features // 2) / features)
    # One frequency at a time, for memory of one number a distance.
    return sum((np.cos(np.arange(distances) * frequency) - 1.0 for frequency in frequencies), np.zeros(distances))


class SandwichBias(DistanceBias):
    """(1 / c_h) sum over k of (cos(d / 10000^(2k / features)) - 1) of a key at distance d.

    Attributes:
      compression: c of each head.
      features: twice the number of cosines.
      longest: the largest distance of the call, if it is known when the call is traced, else 0.
      symmetric: the distance is counted on both sides.
    """

    bounded = True
    compression: Float[Array, " heads"] = per_head()
    features: int = static()
    longest: int = static(default=0)
    symmetric: bool = static(default=False)

    def at(self, distance: Integer[Array | np.ndarray, "*shape"]) -> Float[Array, "heads ..."]:
        if isinstance(distance, np.ndarray):
            # In float64: at 65,536 tokens float32 is off by thousandths of a radian.
            return self._compressed(jnp.asarray(cosines(self.features, int(distance.max()) + 1)[distance], jnp.float32))
        frequencies = 10_000.0 ** (-2 * np.arange(self.features // 2) / self.features)
        angles = [distance.astype(jnp.float32) * np.float32(frequency) for frequency in frequencies]
        return self._compressed(functools.reduce(jnp.add, [jnp.cos(angle) - 1.0 for angle in angles]))

    def envelope(self, distance: Integer[Array, "*shape"]) -> Float[Array, "heads ..."]:
        # The sum rises in places: what counts is the largest of all that lies beyond. Of distances that the call may
        # not have nothing is known but that no cosine exceeds 1.
        beyond = np.maximum.accumulate(cosines(self.features, self.longest + 1)[::-1])[::-1]
        largest = jnp.asarray(beyond, jnp.float32)[jnp.minimum(distance, self.longest)]
        return self._compressed(jnp.where(distance <= self.longest, largest, 0.0))

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        bias, sides = self, (query_positions, key_positions)
        if all(isinstance(side, np.ndarray) for side in sides):
            longest = int(max(side.max() for side in sides) - min(side.min() for side in sides))
            bias = self.replace(longest=longest)
        return DistanceBias.tabulated(bias, *sides)

    def _compressed(self, sums: Float[Array, "*shape"]) -> Float[Array, "heads ..."]:
        return sums[None] / self.compression.reshape(-1, *(1,) * sums.ndim)


@dataclasses.dataclass(frozen=True)
class Sandwich(PositionMethod):
    """Nothing is learned: the products of two tokens' sinusoidal embeddings, divided by c_h = 8 h / num_heads.

    Attributes:
      features: of the embeddings, sines and cosines; the paper's D.

    Raises:
      ValueError: features that are not even, below 2 or above 8,192.
    """

    about = About(
        formula="(1 / c_h) sum over k of (cos((i - j) / 10000^(2k/128)) - 1), c_h = 8h/H",
        source="Chi et al. 2023, [arXiv 2212.10356](https://arxiv.org/abs/2212.10356)",
        caveats="made to have ALiBi's receptive field without its slopes",
    )

    shift_invariant = True

    features: int = 128

    def __post_init__(self) -> None:
        if not 2 <= self.features <= MOST_FEATURES or self.features % 2:
            raise ValueError(
                f"sandwich needs an even number of features from 2 to {MOST_FEATURES:,}, such as 128, and got "
                f"{self.features}"
            )

    def bias(self, params: Params) -> SandwichBias:
        del params
        with jax.ensure_compile_time_eval():
            compression = 8.0 / self.num_heads * jnp.arange(1, self.num_heads + 1, dtype=jnp.float32)
        return SandwichBias(compression, self.features, symmetric=not self.causal)
