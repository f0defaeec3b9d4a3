"""Disentangled attention of content and position (DeBERTa; He et al. 2020, arXiv 2006.03654)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, PRNGKeyArray, PyTree

from alibi.positions.base import MOST_DISTANCE, About, Params, PositionMethod, Positions
from alibi.positions.bias import Bias, shared
from alibi.positions.lookup import KeyProducts, QueryProducts

PARTS = 3  # of a logit: content to content, content to position, position to content


class DebertaBias(Bias):
    """(q_i . Kr[i - j] + k_j . Qr[j - i]) / sqrt(3 head_dim).

    Attributes:
      to_positions, from_positions: the first product, and the second.
    """

    to_positions: Bias = shared()
    from_positions: Bias = shared()

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*batch heads q k"]:
        sides = query_positions, key_positions
        return self.to_positions(*sides) + self.from_positions(*sides)


@dataclasses.dataclass(frozen=True)
class Deberta(PositionMethod):
    """Logits are the sum of three products: of contents, of content and relative position, and the other way round.

    A table of vectors of relative positions is shared by the layers, each of which projects it to keys Kr and
    queries Qr of its own (equation 4). A relative position d is row d + k of the table, from d = -k to k - 1, where
    greater distances end too (equation 3). The sum is divided by sqrt(3 head_dim). This is the paper's formula; its
    authors' code, and `transformers`, read Qr at the row of the query minus the key, as Kr, and not of the key minus
    the query.

    Attributes:
      max_distance: k, in tokens; 0: the training length, as in the paper, whose sequences have k = 512.
    """

    about = About(
        formula="(q_i . k_j + q_i . Kr[i - j] + k_j . Qr[j - i]) / sqrt(3 head_dim), Kr and Qr of one table",
        source="He et al. 2020, [arXiv 2006.03654](https://arxiv.org/abs/2006.03654), equations 3 and 4",
        caveats="its authors' code reads Qr at another row than their paper says",
    )

    shift_invariant = True

    max_distance: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.max_distance <= MOST_DISTANCE:
            raise ValueError(
                f"deberta needs a max_distance from 1 to {MOST_DISTANCE:,} tokens, or 0 for the training length, and "
                f"got {self.max_distance}"
            )

    @property
    def clip(self) -> int:
        """k, in tokens."""
        return self.max_distance or self.train_length

    def init(self, key: PRNGKeyArray) -> Params:
        return {"table": 0.02 * jax.random.normal(key, (2 * self.clip, self.width))}  # as all of DeBERTa starts

    def init_layer(self, key: PRNGKeyArray) -> Params:
        shape, keys = (self.width, self.num_heads, self.head_dim), jax.random.split(key)
        names = ("key_kernel", "query_kernel")
        return {name: 0.02 * jax.random.normal(key, shape) for name, key in zip(names, keys, strict=True)}

    def queries(
        self, params: Params, query: Float[Array, "*batch q heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch q heads head_dim"]:
        # Attention divides by sqrt(head_dim); these queries also make the products with Kr.
        del params, positions
        return (query.astype(jnp.float32) * PARTS**-0.5).astype(query.dtype)

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length heads head_dim"],
        padding: Bool[Array, "batch length"] | None,
        before: PyTree[Float[Array, "batch heads ..."]] | None,
    ) -> Float[Array, "batch length heads head_dim"]:
        del params, x, padding, before
        return key.astype(jnp.float32) * (PARTS * self.head_dim) ** -0.5

    def content_bias(
        self,
        params: Params,
        query: Float[Array, "batch q heads head_dim"],
        of_queries: PyTree[Float[Array, "batch q heads ..."]],
        of_keys: PyTree[Float[Array, "batch k heads ..."]],
    ) -> DebertaBias:
        del of_queries
        query = query.astype(jnp.float32) * self.head_dim**-0.5
        # Under a causal mask i - j is 0 or more, so of Kr rows k and above are read, and of Qr those up to k.
        of_kr, of_qr = (slice(self.clip, None), slice(0, self.clip + 1)) if self.causal else (slice(None), slice(None))
        lowest = 1 - self.clip
        return DebertaBias(
            QueryProducts(query, self._vectors(params, "key_kernel", of_kr), lowest),
            KeyProducts(of_keys, self._vectors(params, "query_kernel", of_qr), 0 if self.causal else lowest),
        )

    def _vectors(self, params: Params, kernel: str, rows: slice) -> Float[Array, "distances heads head_dim"]:
        """Rows of the table, projected, the last row first: by j - i for Kr, and by i - j for Qr."""
        table, weights = params["table"].astype(jnp.float32)[rows], params[kernel].astype(jnp.float32)
        return jnp.einsum("nw,whd->nhd", table[::-1], weights, precision="highest")
