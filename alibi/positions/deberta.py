"""Attention with content and position disentangled (DeBERTa; He et al. 2020, arXiv 2006.03654)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from alibi.config.fields import number
from alibi.positions.base import MOST_DISTANCE, About, Params, PositionMethod
from alibi.positions.bias import Bias, shared
from alibi.positions.products import KeyProducts, QueryProducts
from alibi.positions.shapes import (
    KeyPositions,
    PerKey,
    PerQuery,
    Positions,
    Queries,
    QueryPositions,
    Tile,
)

PRODUCTS = 3  # content to content, content to position, position to content


class DebertaBias(Bias):
    """(q_i . Kr[i - j] + k_j . Qr[j - i]) / sqrt(3 head_dim).

    Attributes:
      to_positions, from_positions: the first and the second product.
    """

    to_positions: Bias = shared()
    from_positions: Bias = shared()

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        return self.to_positions(query_positions, key_positions) + self.from_positions(
            query_positions, key_positions
        )


@dataclasses.dataclass(frozen=True)
class Deberta(PositionMethod):
    """Logits add up three products: content to content, content to position, position to content.

    The layers share a table with a vector for each relative position. Each layer projects it to its
    own keys Kr and queries Qr (equation 4). Relative position d is row d + k, from d = -k to k - 1,
    and greater distances are clipped (equation 3). The sum is divided by sqrt(3 head_dim). This is the
    paper's formula. Its authors' code and `transformers` read Qr at query minus key, as Kr, and not
    at key minus query.

    Config: `position=deberta,position_options.max_distance=64`

    Attributes:
      max_distance: k, in tokens. 0 means the training length (512 in the paper).
    """

    about = About(
        formula="(q_i . k_j + q_i . Kr[i - j] + k_j . Qr[j - i]) / sqrt(3 head_dim), Kr and Qr of one table",
        source="He et al. 2020, [arXiv 2006.03654](https://arxiv.org/abs/2006.03654), equations 3 and 4",
        caveats="its authors' code reads Qr at another row than their paper",
    )

    shift_invariant = True
    takes_shared_keys = False  # each query head has its own keys

    max_distance: int = number(0, at_least=0, at_most=MOST_DISTANCE)

    def init(self, key: PRNGKeyArray) -> Params:
        rows = 2 * (self.max_distance or self.train_length)
        # 0.02 as in all of DeBERTa's matrices
        return {"table": 0.02 * jax.random.normal(key, (rows, self.width), jnp.float32)}

    def init_layer(self, key: PRNGKeyArray) -> Params:
        shape, keys = (self.width, self.num_heads, self.head_dim), jax.random.split(key)
        names = ("key_kernel", "query_kernel")
        return {
            name: 0.02 * jax.random.normal(key, shape, jnp.float32)
            for name, key in zip(names, keys, strict=True)
        }

    def queries(
        self, params: Params, query: Queries, positions: Positions, kept: PerQuery
    ) -> Queries:
        # Attention divides by sqrt(head_dim); the products with Kr use these queries too.
        return (query.astype(jnp.float32) * PRODUCTS**-0.5).astype(query.dtype)

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length heads head_dim"],
        padding: Bool[Array, "batch length"] | None,
        before: PyTree[Float[Array, "batch heads ..."]] | None,
        segments: Int[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length heads head_dim"]:
        return key.astype(jnp.float32) * (PRODUCTS * self.head_dim) ** -0.5

    def content_bias(
        self, params: Params, query: Queries, of_queries: PerQuery, of_keys: PerKey
    ) -> DebertaBias:
        clip = self.max_distance or self.train_length
        table = params["table"].astype(jnp.float32)

        def projected(
            kernel: str, first: int, end: int
        ) -> Float[Array, "distances heads head_dim"]:
            # Last row first: the order is j - i for Kr and i - j for Qr.
            weights = params[kernel].astype(jnp.float32)
            return jnp.einsum("nw,whd->nhd", table[first:end][::-1], weights, precision="highest")

        # Under a causal mask i - j is 0 or more, so Kr is read from row k on, and Qr up to row k.
        of_kr = projected("key_kernel", clip if self.causal else 0, 2 * clip)
        of_qr = projected("query_kernel", 0, clip + 1 if self.causal else 2 * clip)
        return DebertaBias(
            QueryProducts(query.astype(jnp.float32) * self.head_dim**-0.5, of_kr, 1 - clip),
            KeyProducts(of_keys, of_qr, 0 if self.causal else 1 - clip),
        )
