"""The T5 bias: a learned number for each head and bucket of distances (Raffel et al. 2020)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.positions.base import MOST_DISTANCE, About, Params, PositionMethod
from alibi.positions.bias import per_head, static
from alibi.positions.distance import DistanceBias
from alibi.positions.shapes import AtDistances, Distances


@functools.cache
def causal_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
    """Returns the bucket for each distance 0..max_distance, int32 `[max_distance + 1]`. Farther ones
    share the last.

    Half the buckets hold one distance each, the others grow geometrically. Computed in float64 on the
    host, since a float32 logarithm puts some distances at a bucket's edge on the wrong side.
    """
    exact = num_buckets // 2
    distance = np.arange(max_distance + 1)
    fraction = np.log(np.maximum(distance, exact) / exact) / np.log(max_distance / exact)
    far = np.minimum(num_buckets - 1, exact + np.floor(fraction * (num_buckets - exact)))
    return np.where(distance < exact, distance, far).astype(np.int32)


class T5Bias(DistanceBias):
    """table[bucket(i - j), h].

    Attributes:
      table: learned, float32.
      max_distance: in tokens. Farther keys share a bucket.
      signed: half the buckets are for keys up to the query, half for keys after it. Otherwise keys
        after the query share bucket 0.
    """

    table: Float[Array, "buckets heads"] = per_head(axis=1)
    max_distance: int = static()
    signed: bool = static(default=False)

    @property
    def level_from(self) -> int | None:
        return self.max_distance if type(self).at is T5Bias.at else None  # a subclass may add to it

    def at(self, distance: Distances) -> AtDistances:
        of_side = self.table.shape[0] // (2 if self.signed else 1)
        buckets = jnp.asarray(causal_buckets(of_side, self.max_distance))
        bucket = buckets[jnp.minimum(jnp.abs(distance), self.max_distance)] + jnp.where(
            distance < 0, of_side, 0
        )
        return self.table.T.astype(jnp.float32)[:, bucket]


@dataclasses.dataclass(frozen=True)
class T5(PositionMethod):
    """A learned bias for each bucket of distances, which all layers share.

    Config: `position=t5,position_options.num_buckets=64,position_options.max_distance=128`

    Attributes:
      num_buckets: rows in the table, half of them for each side if attention is not causal.
      max_distance: in tokens. Greater distances fall into the last bucket. 0 means a quarter of the
        training length, as in the source (128 for 512), but at least the buckets on a side, so that
        training reaches the last bucket at short lengths too.

    Raises:
      ValueError: fewer than two buckets on a side, or a `max_distance` within the buckets that hold
        one distance each.
    """

    about = About(
        formula="table[bucket(i - j), h]: buckets of one distance each, then geometric ones up to a largest distance, "
        "L / 4 by default",
        source="Raffel et al. 2020, [arXiv 1910.10683](https://arxiv.org/abs/1910.10683)",
        caveats="beyond its largest distance all keys are alike; KERPLE's table 3 has it rise beyond 4 L",
    )

    shift_invariant = True

    follow_length = (("max_distance", "farthest"),)

    num_buckets: int = 32
    max_distance: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = 1 if self.causal else 2
        of_side, rest = divmod(self.num_buckets, sides)
        if of_side < 2 or rest or not of_side // 2 < self.farthest <= MOST_DISTANCE:
            raise ValueError(
                f"t5 with causal={self.causal} needs {'num_buckets' if sides == 1 else 'an even num_buckets'} >= "
                f"{2 * sides} and max_distance > num_buckets / {2 * sides}, of at most {MOST_DISTANCE:,} tokens, or "
                f"max_distance=0 for a quarter of the training length; got num_buckets={self.num_buckets}, "
                f"max_distance={self.max_distance}, train_length={self.train_length}"
            )

    @property
    def farthest(self) -> int:
        """`max_distance` or its default, in tokens."""
        of_side = self.num_buckets // (1 if self.causal else 2)
        return self.max_distance or max(self.train_length // 4, of_side)

    def init(self, key: PRNGKeyArray) -> Params:
        return {
            "table": self.width**-0.5
            * jax.random.normal(key, (self.num_buckets, self.num_heads), jnp.float32)
        }

    def bias(self, params: Params) -> T5Bias:
        return T5Bias(params["table"], self.farthest, signed=not self.causal)
