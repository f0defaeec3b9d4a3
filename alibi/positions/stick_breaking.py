"""Stick-breaking attention (Tan et al. 2024, arXiv 2410.17980)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import MASKED, UNDERFLOW, Bias, like
from alibi.positions.distance import rows_and_columns
from alibi.positions.shapes import KeyPositions, QueryPositions, Tile, Visible

BLOCK = 64  # keys that are summed by one product


class StickBreaking(Bias):
    """Weights exp(z_j - c_j), where c_j is the sum of softplus(z) over key j and the earlier tokens of
    the query that are nearer than it.
    """

    reads_rows = True
    gives_weights = True
    carried = 1  # c of the tile's first key

    def of_tile(
        self,
        logits: Tile,
        visible: Visible,
        query_positions: QueryPositions,
        key_positions: KeyPositions,
        carry: Float[Array, "*batch heads q carried"],
    ) -> tuple[Tile, Float[Array, "*batch heads q carried"]]:
        rows, columns = rows_and_columns(query_positions, key_positions)
        earlier = like(jnp.expand_dims(columns < rows, -3), logits)
        logits = jnp.where(earlier, logits, MASKED)
        broken = sums_from_the_right(jax.nn.softplus(logits)) + carry
        return jnp.exp(logits - broken), broken[..., :1]

    def finished(self, carry: Float[Array, "*batch heads q carried"]) -> Bool[Array, ""]:
        return carry.min() > UNDERFLOW


@dataclasses.dataclass(frozen=True)
class StickBreakingAttention(PositionMethod):
    """Each query goes back from the nearest earlier token and gives each key a share sigmoid(z) of the
    weight that is left.

    So the nearest of two equal keys gets more, which is all that says where tokens stand. There is no
    softmax and no parameter. Weight that is left over goes nowhere, and a first token attends to
    nothing.

    Config: `position=stick_breaking`

    Raises:
      ValueError: attention that is not causal.
    """

    about = About(
        formula="weights sigmoid(z_ij) times the product over j < l < i of (1 - sigmoid(z_il)), without softmax",
        source="Tan et al. 2024, [arXiv 2410.17980](https://arxiv.org/abs/2410.17980)",
        caveats="causal only; a token does not attend to itself; no sink; weight that is left over is dropped, "
        "as in the paper's equation",
    )

    shift_invariant = True
    only_causal = "its queries go back from the nearest earlier token"

    def bias(self, params: Params) -> StickBreaking:
        return StickBreaking()


def sums_from_the_right(x: Tile) -> Tile:
    """Returns for each key the sum over it and all keys on its right.

    Products with ones compute it. With `jax.lax.cumsum` attention takes 1.3 to 1.7 times as long (2,048 tokens, two
    cores of an Intel Xeon).
    """
    keys = x.shape[-1]
    blocks = jnp.pad(x.reshape(-1, keys), ((0, 0), (0, -keys % BLOCK)))
    rows, count = blocks.shape[0], blocks.shape[1] // BLOCK
    product = functools.partial(jnp.matmul, precision="highest")
    inside = product(blocks.reshape(-1, BLOCK), np.tri(BLOCK, dtype=np.float32))
    inside = inside.reshape(rows, count, BLOCK)
    later = product(inside[..., 0], np.tri(count, k=-1, dtype=np.float32))
    return (inside + later[..., None]).reshape(rows, -1)[:, :keys].reshape(x.shape)
