"""The Forgetting Transformer's gates: ALiBi whose slopes the tokens choose (Lin et al. 2025, arXiv 2503.02130)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, PRNGKeyArray, PyTree

from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import Bias, Blocks, per_key, per_query


class FoxBias(Bias):
    """c_i - c_j of query i and key j, c being the sum of the logarithms of all forget gates so far.

    In float32 a sum of n nats is off by about n * 6e-8, so at 16,000 tokens a bias by a thousandth.

    Attributes:
      of_queries, of_keys: c of the tokens of both.
    """

    bounded = True
    of_queries: Float[Array, "*batch q heads"] = per_query()
    of_keys: Float[Array, "*batch k heads"] = per_key()

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*batch heads q k"]:
        del query_positions, key_positions
        of_queries, of_keys = (jnp.swapaxes(c, -1, -2) for c in (self.of_queries, self.of_keys))
        return of_queries[..., :, None] - of_keys[..., None, :]

    @property
    def key_term(self) -> Float[Array, "batch k heads"]:
        return -self.of_keys

    def upper_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        # Of a block of keys the nearest has forgotten least, and c only falls.
        return blocks.largest_of_queries(self.of_queries) - blocks.least_of_keys(self.of_keys)


@dataclasses.dataclass(frozen=True)
class Fox(PositionMethod):
    """Each token has in each head a gate between 0 and 1, by which all that came before it is forgotten (equation 5).

    The gate is the sigmoid of a linear function of the attention layer's input. Constant gates
    give ALiBi, with -log of them as slopes.

    Raises:
      ValueError: attention in both directions, which has no past to forget.
    """

    about = About(
        formula="sum over l = j + 1, ..., i of log sigmoid(w_h . x_l + b_h), x the layer's input",
        source="Lin et al. 2025, [arXiv 2503.02130](https://arxiv.org/abs/2503.02130), equation 5",
        caveats="causal only; constant gates are ALiBi",
    )

    shift_invariant = True

    def __post_init__(self) -> None:
        if not self.causal:
            raise ValueError("fox needs causal=True: its gates forget what came before a token")

    def init_layer(self, key: PRNGKeyArray) -> Params:
        kernel = 0.02 * jax.random.normal(key, (self.width, self.num_heads))  # as in the paper's code
        return {"kernel": kernel, "bias": jnp.zeros(self.num_heads)}

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length heads head_dim"],
        padding: Bool[Array, "batch length"] | None,
        before: PyTree[Float[Array, "batch heads ..."]] | None,
    ) -> Float[Array, "batch length heads"]:
        del key
        kernel, start = (params[name].astype(jnp.float32) for name in ("kernel", "bias"))
        gates = jnp.matmul(x.astype(jnp.float32), kernel, precision="highest") + start[None, None]
        of_tokens = jax.nn.log_sigmoid(gates)
        if padding is not None:  # which makes no token forget
            of_tokens = jnp.where(padding[..., None], 0.0, of_tokens)
        forgotten = jnp.cumsum(of_tokens, axis=1)
        return forgotten if before is None else forgotten + before[:, None]

    def content_bias(
        self,
        params: Params,
        query: Float[Array, "batch q heads head_dim"],
        of_queries: PyTree[Float[Array, "batch q heads ..."]],
        of_keys: PyTree[Float[Array, "batch k heads ..."]],
    ) -> FoxBias:
        del params, query
        return FoxBias(of_queries, of_keys)
