"""PoPE: polar coordinates, content as magnitude and position as angle (Gopalakrishnan et al. 2025,
arXiv 2509.10534).
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.config.fields import number
from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.rotary import by_position
from alibi.positions.shapes import (
    Keys,
    PerKey,
    PerQuery,
    Positions,
    Queries,
    TurnedKeys,
    TurnedQueries,
)


@dataclasses.dataclass(frozen=True)
class Pope(PositionMethod):
    """Feature c in a query or key becomes a point in the plane: its softplus is the radius, the
    token's position times base^(-c/head_dim) the angle.

    Keys add a learned angle delta for each head and feature. So a logit adds up products of content,
    each times a cosine that depends on positions alone, and queries and keys have 2 head_dim features
    in attention and in the cache. delta begins at 0, where the authors found the best extrapolation,
    and stays in [-2 pi, 0].

    Config: `position=pope,position_options.base=1000.0`

    Attributes:
      base: frequencies are base^(-c/head_dim).
    """

    about = About(
        formula="q . k becomes the sum over c of sp(q_c) sp(k_c) cos((j - i) 10000^(-c/head_dim) + delta_hc)",
        source="Gopalakrishnan et al. 2025, [arXiv 2509.10534](https://arxiv.org/abs/2509.10534)",
        caveats="sp is softplus, delta learned; products of queries and keys, and the cached keys, are twice as large; "
        "its authors report length extrapolation",
    )

    shift_invariant = True
    takes_shared_keys = False  # each query head has its own keys
    limits: ClassVar = {"delta": (-2 * math.pi, 0.0)}

    base: float = number(10_000.0, above=0)

    def init_layer(self, key: PRNGKeyArray) -> Params:
        return {"delta": jnp.zeros((self.num_heads, self.head_dim), jnp.float32)}

    def queries(
        self, params: Params, query: Queries, positions: Positions, kept: PerQuery
    ) -> TurnedQueries:
        # Attention divides by the square root of 2 head_dim.
        return self.polar(query, positions, 0.0, math.sqrt(2.0))

    def keys(self, params: Params, key: Keys, positions: Positions, kept: PerKey) -> TurnedKeys:
        delta = params["delta"].astype(jnp.float32)
        return self.polar(key, positions, delta.reshape((1,) * (key.ndim - 2) + delta.shape), 1.0)

    def polar(
        self,
        x: Float[Array, "*batch length heads head_dim"],
        positions: Positions,
        turned: Any,
        scale: float,
    ) -> Float[Array, "*batch length heads turned_dim"]:
        """Returns both coordinates for each feature in `x`, all first coordinates before all second
        ones, in the dtype of `x`.

        Args:
          turned: angles to add to the positions' angles, radians.
          scale: a factor.
        """
        rates = self.base ** (-np.arange(self.head_dim) / self.head_dim)
        angles = by_position(positions, rates, x.ndim) + turned
        magnitude = jax.nn.softplus(x.astype(jnp.float32)) * scale
        waves = (jnp.cos(angles), jnp.sin(angles))
        return jnp.concatenate([(magnitude * wave).astype(x.dtype) for wave in waves], axis=-1)
