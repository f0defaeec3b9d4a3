"""Disentangled attention of content and position (DeBERTa; He et al. 2020, arXiv 2006.03654)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray, PyTree

from alibi.positions.base import About, Params, PositionMethod, Positions
from alibi.positions.bias import Bias, per_key, per_query, static
from alibi.positions.lookup import looked_up

PARTS = 3  # of a logit: content to content, content to position, position to content


class DebertaBias(Bias):
    """(q_i . Kr[i - j] + k_j . Qr[j - i]) / sqrt(3 head_dim), the products being at hand for each query and key.

    Attributes:
      of_queries: the products of each query, by key position minus query position from `lowest` on.
      of_keys: the products of each key, by query position minus key position from `lowest_of_keys` on.
    """

    of_queries: Float[Array, "*batch q heads behind"] = per_query()
    of_keys: Float[Array, "*batch k heads ahead"] = per_key()
    lowest: int = static()
    lowest_of_keys: int = static()

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*batch heads q k"]:
        to_positions = looked_up(self.of_queries, self.lowest, query_positions, key_positions)
        from_positions = looked_up(self.of_keys, self.lowest_of_keys, key_positions, query_positions)
        return to_positions + from_positions.swapaxes(-1, -2)


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
        if self.max_distance < 0:
            raise ValueError(
                f"deberta needs a max_distance of at least 1 token, or 0 for the training length, and got "
                f"{self.max_distance}"
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
        before: PyTree[Float[Array, "batch heads ..."]] | None,
    ) -> Float[Array, "batch length heads distances"]:
        # Row j - i + k for the distance i - j, which under a causal mask is 0 or more.
        del x, before
        rows = slice(0, self.clip + 1) if self.causal else slice(None)
        return self._products(params, key.astype(jnp.float32) * PARTS**-0.5, "query_kernel", rows)

    def content_bias(
        self,
        params: Params,
        query: Float[Array, "batch q heads head_dim"],
        of_queries: PyTree[Float[Array, "batch q heads ..."]],
        of_keys: PyTree[Float[Array, "batch k heads ..."]],
    ) -> DebertaBias:
        # Row i - j + k for the distance j - i, which under a causal mask is 0 or less.
        del of_queries
        rows = slice(self.clip, None) if self.causal else slice(None)
        products = self._products(params, query, "key_kernel", rows)
        lowest = 1 - self.clip
        return DebertaBias(products, of_keys, lowest, 0 if self.causal else lowest)

    def _products(
        self, params: Params, x: Float[Array, "batch length heads head_dim"], kernel: str, rows: slice
    ) -> Float[Array, "batch length heads distances"]:
        """The scaled products of queries or keys with projected rows of the table, the last row first."""
        table, weights = params["table"].astype(jnp.float32)[rows], params[kernel].astype(jnp.float32)
        vectors = jnp.einsum("nw,whd->nhd", table[::-1], weights, precision="highest")
        x = x.astype(jnp.float32) * self.head_dim**-0.5
        return jnp.einsum("blhd,nhd->blhn", x, vectors, precision="highest")
