"""Contextual position encoding (CoPE; Golovneva et al. 2024, arXiv 2405.18719)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.config.fields import number
from alibi.positions.base import MOST_DISTANCE, About, Params, PositionMethod
from alibi.positions.bias import Bias, per_query
from alibi.positions.shapes import (
    KeyPositions,
    PerKey,
    PerQuery,
    Queries,
    QueryPositions,
    Tile,
    Visible,
)
from alibi.positions.stick_breaking import sums_from_the_right


class CopeBias(Bias):
    """q_i . e[p_ij], interpolated between the vectors of two whole numbers.

    Attributes:
      of_positions: each query's product with each vector.
    """

    reads_rows = True
    carried = 1  # gates counted so far
    of_positions: Float[Array, "*batch q heads positions"] = per_query()

    def of_tile(
        self,
        logits: Tile,
        visible: Visible,
        query_positions: QueryPositions,
        key_positions: KeyPositions,
        carry: Float[Array, "*batch heads q carried"],
    ) -> tuple[Tile, Float[Array, "*batch heads q carried"]]:
        counted = sums_from_the_right(jax.nn.sigmoid(logits)) + carry
        table = jnp.swapaxes(self.of_positions, -2, -3)
        places = jnp.minimum(counted, table.shape[-1] - 1)
        below, above = (
            jnp.take_along_axis(table, whole(places).astype(jnp.int32), axis=-1)
            for whole in (jnp.floor, jnp.ceil)
        )
        return logits + below + (places - jnp.floor(places)) * (above - below), counted[..., :1]


@dataclasses.dataclass(frozen=True)
class Cope(PositionMethod):
    """A key's distance is the number of gates that are open from the key to the query, and each
    distance has a learned vector that the query is multiplied with.

    A gate is the sigmoid of the scaled logit. So a head can count words or sentences in place of
    tokens. The vectors start at zero. Each layer has its own, for all heads.

    Config: `position=cope,position_options.positions=64`

    Attributes:
      positions: vectors. Greater distances have the last one.

    Raises:
      ValueError: attention that is not causal.
    """

    about = About(
        formula="q_i . e[p_ij], p_ij = min(sum over l = j, ..., i of sigmoid(z_il), P - 1), e interpolated between "
        "whole p",
        source="Golovneva et al. 2024, [arXiv 2405.18719](https://arxiv.org/abs/2405.18719)",
        caveats="causal only; each pair of query and key looks up two numbers",
    )

    shift_invariant = True
    only_causal = "it counts gates from a key to a later query"

    positions: int = number(64, at_least=2, at_most=MOST_DISTANCE)

    def init_layer(self, key: PRNGKeyArray) -> Params:
        return {"vectors": jnp.zeros((self.positions, self.head_dim), jnp.float32)}

    def content_bias(
        self, params: Params, query: Queries, of_queries: PerQuery, of_keys: PerKey
    ) -> CopeBias:
        vectors = params["vectors"].astype(jnp.float32)
        return CopeBias(
            jnp.einsum("bqhd,pd->bqhp", query.astype(jnp.float32), vectors, precision="highest")
        )
