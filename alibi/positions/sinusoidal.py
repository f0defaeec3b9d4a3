"""Sinusoidal position embeddings, as the paper's baseline computes them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from alibi.positions.base import MOST_TOKENS, About, Params, PositionMethod
from alibi.positions.shapes import Features, Positions


@dataclasses.dataclass(frozen=True)
class Sinusoidal(PositionMethod):
    """Sines, then cosines, concatenated and added to the token embeddings (Vaswani et al. 2017).

    Feature i of each half has frequency max_period^(-i / (width/2 - 1)), as in the
    paper's code. An odd width has a last feature of zero.

    Attributes:
      first_position: position of the first token; 2 in the paper's code.
      max_period: tokens, over 2 pi, of the slowest wave.

    Raises:
      ValueError: a first_position of more than 2^24 tokens before or after 0, or a max_period that
        is not above 0.
    """

    about = About(
        formula="embedding of position p: sin and cos of p * 10000^(-k / (width/2 - 1))",
        source="Vaswani et al. 2017, [arXiv 1706.03762](https://arxiv.org/abs/1706.03762)",
        caveats="perplexity rises a few dozen tokens beyond the training length (paper, table 2)",
    )

    first_position: int = 2
    max_period: float = 10_000.0

    def __post_init__(self) -> None:
        if abs(self.first_position) > MOST_TOKENS:
            raise ValueError(
                f"sinusoidal needs a first_position from {-MOST_TOKENS:,} to {MOST_TOKENS:,}, such as 2, and got "
                f"{self.first_position}"
            )
        if not self.max_period > 0:
            raise ValueError(
                f"sinusoidal needs a max_period above 0, such as 10000, and got {self.max_period}"
            )

    def embed(self, params: Params, x: Features, positions: Positions) -> Features:
        half = self.width // 2
        frequencies = np.exp(-np.log(self.max_period) * np.arange(half) / max(half - 1, 1)).astype(
            np.float32
        )
        angles = jnp.expand_dims((positions + self.first_position).astype(jnp.float32), -1)
        angles = angles * frequencies.reshape((1,) * positions.ndim + (-1,))
        features = [jnp.sin(angles), jnp.cos(angles)]
        if self.width % 2:
            features.append(jnp.zeros_like(angles[..., :1]))
        embedding = jnp.concatenate(features, axis=-1)
        embedding = embedding.reshape((1,) * (x.ndim - embedding.ndim) + embedding.shape)
        return x + embedding.astype(x.dtype)
