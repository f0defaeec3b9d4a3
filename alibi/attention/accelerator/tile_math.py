"""The arithmetic of a tile, a block of queries against a block of keys, in all fused kernels."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from alibi.attention.accelerator.plan import Plan
from alibi.attention.reference import MASKED, capped

# the dimensions over which products sum: of the left and of the right factor
ROWS_BY_ROWS, ROWS_BY_COLUMNS, COLUMNS_BY_COLUMNS = (1, 1), (1, 0), (0, 0)


class Tile(NamedTuple):
    """The arrays of a tile.

    Attributes:
      query_positions, key_positions: a column and a row.
      key_numbers: the keys' numbers in the call.
      segments: a column of the queries' and a row of the keys'; None: there are none.
      slope: m of its head, or None.
      bias: the values of another bias, or None.
    """

    query: Float[Array, "block head_dim"]
    key: Float[Array, "block head_dim"]
    value: Float[Array, "block value_dim"]
    query_positions: Int[Array, "block 1"]
    key_positions: Int[Array, "1 block"]
    key_numbers: Int[Array, "1 block"]
    segments: tuple[Int[Array, "block 1"], Int[Array, "1 block"]] | None
    slope: Any
    bias: Float[Array, "block block"] | None

    def distances(self, plan: Plan) -> Float[Array, "block block"]:
        distances = (self.query_positions - self.key_positions).astype(jnp.float32)
        return jnp.abs(distances) if plan.symmetric else distances

    def visible(self, plan: Plan) -> Bool[Array, "block block"]:
        """Returns whether each query sees each key."""
        rows, columns = self.query_positions, self.key_positions
        seen = jnp.broadcast_to(self.key_numbers < plan.k_length, (plan.block, plan.block))
        if plan.causal:
            seen &= columns <= rows
        if plan.window is not None:
            seen &= jnp.abs(rows - columns) < plan.window
        if self.segments is not None:
            seen &= self.segments[0] == self.segments[1]
        return seen

    def logits(
        self, plan: Plan, *, masked: bool
    ) -> tuple[Float[Array, "block block"], Float[Array, "block block"]]:
        """Returns the scaled and capped products, and the logits with bias and mask."""
        products = product(plan, self.query, self.key, ROWS_BY_ROWS) * plan.scale
        products = logits = capped(products, plan.logit_cap)
        if self.slope is not None:
            logits = logits - self.slope * self.distances(plan)
        if self.bias is not None:
            logits = logits + self.bias
        return products, jnp.where(self.visible(plan), logits, MASKED) if masked else logits

    def gradients(
        self,
        plan: Plan,
        dout: Float[Array, "block value_dim"],
        lse: Float[Array, "block 1"],
        delta: Float[Array, "block 1"],
        *,
        masked: bool,
    ) -> tuple[Float[Array, "block block"], ...]:
        """Returns the weights, the gradient of the logits, and that of the products before the cap."""
        products, logits = self.logits(plan, masked=masked)
        weights = jnp.exp(logits - lse)
        dlogits = weights * (product(plan, dout, self.value, ROWS_BY_ROWS) - delta)
        cap = plan.logit_cap
        return (
            weights,
            dlogits,
            dlogits if cap is None else dlogits * (1.0 - jnp.square(products / cap)),
        )


class Online(NamedTuple):
    """The online softmax of a block of queries: the largest logit of each, the sum of its
    exponentials and of the values with them as weights, relative to that logit.
    """

    largest: Float[Array, "block 1"]
    total: Float[Array, "block 1"]
    attended: Float[Array, "block value_dim"]

    @classmethod
    def start(cls, block: int, value_dim: int, sink: Any) -> "Online":
        """Returns the softmax before the first tile; `sink` is a logit, or None."""
        return cls(
            jnp.full((block, 1), MASKED if sink is None else sink, jnp.float32),
            jnp.full((block, 1), 0.0 if sink is None else 1.0, jnp.float32),
            jnp.zeros((block, value_dim), jnp.float32),
        )

    def add(self, plan: Plan, tile: Tile, *, masked: bool) -> "Online":
        _, logits = tile.logits(plan, masked=masked)
        largest = jnp.maximum(self.largest, logits.max(axis=1, keepdims=True))
        exponentials, rescale = jnp.exp(logits - largest), jnp.exp(self.largest - largest)
        more = product(plan, exponentials.astype(tile.value.dtype), tile.value, ROWS_BY_COLUMNS)
        return Online(
            largest,
            self.total * rescale + exponentials.sum(axis=1, keepdims=True),
            self.attended * rescale + more,
        )

    def result(self) -> tuple[Float[Array, "block value_dim"], Float[Array, "block 1"]]:
        """Returns the result and the logarithm of the sum of the exponentials of the logits."""
        # A query without visible keys has gathered exp(MASKED - MASKED) = 1 for each key, and gets
        # zeros; with an lse of -MASKED all its weights come out as zero in the backward pass.
        unseen = (self.largest <= MASKED / 2) & (self.total == self.total)  # not if NaN
        total = jnp.where(unseen, 1.0, self.total)
        out = jnp.where(unseen, 0.0, self.attended / total)
        return out, jnp.where(unseen, -MASKED, self.largest + jnp.log(total))


def product(
    plan: Plan, left: Array, right: Array, summed: tuple[int, int]
) -> Float[Array, "rows columns"]:
    dimensions = (((summed[0],), (summed[1],)), ((), ()))
    return lax.dot_general(
        left,
        right,
        dimensions,
        precision=plan.precision,
        preferred_element_type=jnp.float32,
    )
