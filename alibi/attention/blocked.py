"""Attention a tile at a time: exact, with memory linear in the length, on any device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from alibi.attention.call import AttentionCall
from alibi.attention.cpu.rows import dot_rows
from alibi.attention.reference import MASKED
from alibi.attention.skipping import key_ranges
from alibi.attention.tiles import (
    Place,
    Plan,
    Sides,
    make_plan,
    make_sides,
    part_of,
    put_group,
    take_group,
    tile_bias,
    tile_dropout,
    tile_visible,
)

Leaves = tuple[Any, ...]
Trees = tuple[Any, Any]


def blocked_attention(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """softmax(query key^T / sqrt(head_dim) + bias) value by the online softmax (Rabe and Staats 2021; Dao et al. 2022).

    Nothing of the size `[q, k]` is ever held: neither logits nor bias nor, for the
    backward pass, weights. Tiles above the diagonal or outside a window cost nothing, nor do those whose
    keys the steep slopes of ALiBi put out of reach, see `alibi.attention.skipping`.
    """
    *batch, q_length, heads, _ = call.query.shape
    plan = make_plan(call)
    sides = make_sides(call, plan)
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value))
    ranges = key_ranges(call, plan, sides)
    whole = None if call.bias is None else call.bias.folded(len(batch)).padded(*plan.padding)
    # As leaves: jax.custom_vjp puts into them what is no array, and a bias may check what it is made of.
    bias, bias_tree = jax.tree.flatten(whole)
    added, added_tree = jax.tree.flatten(sides)
    attended = _attention(q, k, v, tuple(bias), tuple(added), ranges, plan, (bias_tree, added_tree))
    return attended.reshape(*batch, q_length, heads, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attention(
    q: Array, k: Array, v: Array, bias: Leaves, sides: Leaves, ranges: Array, plan: Plan, trees: Trees
) -> Float[Array, "batch q heads value_dim"]:
    return _forward(q, k, v, bias, sides, ranges, plan, trees, v.dtype)[0]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    bias_leaves: Leaves,
    side_leaves: Leaves,
    ranges: Array,
    plan: Plan,
    trees: Trees,
    dtype: Any,
) -> tuple[Float[Array, "batch q heads value_dim"], Float[Array, "groups group_batch group_heads whole_blocks"]]:
    """The attended values, of `dtype`, and the logarithm of each row's sum of exponentials."""
    bias, sides = jax.tree.unflatten(trees[0], bias_leaves), jax.tree.unflatten(trees[1], side_leaves)

    def add_group(attended: Array, group: tuple[Array, Array]) -> tuple[Array, Array]:
        index, ranges = group
        own = _make_group(index, q, k, v, bias, sides, plan)
        rows, log_total = lax.map(lambda block: _forward_rows(own, *block), (jnp.arange(plan.q_blocks), ranges))
        return put_group(attended, plan, index, _joined(rows)), _joined(log_total[..., None])[..., 0]

    attended = jnp.zeros((*q.shape[:3], v.shape[-1]), dtype)
    return lax.scan(add_group, attended, (jnp.arange(plan.groups), ranges))


@dataclasses.dataclass(frozen=True)
class _Group:
    """Queries, keys and values of one group (some batch entries by some heads), and what is added to their logits."""

    index: Int[Array, ""]
    q: Float[Array, "batch heads q features"]
    k: Float[Array, "batch heads k features"]
    v: Float[Array, "batch heads k value_dim"]
    bias: Any
    sides: Sides
    plan: Plan

    def place(self, q_block: Any, k_block: Any) -> Place:
        return Place(*self.plan.first_of_group(self.index), q_block, k_block)

    def queries(
        self, x: Float[Array, "batch heads q features"], q_block: Any
    ) -> Float[Array, "batch heads block features"]:
        return lax.dynamic_slice_in_dim(x, q_block * self.plan.q_block, self.plan.q_block, axis=2)

    def keys(
        self, x: Float[Array, "batch heads k features"], k_block: Any
    ) -> Float[Array, "batch heads block features"]:
        return lax.dynamic_slice_in_dim(x, k_block * self.plan.k_block, self.plan.k_block, axis=2)

    def logits(
        self,
        q: Float[Array, "batch heads q features"],
        k: Float[Array, "batch heads k features"],
        place: Place,
        bias: Any,
    ) -> Float[Array, "batch heads q k"]:
        """Scaled, biased and masked, float32."""
        logits = _product(q, k, 3, 3, self.plan) * q.shape[-1] ** -0.5
        if bias is not None:  # cut to the tile
            logits = logits + tile_bias(bias, self.plan, self.sides, place)
        visible = tile_visible(self.plan, self.sides, place)
        return logits if visible is None else jnp.where(visible, logits, MASKED)

    def bias_of(self, place: Place) -> Any:
        return None if self.bias is None else self.bias.cut(part_of(self.plan, place))

    def dropout(self, weights: Float[Array, "batch heads q k"], place: Place) -> Float[Array, "batch heads q k"]:
        keep = tile_dropout(self.plan, self.sides, place)
        return weights if keep is None else weights * keep


def _make_group(index: Array, q: Array, k: Array, v: Array, bias: Any, sides: Sides, plan: Plan) -> _Group:
    """The group of this number, of the call's whole queries, keys and values."""
    q = take_group(q, plan, index, plan.q_blocks * plan.q_block)
    k, v = (take_group(x, plan, index, plan.k_blocks * plan.k_block) for x in (k, v))
    return _Group(index, q, k, v, bias, sides, plan)


def _forward_rows(group: _Group, q_block: Array, key_range: Int[Array, " two"]) -> tuple[Array, Array]:
    """One block of queries against its range of blocks of keys."""
    q = group.queries(group.q, q_block)

    def add(k_block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, attended = state
        place = group.place(q_block, k_block)
        logits = group.logits(q, group.keys(group.k, k_block), place, group.bias_of(place))
        larger = jnp.maximum(largest, logits.max(axis=-1))
        exponentials = jnp.exp(logits - larger[..., None])
        rescale = jnp.exp(largest - larger)
        dropped = group.dropout(exponentials, place).astype(group.v.dtype)
        of_tile = _product(dropped, group.keys(group.v, k_block), 3, 2, group.plan)
        return larger, total * rescale + exponentials.sum(axis=-1), attended * rescale[..., None] + of_tile

    rows = q.shape[:3]
    start = (jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((*rows, group.v.shape[-1])))
    largest, total, attended = lax.fori_loop(key_range[0], key_range[1], add, start)
    # A row that has seen no key has exp(MASKED - MASKED) = 1 of each.
    # (XLA's maximum may pass over NaN, the sum doesn't.)
    unseen = (largest <= MASKED / 2) & ~jnp.isnan(total)
    total = jnp.where(unseen, 1.0, total)
    attended = jnp.where(unseen[..., None], 0.0, attended / total[..., None])
    # With which all its weights come out as zero in the backward pass.
    return attended, jnp.where(unseen, -MASKED, largest + jnp.log(total))


def _forward_saving(
    q: Any, k: Any, v: Any, bias: Leaves, sides: Leaves, ranges: Any, plan: Plan, trees: Trees
) -> tuple[Array, tuple[Any, ...]]:
    """As `_forward`, of inputs that know whether their gradients are asked for."""
    q, k, v, ranges = (x.value for x in (q, k, v, ranges))
    bias_values, side_values = (tuple(x.value for x in leaves) for leaves in (bias, sides))
    # Rounded to half precision, the result would make gradients of queries and keys up to 1.4 times as far off; so
    # it is kept as float32, 4 bytes for each of its numbers more.
    attended, log_total = _forward(q, k, v, bias_values, side_values, ranges, plan, trees, jnp.float32)
    # Only its presence says, in the backward pass, that the bias learns.
    learned = jnp.zeros(()) if any(x.perturbed for x in bias) else None
    return attended.astype(v.dtype), (q, k, v, bias_values, side_values, ranges, attended, log_total, learned)


def _backward(plan: Plan, trees: Trees, saved: tuple[Any, ...], gradient: Any) -> tuple[Any, ...]:
    q, k, v, bias_leaves, side_leaves, ranges, attended, log_total, learned = saved
    bias, sides = jax.tree.unflatten(trees[0], bias_leaves), jax.tree.unflatten(trees[1], side_leaves)
    if isinstance(gradient, SymbolicZero):
        gradient = jnp.zeros(gradient.shape, gradient.dtype)
    of_bias = None if learned is None else jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), bias)

    def add_group(state: tuple[Any, ...], group: tuple[Array, ...]) -> tuple[tuple[Any, ...], None]:
        of_bias, of_query, of_key, of_value = state
        index, log_total, ranges = group
        own = _make_group(index, q, k, v, bias, sides, plan)
        incoming, result = (take_group(x, plan, index, own.q.shape[2]) for x in (gradient, attended))
        along = dot_rows(incoming, result)
        rows = functools.partial(_backward_rows, own, incoming, along, log_total)
        start = (of_bias, *(jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2])) for x in (own.k, own.v)))
        (of_bias, of_own_key, of_own_value), of_own_query = lax.scan(rows, start, (jnp.arange(plan.q_blocks), ranges))
        scale = q.shape[-1] ** -0.5
        return (
            of_bias,
            put_group(of_query, plan, index, _joined(of_own_query) * scale),
            put_group(of_key, plan, index, of_own_key.swapaxes(2, 3) * scale),
            put_group(of_value, plan, index, of_own_value.swapaxes(2, 3)),
        ), None

    start: tuple[Any, ...] = (of_bias, *(jnp.zeros(x.shape, x.dtype) for x in (q, k, v)))
    groups: tuple[Array, ...] = (jnp.arange(plan.groups), log_total, ranges)
    (of_bias, of_query, of_key, of_value), _ = lax.scan(add_group, start, groups)
    if of_bias is not None:
        of_bias = tuple(x.astype(like.dtype) for x, like in zip(jax.tree.leaves(of_bias), bias_leaves, strict=True))
    return of_query, of_key, of_value, of_bias, None, None


def _backward_rows(
    group: _Group,
    gradient: Float[Array, "batch heads q value_dim"],
    along: Float[Array, "batch heads q"],
    log_total: Float[Array, "batch heads q"],
    state: tuple[Any, Array, Array],
    block: tuple[Array, Array],
) -> tuple[tuple[Any, Array, Array], Float[Array, "batch heads block features"]]:
    """One block of queries: adds to the gradients of bias, keys and values, of which the last two are turned.

    They are `[batch, heads, features, k]`.
    """
    q_block, key_range = block
    plan, q, incoming = group.plan, group.queries(group.q, q_block), group.queries(gradient, q_block)
    along, log_total = (group.queries(x[..., None], q_block) for x in (along, log_total))
    # With the small operand first and transposed, products that contract the queries of
    # [q, k] take a third of the time on a CPU.
    turned_q, turned_incoming = q.swapaxes(2, 3), incoming.swapaxes(2, 3)

    def add(k_block: Array, state: tuple[Array, Any, Array, Array]) -> tuple[Array, Any, Array, Array]:
        of_query, of_bias, of_key, of_value = state
        place = group.place(q_block, k_block)
        k, v = group.keys(group.k, k_block), group.keys(group.v, k_block)
        logits, to_bias = jax.vjp(functools.partial(group.logits, q, k, place), group.bias_of(place))
        weights = jnp.exp(logits - log_total)
        of_weights = group.dropout(_product(incoming, v, 3, 3, plan), place)
        of_logits = weights * (of_weights - along)
        if of_bias is not None:
            of_bias = of_bias.with_added(to_bias(of_logits)[0], part_of(plan, place))
        of_logits = of_logits.astype(q.dtype)
        dropped = group.dropout(weights, place).astype(v.dtype)
        of_query = of_query + _product(of_logits, k, 3, 2, plan)
        of_key = _added(of_key, _product(turned_q, of_logits, 3, 2, plan), k_block * plan.k_block)
        of_value = _added(of_value, _product(turned_incoming, dropped, 3, 2, plan), k_block * plan.k_block)
        return of_query, of_bias, of_key, of_value

    start = (jnp.zeros(q.shape), *state)
    of_query, *state = lax.fori_loop(key_range[0], key_range[1], add, start)
    return tuple(state), of_query


_attention.defvjp(_forward_saving, _backward, symbolic_zeros=True)


def _added(
    x: Float[Array, "batch heads features k"], part: Array, start: Array
) -> Float[Array, "batch heads features k"]:
    """`x` with `part` added to its columns from `start`."""
    old = lax.dynamic_slice_in_dim(x, start, part.shape[-1], axis=3)
    return lax.dynamic_update_slice_in_dim(x, old + part, start, axis=3)


def _joined(blocks: Float[Array, "blocks batch heads block features"]) -> Float[Array, "batch heads length features"]:
    return jnp.moveaxis(blocks, 0, 2).reshape(*blocks.shape[1:3], -1, blocks.shape[-1])


def _product(a: Array, b: Array, of_a: int, of_b: int, plan: Plan) -> Float[Array, "batch heads rows columns"]:
    if plan.platform == "cpu" and a.dtype == jnp.bfloat16:
        # As XLA does there itself, except where it has folded a transpose into the product: that it then can't run.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(
        a, b, (((of_a,), (of_b,)), ((0, 1), (0, 1))), precision=plan.precision, preferred_element_type=jnp.float32
    )
