"""The Forgetting Transformer: ALiBi with slopes that tokens choose (Lin et al. 2025, arXiv
2503.02130).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import Bias, Blocks, per_key, per_query
from alibi.positions.shapes import (
    BlockBounds,
    KeyPositions,
    PerKey,
    PerQuery,
    Queries,
    QueryPositions,
    Tile,
)


class FoxBias(Bias):
    """c_i - c_j for query i and key j. c is the running sum over log(forget gate).

    In float32 the error of a sum of n nats is about n * 6e-8: a thousandth for a bias at 16,000 tokens.

    Attributes:
      of_queries, of_keys: c for the query tokens and for the key tokens.
    """

    bounded = True
    of_queries: Float[Array, "*batch q heads"] = per_query()
    of_keys: Float[Array, "*batch k heads"] = per_key()

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        of_queries, of_keys = (jnp.swapaxes(c, -1, -2) for c in (self.of_queries, self.of_keys))
        return of_queries[..., :, None] - of_keys[..., None, :]

    @property
    def query_term(self) -> Float[Array, "batch q heads"]:
        return self.of_queries

    @property
    def key_term(self) -> Float[Array, "batch k heads"]:
        return -self.of_keys

    def upper_bound(self, blocks: Blocks) -> BlockBounds:
        # c only falls, so the nearest key of a block is forgotten least.
        batch, _, heads = self.of_keys.shape
        largest = self.of_queries.reshape(batch, blocks.q_blocks, -1, heads).max(axis=2)
        least = self.of_keys.reshape(batch, blocks.k_blocks, -1, heads).min(axis=2)
        return largest.swapaxes(1, 2)[..., None] - least.swapaxes(1, 2)[..., None, :]


@dataclasses.dataclass(frozen=True)
class Fox(PositionMethod):
    """Each token has a gate between 0 and 1 in each head, which forgets earlier tokens (equation 5).

    The gate is sigmoid(w . x + b) for the attention layer's input x. Constant gates give ALiBi with
    slopes -log(gate).

    Config: `position=fox`

    Raises:
      ValueError: attention that is not causal, and so has no past.
    """

    about = About(
        formula="sum over l = j + 1, ..., i of log sigmoid(w_h . x_l + b_h), x the layer's input",
        source="Lin et al. 2025, [arXiv 2503.02130](https://arxiv.org/abs/2503.02130), equation 5",
        caveats="causal only; constant gates are ALiBi",
    )

    shift_invariant = True
    only_causal = "its gates forget earlier tokens"

    def init_layer(self, key: PRNGKeyArray) -> Params:
        # as in the paper's code
        kernel = 0.02 * jax.random.normal(key, (self.width, self.num_heads), jnp.float32)
        return {"kernel": kernel, "bias": jnp.zeros(self.num_heads, jnp.float32)}

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length kv_heads head_dim"],
        padding: Bool[Array, "batch length"] | None,
        before: PyTree[Float[Array, "batch heads ..."]] | None,
        segments: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length heads"]:
        kernel, start = (params[name].astype(jnp.float32) for name in ("kernel", "bias"))
        gates = jnp.matmul(x.astype(jnp.float32), kernel, precision="highest") + start[None, None]
        of_tokens = jax.nn.log_sigmoid(gates)
        if padding is not None:  # forgets nothing
            of_tokens = jnp.where(padding[..., None], 0.0, of_tokens)
        forgotten = jnp.cumsum(of_tokens, axis=1)
        return forgotten if before is None else forgotten + before[:, None]

    def content_bias(
        self, params: Params, query: Queries, of_queries: PerQuery, of_keys: PerKey
    ) -> FoxBias:
        return FoxBias(of_queries, of_keys)
