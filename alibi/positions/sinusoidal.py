"""Sinusoidal position embeddings, as the paper's baseline computes them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from alibi.config.fields import number
from alibi.positions.base import MOST_TOKENS, About, Params, PositionMethod
from alibi.positions.shapes import Features, Positions


@dataclasses.dataclass(frozen=True)
class Sinusoidal(PositionMethod):
    """Sines, then cosines, concatenated and added to the token embeddings (Vaswani et al. 2017).

    Feature i in each half has the frequency max_period^(-i / (width/2 - 1)), as in the paper's code.
    An odd width has a last feature of zero.

    Config: `position=sinusoidal,position_options.max_period=1000.0`

    Attributes:
      first_position: the first token's position, 2 in the paper's code.
      max_period: the slowest wave's length in tokens, over 2 pi.
    """

    about = About(
        formula="embedding of position p: sin and cos of p * 10000^(-k / (width/2 - 1))",
        source="Vaswani et al. 2017, [arXiv 1706.03762](https://arxiv.org/abs/1706.03762)",
        caveats="perplexity rises a few dozen tokens beyond the training length (paper, table 2)",
    )

    first_position: int = number(2, at_least=-MOST_TOKENS, at_most=MOST_TOKENS)
    max_period: float = number(10_000.0, above=0)

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
