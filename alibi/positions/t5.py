"""The T5 bias: one learned number for each head and bucket of distances (Raffel et al. 2020)."""

import dataclasses
import functools
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from alibi.positions.base import Params, PositionMethod, rows_and_columns


@functools.cache
def causal_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
    """The bucket of each distance 0..max_distance, int32 `[max_distance + 1]`; farther ones share the last.

    The first half of the buckets hold one distance each, the others grow
    geometrically. Computed in float64 on the host: in float32 the logarithm puts some
    distances at a bucket's edge on its wrong side.
    """
    exact = num_buckets // 2
    distance = np.arange(max_distance + 1)
    fraction = np.log(np.maximum(distance, exact) / exact) / np.log(max_distance / exact)
    far = np.minimum(num_buckets - 1, exact + np.floor(fraction * (num_buckets - exact)))
    return np.where(distance < exact, distance, far).astype(np.int32)


@flax.struct.dataclass
class T5Bias:
    """table[bucket(i - j), h] for any block of positions; keys after the query share bucket 0.

    Attributes:
      table: float32 `[buckets, heads]`.
      max_distance: tokens; from here on there is one bucket.
    """

    table: Float[Array, "buckets heads"]
    max_distance: int = flax.struct.field(pytree_node=False)

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*#batch heads q k"]:
        """The bias of one block, float32."""
        rows, columns = rows_and_columns(query_positions, key_positions)
        distance = jnp.clip(rows - columns, 0, self.max_distance)
        by_distance = self.table[causal_buckets(self.table.shape[0], self.max_distance)].astype(jnp.float32)
        return jnp.moveaxis(by_distance.T[:, distance], 0, -3)

    def of_heads(self, heads: Integer[Array, " some"]) -> "T5Bias":
        """The same bias for these heads alone."""
        return dataclasses.replace(self, table=self.table[:, heads])


@dataclasses.dataclass(frozen=True)
class T5(PositionMethod):
    """A learned bias by bucket of distance, shared by the layers.

    Attributes:
      num_buckets: rows of the table.
      max_distance: tokens; greater distances fall into the last bucket.
    """

    num_buckets: int = 32
    max_distance: int = 128
    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.num_buckets < 2 or self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"t5 needs num_buckets >= 2 and max_distance > num_buckets / 2; got num_buckets={self.num_buckets}, "
                f"max_distance={self.max_distance}"
            )

    def init(self, key: PRNGKeyArray) -> Params:
        return {"table": self.width**-0.5 * jax.random.normal(key, (self.num_buckets, self.num_heads))}

    def bias(self, params: Params) -> T5Bias:
        return T5Bias(params["table"], self.max_distance)
