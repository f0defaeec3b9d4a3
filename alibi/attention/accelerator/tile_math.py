"""The arithmetic on a tile in all fused kernels."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from alibi.attention.accelerator.plan import KernelPlan
from alibi.attention.online import Online
from alibi.attention.reference import capped
from alibi.positions.bias import MASKED

# the dimensions over which products sum, in the left and in the right factor
ROWS_BY_ROWS, ROWS_BY_COLUMNS, COLUMNS_BY_COLUMNS = (1, 1), (1, 0), (0, 0)


class LoadedTile(NamedTuple):
    """A tile's arrays in a kernel. Rows are queries and columns keys, or the other way round.

    Attributes:
      query_positions, key_positions: a column and a row, or a row and a column. Known positions
        count from the tile's first key.
      key_numbers: the keys' indices in the call.
      segments: for queries and keys, or None.
      slope: m for the head, or None.
      terms: a number for each query and a number for each key, which add up to the bias (`terms_of`),
        or None.
      bias: another bias's values, or None.
      mask: True where a query may see a key, or None.
      by_keys: True if the rows are keys.
    """

    query: Float[Array, "queries head_dim"]
    key: Float[Array, "keys head_dim"]
    value: Float[Array, "keys value_dim"]
    query_positions: Int[Array, "#rows #columns"]
    key_positions: Int[Array, "#rows #columns"]
    key_numbers: Int[Array, "#rows #columns"]
    segments: tuple[Int[Array, "#rows #columns"], Int[Array, "#rows #columns"]] | None
    slope: Any
    terms: tuple[Float[Array, "#rows #columns"], Float[Array, "#rows #columns"]] | None
    bias: Float[Array, "rows columns"] | None
    mask: Bool[Array, "rows columns"] | None
    by_keys: bool = False

    def distances(self, plan: KernelPlan) -> Float[Array, "rows columns"]:
        if plan.metric is not None:
            return plan.metric.between(self.query_positions, self.key_positions)
        if plan.first is None:  # positions may be beyond what float32 counts
            distances = (self.query_positions - self.key_positions).astype(jnp.float32)
        else:
            of_queries, of_keys = self.query_positions, self.key_positions
            distances = of_queries.astype(jnp.float32) - of_keys.astype(jnp.float32)
        return jnp.abs(distances) if plan.symmetric else distances

    def added(self, plan: KernelPlan, lse: Any) -> Any:
        """Returns the bias minus `lse`."""
        terms = self.terms
        if self.slope is not None and (plan.first is None or plan.symmetric):
            return -self.slope * self.distances(plan) - lse
        if self.slope is not None:
            sides = self.query_positions, self.key_positions
            of_queries, of_keys = (self.slope * x.astype(jnp.float32) for x in sides)
            terms = -of_queries, of_keys
        if terms is not None:  # so that a pair costs one addition
            return (terms[0] - lse) + terms[1]
        return -lse if self.bias is None else self.bias - lse

    def visible(self, plan: KernelPlan) -> Bool[Array, "#rows #columns"]:
        """Returns whether each query sees each key."""
        pairs = self.query_positions, self.key_positions, self.segments
        seen = self.key_numbers < plan.k_length
        if self.mask is not None:
            seen = seen & self.mask
        return functools.reduce(jnp.logical_and, plan.sight.of_pairs(*pairs), seen)

    def product(
        self, plan: KernelPlan, of_queries: Array, of_keys: Array
    ) -> Float[Array, "rows columns"]:
        """Returns the queries' vectors times the keys' vectors."""
        left, right = (of_keys, of_queries) if self.by_keys else (of_queries, of_keys)
        return product(plan, left, right, ROWS_BY_ROWS)

    def logits(
        self, plan: KernelPlan, *, masked: bool, lse: Any = 0.0
    ) -> tuple[Float[Array, "rows columns"], Float[Array, "rows columns"]]:
        """Returns the products, capped if there is a cap, and the logits: with bias and mask, minus
        `lse`, times `plan.unit`.
        """
        products, factor = self.product(plan, self.query, self.key), plan.scale * plan.unit
        if plan.logit_cap is not None:
            products, factor = capped(products * plan.scale, plan.logit_cap), plan.unit
        logits = multiply_add(plan, products, factor, self.added(plan, lse))
        return products, jnp.where(self.visible(plan), logits, MASKED) if masked else logits

    def add_to(self, softmax: Online, plan: KernelPlan, *, masked: bool) -> Online:
        """Returns the online softmax after this tile."""

        def attend(exponentials: Array) -> Array:
            return product(plan, exponentials.astype(self.value.dtype), self.value, ROWS_BY_COLUMNS)

        _, logits = self.logits(plan, masked=masked)
        return softmax.add(logits, attend, functools.partial(exponential, plan))

    def gradients(
        self,
        plan: KernelPlan,
        dout: Float[Array, "queries value_dim"],
        lse: Float[Array, "#rows #columns"],
        delta: Float[Array, "#rows #columns"],
        *,
        masked: bool,
    ) -> tuple[Float[Array, "rows columns"], ...]:
        """Returns the weights, and the gradients for logits and for products before the cap."""
        products, logits = self.logits(plan, masked=masked, lse=lse)
        weights = exponential(plan, logits)
        dlogits = weights * (self.product(plan, dout, self.value) - delta)
        cap = plan.logit_cap
        return (
            weights,
            dlogits,
            dlogits if cap is None else dlogits * (1.0 - jnp.square(products / cap)),
        )


def terms_of(
    plan: KernelPlan, of_queries: Array, of_keys: Array, of_first: Any
) -> tuple[Array, Array]:
    """Returns a tile's terms, times `plan.unit`.

    The first key's term moves from keys to queries: running sums are large, and only their
    differences count.
    """
    return plan.unit * (of_queries + of_first), plan.unit * (of_keys - of_first)


def exponential(plan: KernelPlan, logits: Array) -> Array:
    """Returns the exponentials for logits times `plan.unit`."""
    if not plan.on_gpu:
        return jnp.exp(logits)
    # The library's exp2 takes three more instructions, for denormal numbers.
    return jnp.exp2(logits) if plan.interpret else _instruction("ex2.approx.ftz.f32", logits)


def multiply_add(plan: KernelPlan, x: Array, factor: float, more: Any) -> Array:
    """Returns `x * factor + more`."""
    if not plan.on_gpu or plan.interpret:
        return x * factor + more
    # XLA lets no compiler join the two.
    factors, more = (jnp.broadcast_to(jnp.float32(y), x.shape) for y in (factor, more))
    return _instruction("fma.rn.f32", x, factors, more)


def _instruction(name: str, *arrays: Array) -> Array:
    """Applies an NVIDIA instruction to each element."""
    from jax.experimental.pallas import triton  # its import takes a while

    places = ", ".join(f"${index}" for index in range(len(arrays) + 1))
    (result,) = triton.elementwise_inline_asm(
        f"{name} {places};",
        args=list(arrays),
        constraints="=f" + ",f" * len(arrays),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32)],
    )
    return result


def product(
    plan: KernelPlan, left: Array, right: Array, summed: tuple[int, int]
) -> Float[Array, "rows columns"]:
    dimensions = (((summed[0],), (summed[1],)), ((), ()))
    return lax.dot_general(
        left,
        right,
        dimensions,
        precision=plan.precision,
        preferred_element_type=jnp.float32,
    )
