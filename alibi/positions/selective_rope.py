"""Selective RoPE: rotary embeddings with angles that tokens choose (Movahedi et al. 2025, arXiv
2511.17388).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

from alibi.config.fields import number
from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.rotary import rotated
from alibi.positions.shapes import Keys, PerKey, PerQuery, Positions, Queries


@dataclasses.dataclass(frozen=True)
class SelectiveRope(PositionMethod):
    """Turns each pair of query and key features by an angle that is a running sum over tokens.

    Each token adds temperature_p times a causal convolution, over `taps` tokens, of U V x, a projection
    of the layer's input with `rank` rows in V. x is first divided by its norm in each head, which has
    its share of the features. temperature_p is base^(-2p/head_dim), and pairs lie as in rotary. This
    is the default in the authors' code. Its options are left out: a sigmoid gate on the angles, a bias, a
    full rank, weight norm in each head and SiLU after the convolution. Their language models have the
    gate and the last three.

    In float32 a sum of n radians is off by about n * 6e-8.

    Config: `position=selective_rope,position_options.taps=8`

    Attributes:
      base: temperatures are base^(-2p/head_dim).
      taps: tokens in the convolution, the token itself included.
      rank: rank of the projection.

    Raises:
      ValueError: an odd head_dim, a width that num_heads doesn't divide, or attention that is not
        causal.
    """

    about = About(
        formula="rotary; pair p turned by the sum over l <= i of 500000^(-2p/head_dim) u_l, u a convolution of U V x",
        source="Movahedi et al. 2025, [arXiv 2511.17388](https://arxiv.org/abs/2511.17388), and its authors' code",
        caveats="causal only; x is the layer's input at unit norm; its authors evaluate linear attention mostly. This "
        "is their code's default, a projection of rank 16. Their language models have a full rank with weight norm in "
        "each head, SiLU after the convolution and a gate; none of these is here. With model.qk_norm they norm after "
        "the turn, here before",
    )

    shift_invariant = True
    takes_shared_keys = False  # each query head has its own keys
    only_causal = "its angles are sums over the past"

    base: float = number(500_000.0, above=0)
    taps: int = number(4, at_least=2, at_most=64)
    rank: int = number(16, at_least=1, at_most=2**20)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2 or self.width % self.num_heads:
            raise ValueError(
                f"selective_rope needs an even head_dim and a width that num_heads={self.num_heads} divides, and got "
                f"head_dim={self.head_dim}, width={self.width}; change num_heads or width"
            )

    def init_layer(self, key: PRNGKeyArray) -> Params:
        heads = (self.num_heads, self.head_dim // 2)
        # Uniform on +-1/sqrt(inputs), as the authors' code.
        shapes = {
            "down": (self.width, self.rank),
            "up": (self.rank, *heads),
            "taps": (self.taps, *heads),
        }
        return {
            name: jax.random.uniform(jax.random.fold_in(key, index), shape, jnp.float32, -1.0, 1.0)
            * shape[0] ** -0.5
            for index, (name, shape) in enumerate(shapes.items())
        }

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length heads head_dim"],
        padding: Bool[Array, "batch length"] | None,
        before: PyTree[Float[Array, "batch heads ..."]] | None,
        segments: Int[Array, "batch length"] | None = None,
    ) -> dict[str, Float[Array, "batch length heads ..."]]:
        """Returns each token's angles so far, without temperature, and the projections of its last
        taps - 1 tokens, for the next convolution.
        """
        down, up, weights = (params[name].astype(jnp.float32) for name in ("down", "up", "taps"))
        parts = x.astype(jnp.float32).reshape(*x.shape[:2], self.num_heads, -1)
        parts = parts * jax.lax.rsqrt(jnp.square(parts).sum(axis=-1, keepdims=True) + 1e-6)
        low = jnp.matmul(parts.reshape(x.shape), down, precision="highest")
        projected = jnp.einsum("blr,rhp->blhp", low, up, precision="highest")
        start = jnp.zeros((len(x), self.num_heads, self.taps - 1, self.head_dim // 2), jnp.float32)
        inputs = last_inputs(projected, start if before is None else before["inputs"], padding)
        if segments is not None:  # a sum goes on in the next segment, where only differences count
            first = jnp.full((len(x), 1, self.taps - 1, 1), -1, segments.dtype)
            owners = last_inputs(segments[..., None, None], first, None)
            inputs = [
                jnp.where(owner == owners[-1], one, 0.0)
                for one, owner in zip(inputs, owners, strict=True)
            ]
        steps = sum(one * weight[None, None] for one, weight in zip(inputs, weights, strict=True))
        if padding is not None:
            steps = jnp.where(padding[..., None, None], 0.0, steps)
        angles = jnp.cumsum(steps, axis=1)
        if before is not None:
            angles = angles + before["angles"][:, None]
        return {"angles": angles, "inputs": jnp.stack(inputs[1:], axis=3)}

    def queries(
        self, params: Params, query: Queries, positions: Positions, kept: PerQuery
    ) -> Queries:
        return self.turn(query, kept)

    def keys(self, params: Params, key: Keys, positions: Positions, kept: PerKey) -> Keys:
        return self.turn(key, kept)

    def turn(
        self, x: Float[Array, "batch length heads head_dim"], kept: Any
    ) -> Float[Array, "batch length heads head_dim"]:
        """Returns features turned by their tokens' angles, in their own dtype."""
        half = self.head_dim // 2
        temperature = (self.base ** (-np.arange(half) / half)).astype(np.float32)
        angles = kept["angles"] * temperature[None, None, None]
        return rotated(x, jnp.cos(angles), jnp.sin(angles))


def last_inputs(
    x: Shaped[Array, "batch length heads features"],
    before: Shaped[Array, "batch heads earlier features"],
    padding: Bool[Array, "batch length"] | None,
) -> list[Shaped[Array, "batch length heads features"]]:
    """Returns each token's last inputs, the oldest first and its own last, one more than `before` has.
    Padding has the inputs of the token before it.

    Args:
      before: inputs of the tokens before the first token in `x`.
    """
    earlier, length = before.shape[2], x.shape[1]
    if padding is None:
        whole = jnp.concatenate([before.swapaxes(1, 2), x], axis=1)
        return [whole[:, tap : tap + length] for tap in range(earlier + 1)]
    order = jnp.argsort(padding, axis=1, stable=True)  # tokens first
    tokens = jnp.take_along_axis(x, order[..., None, None], axis=1)
    whole = jnp.concatenate([before.swapaxes(1, 2), tokens], axis=1)
    newest = jnp.cumsum(~padding, axis=1) - 1  # of all tokens so far
    at = [jnp.maximum(newest + tap, 0)[..., None, None] for tap in range(earlier + 1)]
    return [jnp.take_along_axis(whole, index, axis=1) for index in at]
