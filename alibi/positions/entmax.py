"""Sparse attention by entmax 1.5, also with logits that grow with the number of keys (Vasylenko et al.
2025, arXiv 2506.16640).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from alibi.config.fields import number
from alibi.positions.alibi import AlibiBias
from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import Bias, like, per_head, per_query, shared
from alibi.positions.shapes import (
    KeyPositions,
    PerHead,
    PerKey,
    PerQuery,
    Queries,
    QueryPositions,
    Tile,
    Visible,
)
from alibi.slopes import alibi_slopes

STEPS = 24  # of Newton's method, enough for 2^24 keys


class EntmaxBias(Bias):
    """Entmax 1.5 of the logits with a bias.

    Attributes:
      bias: added to the logits.
    """

    reads_rows = True
    gives_weights = True
    bias: Bias = shared()

    def of_rows(
        self,
        logits: Tile,
        visible: Visible,
        query_positions: QueryPositions,
        key_positions: KeyPositions,
    ) -> Tile:
        bias = self.bias(query_positions, key_positions)
        return entmax(jnp.where(visible, logits + like(bias, logits), logits))


class AdaptiveEntmaxBias(EntmaxBias):
    """Entmax 1.5 of the logits times delta + beta ln(n)^gamma for n visible keys, with a bias.

    Attributes:
      delta: a number for each head.
      of_queries: beta and gamma for each query and head.
    """

    delta: PerHead = per_head()
    of_queries: Float[Array, "*batch q heads two"] = per_query()

    def of_rows(
        self,
        logits: Tile,
        visible: Visible,
        query_positions: QueryPositions,
        key_positions: KeyPositions,
    ) -> Tile:
        beta, gamma = jnp.moveaxis(jnp.swapaxes(self.of_queries, -2, -3), -1, 0)[..., None]
        count = visible.sum(axis=-1, keepdims=True)
        # one key has all the weight, and ln 1 = 0 no power below zero
        log_log = jnp.log(jnp.log(jnp.maximum(count, 2).astype(jnp.float32)))
        scale = like(self.delta[:, None, None], logits) + beta * jnp.exp(gamma * log_log)
        scaled = jnp.where(visible, logits * scale, logits)
        return super().of_rows(scaled, visible, query_positions, key_positions)


def entmax(logits: Float[Array, "*rows keys"]) -> Float[Array, "*rows keys"]:
    """Returns max(z / 2 - t, 0)^2, where t makes the sum over keys 1 (Peters et al. 2019, arXiv
    1905.05702).

    Newton's method comes to t from below, since the sum is convex and falls with t. One more step
    from the t that is found has the exact gradient.
    """
    halves = logits / 2
    halves = halves - jax.lax.stop_gradient(halves.max(axis=-1, keepdims=True))

    def step(halves: Array, threshold: Array) -> Array:
        above = jnp.maximum(halves - threshold, 0.0)
        excess = jnp.square(above).sum(axis=-1, keepdims=True) - 1
        return threshold + excess / (2 * above.sum(axis=-1, keepdims=True))

    constant = jax.lax.stop_gradient(halves)
    start = jnp.full_like(constant[..., :1], -1.0)
    threshold = jax.lax.fori_loop(0, STEPS, lambda _, below: step(constant, below), start)
    return jnp.square(jnp.maximum(halves - step(halves, threshold), 0.0))


@dataclasses.dataclass(frozen=True)
class Entmax(PositionMethod):
    """Entmax 1.5 in place of the softmax: far below the largest logit, weights are exactly zero.

    Half of the heads have no positions, and the others have ALiBi's slopes (NAPE).

    Config: `position=entmax,position_options.alibi_share=1.0`

    Attributes:
      alibi_share: share of the heads with slopes, which are the last ones.
    """

    about = About(
        formula="weights max(y_j / 2 - t, 0)^2, t such that they sum to 1, y = z - m_h (i - j), m_h = 0 in half of the "
        "heads",
        source="Peters et al. 2019, [arXiv 1905.05702](https://arxiv.org/abs/1905.05702); NAPE: "
        "[arXiv 2506.16640](https://arxiv.org/abs/2506.16640)",
        caveats="t is found in 24 steps over whole rows; no sink; the code of NAPE's authors has slopes 1 / h, steeper "
        "than ALiBi's",
    )

    shift_invariant = True

    alibi_share: float = number(0.5, at_least=0, at_most=1)

    @property
    def distances(self) -> AlibiBias:
        """ALiBi's bias, with slopes of 0 for the heads without positions."""
        count = round(self.alibi_share * self.num_heads)
        slopes = [0.0] * (self.num_heads - count)
        slopes += alibi_slopes(count).tolist() if count else []
        return AlibiBias(alibi_slopes(self.num_heads, slopes), symmetric=not self.causal)

    def bias(self, params: Params) -> EntmaxBias:
        return EntmaxBias(self.distances)


@dataclasses.dataclass(frozen=True)
class AdaptiveEntmax(Entmax):
    """Entmax 1.5 of logits that are sharper with more keys: a factor grows with a power of ln n that each
    token chooses in each head (ASEntmax).

    beta = softplus(u . x + a) and gamma = tanh(w . x + b) for the layer's input x, so |gamma| < 1. delta
    is learned in each head, from 1 on.

    Config: `position=asentmax`
    """

    about = About(
        formula="entmax with y = z (delta_h + beta_ih ln(n)^gamma_ih) - m_h (i - j), beta and gamma of the layer's "
        "input, n the keys that the query sees",
        source="Vasylenko et al. 2025, [arXiv 2506.16640](https://arxiv.org/abs/2506.16640)",
        caveats="as entmax; initial values and the range of gamma are ours, and delta is learned; the authors' code "
        "scales only the heads without positions, by a power of ln(i + 2)",
    )

    @property
    def reads_kept_of_keys(self) -> bool:
        return False  # beta and gamma belong to queries

    def init_layer(self, key: PRNGKeyArray) -> Params:
        kernel = 0.02 * jax.random.normal(key, (self.width, self.num_heads, 2), jnp.float32)
        start = jnp.zeros((self.num_heads, 2), jnp.float32)
        return {"kernel": kernel, "start": start, "delta": jnp.ones(self.num_heads, jnp.float32)}

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length kv_heads head_dim"],
        padding: Bool[Array, "batch length"] | None,
        before: PyTree[Float[Array, "batch heads ..."]] | None,
        segments: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length heads two"]:
        kernel, start = (params[name].astype(jnp.float32) for name in ("kernel", "start"))
        chosen = jnp.einsum("blw,whn->blhn", x.astype(jnp.float32), kernel, precision="highest")
        beta, gamma = jnp.moveaxis(chosen + start[None, None], -1, 0)
        return jnp.stack([jax.nn.softplus(beta), jnp.tanh(gamma)], axis=-1)

    def content_bias(
        self, params: Params, query: Queries, of_queries: PerQuery, of_keys: PerKey
    ) -> AdaptiveEntmaxBias:
        return AdaptiveEntmaxBias(self.distances, params["delta"].astype(jnp.float32), of_queries)
