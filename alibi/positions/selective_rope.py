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
    is the default in the authors' code. Their language models have rank=0, silu=True and gate=True. A
    bias, which their code adds to the angles as an option, is left out.

    In float32 the error of a sum of n radians is about n * 6e-8. `alibi.linen.SelfAttention` and
    `alibi.nnx.SelfAttention` need segment_ids for documents and padding: behind a mask, the convolution
    still reads the tokens before.

    Config: `position=selective_rope,position_options.rank=0,position_options.gate=True`

    Attributes:
      base: temperatures are base^(-2p/head_dim).
      taps: tokens in the convolution, the token itself included.
      rank: rank of the projection. With 0 each head projects its own share of x by g_h W_h. The columns
        of W_h are divided by their norms (weight norm), and g_h starts at 1.
      silu: SiLU stands after the convolution.
      gate: a token's angles are multiplied by sigmoid(w_h . x + b_h) in each head, after SiLU.
      norm_after: an RMS norm stands after the turn of queries, another after that of keys, with learned
        numbers for each feature. Leave `model.qk_norm`, which stands before the turn, off then. Logits
        then depend on the sums themselves, not on their differences alone.

    Raises:
      ValueError: an odd head_dim, a width that num_heads doesn't divide, or attention that is not
        causal.
    """

    about = About(
        formula="rotary; pair p turned by the sum over l <= i of 500000^(-2p/head_dim) u_l, u a convolution of U V x",
        source="Movahedi et al. 2025, [arXiv 2511.17388](https://arxiv.org/abs/2511.17388), and its authors' code",
        caveats="causal only; x is the layer's input at unit norm; its authors evaluate linear attention mostly. The "
        "defaults are those of their code, a projection of rank 16. Their language models have a full rank with weight "
        "norm in each head (`rank=0`), SiLU after the convolution (`silu=True`) and a gate (`gate=True`). Where they "
        "norm queries and keys, they do so after the turn (`norm_after=True`); `model.qk_norm=True` does so before. "
        "The rows are of the defaults. In `alibi.linen.SelfAttention` and `alibi.nnx.SelfAttention` the convolution "
        "stops at documents and padding by `segment_ids`, not by a mask",
    )

    shift_invariant = True
    takes_shared_keys = False  # each query head has its own keys
    only_causal = "its angles are sums over the past"

    base: float = number(500_000.0, above=0)
    taps: int = number(4, at_least=2, at_most=64)
    rank: int = number(16, at_least=0, at_most=2**20)
    silu: bool = False
    gate: bool = False
    norm_after: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2 or self.width % self.num_heads:
            raise ValueError(
                f"selective_rope needs an even head_dim and a width that num_heads={self.num_heads} divides, and got "
                f"head_dim={self.head_dim}, width={self.width}; change num_heads or width"
            )

    def init_layer(self, key: PRNGKeyArray) -> Params:
        heads = (self.num_heads, self.head_dim // 2)
        shapes: dict[str, tuple[int, ...]] = {
            "down": (self.width, self.rank),
            "up": (self.rank, *heads),
            "taps": (self.taps, *heads),
            "full": (self.width // self.num_heads, *heads),
            "gate": (self.width, self.num_heads),
        }
        left_out = {"full"} if self.rank else {"down", "up"}
        left_out |= set() if self.gate else {"gate"}
        # Uniform on +-1/sqrt(inputs), or of a full rank on +-sqrt(6/outputs), as the authors' code.
        params = {
            name: jax.random.uniform(jax.random.fold_in(key, index), shape, jnp.float32, -1.0, 1.0)
            * (shape[0] ** -0.5 if name != "full" else (6 / shape[-1]) ** 0.5)
            for index, (name, shape) in enumerate(shapes.items())
            if name not in left_out
        }
        if not self.rank:
            params["gain"] = jnp.ones(self.num_heads, jnp.float32)
        if self.gate:
            params["gate_bias"] = jnp.zeros(self.num_heads, jnp.float32)
        if self.norm_after:
            ones = jnp.ones(self.head_dim, jnp.float32)
            params |= {"query_norm": ones, "key_norm": ones}
        return params

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
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), dict(params))
        parts = x.astype(jnp.float32).reshape(*x.shape[:2], self.num_heads, -1)
        parts = parts * jax.lax.rsqrt(jnp.square(parts).sum(axis=-1, keepdims=True) + 1e-6)
        unit = parts.reshape(x.shape)
        if self.rank:
            low = jnp.matmul(unit, params["down"], precision="highest")
            projected = jnp.einsum("blr,rhp->blhp", low, params["up"], precision="highest")
        else:
            norms = jnp.linalg.norm(params["full"], axis=0, keepdims=True)
            full = params["gain"][None, :, None] * params["full"] / jnp.maximum(norms, 1e-12)
            projected = jnp.einsum("blhi,ihp->blhp", parts, full, precision="highest")
        # like x, so that it lies on devices as x does
        start = jnp.zeros_like(projected.sum(axis=1))[:, :, None].repeat(self.taps - 1, axis=2)
        inputs = last_inputs(projected, start if before is None else before["inputs"], padding)
        if segments is not None:  # a sum goes on in the next segment, where only differences count
            none = jnp.full_like(segments[:, :1], -1)[:, :, None, None]
            first = none.repeat(self.taps - 1, axis=2)
            owners = last_inputs(segments[..., None, None], first, None)
            inputs = [
                jnp.where(owner == owners[-1], one, 0.0)
                for one, owner in zip(inputs, owners, strict=True)
            ]
        steps = sum(one * tap[None, None] for one, tap in zip(inputs, params["taps"], strict=True))
        if self.silu:
            steps = jax.nn.silu(steps)
        if self.gate:
            gates = jnp.matmul(unit, params["gate"], precision="highest")
            steps = steps * jax.nn.sigmoid(gates + params["gate_bias"][None, None])[..., None]
        if padding is not None:
            steps = jnp.where(padding[..., None, None], 0.0, steps)
        angles = jnp.cumsum(steps, axis=1)
        if segments is not None and self.norm_after:  # each segment's own sum
            same = segments == jnp.roll(segments, 1, axis=1)
            first = jax.lax.cummax(jnp.where(same, 0, jnp.arange(x.shape[1])[None]), axis=1)
            angles -= jnp.take_along_axis(angles - steps, first[..., None, None], axis=1)
        if before is not None:
            angles = angles + before["angles"][:, None]
        return {"angles": angles, "inputs": jnp.stack(inputs[1:], axis=3)}

    def queries(
        self, params: Params, query: Queries, positions: Positions, kept: PerQuery
    ) -> Queries:
        return self.turn(query, kept, params.get("query_norm"))

    def keys(self, params: Params, key: Keys, positions: Positions, kept: PerKey) -> Keys:
        return self.turn(key, kept, params.get("key_norm"))

    def turn(
        self,
        x: Float[Array, "batch length heads head_dim"],
        kept: Any,
        norm: Float[Array, " head_dim"] | None,
    ) -> Float[Array, "batch length heads head_dim"]:
        """Turns features as their tokens' angles say, in their own dtype. With `norm` it then divides them by
        their root mean square and multiplies them by these numbers.
        """
        half = self.head_dim // 2
        temperature = (self.base ** (-np.arange(half) / half)).astype(np.float32)
        angles = kept["angles"] * temperature[None, None, None]
        turned = rotated(x, jnp.cos(angles), jnp.sin(angles))
        if norm is None:
            return turned
        squares = jnp.square(turned.astype(jnp.float32)).mean(axis=-1, keepdims=True)
        return (turned * jax.lax.rsqrt(squares + 1e-5) * norm[None, None, None]).astype(x.dtype)


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
