"""Rotary position embeddings (RoFormer, arXiv 2104.09864), for whole heads or a share of them."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from alibi.config.fields import choice, number
from alibi.numerics.kernels import in_own_kernel
from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.shapes import Keys, PerKey, PerQuery, Positions, Queries

MOST_IN_TABLE = 2**18  # numbers, 1 MiB: larger tables make large programs


@dataclasses.dataclass(frozen=True)
class Rotary(PositionMethod):
    """Turns pairs of query and key features by angles that grow with position.

    Pair k is features k and k + head_dim/2, and its angle is position * base^(-2k/head_dim). Angles, sines
    and cosines are float32. (RoFormer pairs neighbouring features: the same method with the features in
    another order.)

    Config: `position=rotary,position_options.base=500000.0,position_options.share=0.25`

    Attributes:
      base: frequencies are base^(-2k/head_dim).
      share: how much of the head is turned. The rest knows no position.
      share_of: "features" turns the first features in a head, as a smaller head (GPT-NeoX).
        "frequencies" turns the pairs with the highest frequencies (p-RoPE, arXiv 2410.06205).

    Raises:
      ValueError: an odd head_dim, or a share without whole pairs.
    """

    about = About(
        formula="pair k of queries and keys turned by position * 10000^(-2k/head_dim)",
        source="Su et al. 2021, [arXiv 2104.09864](https://arxiv.org/abs/2104.09864); p-RoPE: [arXiv 2410.06205](https://arxiv.org/abs/2410.06205)",
        caveats="beyond the training length queries and keys meet new angles, and perplexity rises",
    )

    shift_invariant = True
    base: float = number(10_000.0, above=0)
    share: float = number(1.0, above=0, at_most=1)
    share_of: str = choice("features", ("features", "frequencies"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2:
            raise ValueError(
                f"rotary needs an even head_dim and got {self.head_dim}; change num_heads or width"
            )
        pairs = self.share * self.head_dim / 2
        if abs(pairs - round(pairs)) > 1e-6 or not round(pairs):
            raise ValueError(
                f"rotary needs a share that makes whole pairs of features, such as "
                f"{max(self.head_dim // 4, 1) * 2 / self.head_dim:.6g} of head_dim={self.head_dim}, and got "
                f"share={self.share}"
            )

    @property
    def rotary_dim(self) -> int:
        """Features in a head that have frequencies."""
        return round(self.share * self.head_dim) if self.share_of == "features" else self.head_dim

    @property
    def turned(self) -> np.ndarray:
        """Which pairs of features are turned, `[rotary_dim / 2]`."""
        return np.arange(self.rotary_dim // 2) < round(self.share * self.head_dim / 2)

    def frequencies(self) -> np.ndarray:
        """Returns the angle for each pair, turned or not, radians per token, float64 `[rotary_dim /
        2]`.
        """
        half = self.rotary_dim // 2
        return self.base ** (-np.arange(half) / half)

    def queries(
        self, params: Params, query: Queries, positions: Positions, kept: PerQuery
    ) -> Queries:
        return self.turn(query, positions)

    def keys(self, params: Params, key: Keys, positions: Positions, kept: PerKey) -> Keys:
        return self.turn(key, positions)

    def turn(
        self,
        x: Float[Array, "*batch length heads head_dim"],
        positions: Positions,
        amplitude: Any = 1.0,
    ) -> Float[Array, "*batch length heads head_dim"]:
        """Turns features as their positions say and multiplies them, in their own dtype.

        Args:
          amplitude: a factor, or one for each position and pair, `[*batch, length, 1, rotary_dim / 2]`.
        """
        angles = by_position(positions, np.where(self.turned, self.frequencies(), 0.0), x.ndim)
        if isinstance(angles, np.ndarray):
            cos, sin = (
                _same((wave(angles) * amplitude).tobytes(), angles.shape)
                for wave in (np.cos, np.sin)
            )
        else:
            waves = in_own_kernel(_waves, angles) if positions.shape[-1] > 1 else _waves(angles)
            cos, sin = (wave * amplitude for wave in waves)
        return rotated(x, cos, sin)


def rotated(
    x: Float[Array, "*batch length heads head_dim"], cos: Any, sin: Any
) -> Float[Array, "*batch length heads head_dim"]:
    """Turns pair k, features k and k + pairs, as the waves say, in the dtype of `x`. Features beyond the pairs stay.

    Args:
      cos, sin: `[..., length, heads or 1, pairs]`, float32.
    """
    half = cos.shape[-1]
    first, second = (
        half_head.astype(jnp.float32) for half_head in (x[..., :half], x[..., half : 2 * half])
    )
    pairs = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(
        [*(turned.astype(x.dtype) for turned in pairs), x[..., 2 * half :]], axis=-1
    )


def by_position(
    positions: Positions, rates: np.ndarray, ndim: int
) -> Float[Array | np.ndarray, "... length 1 pairs"]:
    """Returns position times rate for each pair, float32, with `ndim` dimensions.

    Small products of NumPy positions stay NumPy arrays, so that their sines and powers are constants
    in the program. XLA's CPU backend would compute them again for each head.
    """
    if positions.size * rates.size > MOST_IN_TABLE:
        positions = jnp.asarray(positions)
    of_positions = positions.astype(np.float32)[..., None, None]
    product = of_positions * rates.astype(np.float32).reshape(
        (1,) * (of_positions.ndim - 1) + (-1,)
    )
    return product.reshape((1,) * (ndim - product.ndim) + product.shape)


def _waves(angles: Float[Array, "*shape"]) -> Float[Array, "two ..."]:
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


@functools.lru_cache(maxsize=8)
def _same(content: bytes, shape: tuple[int, ...]) -> Float[np.ndarray, "*shape"]:
    """Returns the same array for equal contents, so that the layers in a program share a constant."""
    return np.frombuffer(content, np.float32).reshape(shape)
