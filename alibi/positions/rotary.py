"""Rotary position embeddings (RoFormer, arXiv 2104.09864)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from alibi.positions.base import Params, PositionMethod, Positions


@dataclasses.dataclass(frozen=True)
class Rotary(PositionMethod):
    """Turns pairs of query and key features by angles that grow with position.

    Pair k is features k and k + head_dim/2, turned by position * base^(-2k/head_dim);
    angles, sines and cosines are float32. (RoFormer pairs neighbouring features: the
    same method, with the features of a head in another order.)

    Attributes:
      base: of the geometric series of frequencies.

    Raises:
      ValueError: an odd head_dim, or a base that is not above 0.
    """

    shift_invariant = True

    base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ValueError(f"rotary needs an even head_dim and got {self.head_dim}; change num_heads or width")
        if not self.base > 0:
            raise ValueError(f"rotary needs a base above 0, such as 10000, and got base={self.base}")

    def queries(
        self, params: Params, query: Float[Array, "*batch q heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch q heads head_dim"]:
        del params
        return self.turn(query, positions)

    def keys(
        self, params: Params, key: Float[Array, "*batch k heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch k heads head_dim"]:
        del params
        return self.turn(key, positions)

    def frequencies(self) -> np.ndarray:
        """The angle of each pair of features, in radians a token, float64 `[head_dim / 2]`."""
        half = self.head_dim // 2
        return self.base ** (-np.arange(half) / half)

    def turn(
        self, x: Float[Array, "*batch length heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch length heads head_dim"]:
        """Features turned by the angles of their positions, of the dtype that they had."""
        half, frequencies = self.head_dim // 2, self.frequencies().astype(np.float32)
        angles = jnp.expand_dims(positions.astype(jnp.float32), (-1, -2))
        angles = angles * frequencies.reshape((1,) * (angles.ndim - 1) + (-1,))
        angles = angles.reshape((1,) * (x.ndim - angles.ndim) + angles.shape)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)
