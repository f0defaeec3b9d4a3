"""Attention by tiles: exact, with memory linear in the length, on any device.

The algorithm is FlashAttention's (Dao et al. 2022). A tile is one block of queries against one
block of keys. The forward pass goes through the tiles of a block of queries by the online softmax
and keeps, besides the result `out`, one number for each query: `lse`, the logarithm of the
sum of the exponentials of its logits. The backward pass computes the weights of each tile again
as exp(logits - lse). With `dout`, the gradient of `out`, and `delta`, the sum of dout * out over features,

    dv = weights^T dout    dlogits = weights * (dout v^T - delta)    dq = dlogits k    dk = dlogits^T q

The gradient of the bias, `dbias`, is that of the logits, tile by tile. Where the bias adds to the
values, v stands above for what each query sees, and `Bias.of_values` and its derivative take the products with it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from alibi.attention.call import AttentionCall
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
    tile_values,
    tile_visible,
)
from alibi.cpu.rows import dot_rows, sum_first

Leaves = tuple[Any, ...]
Trees = tuple[Any, Any]


def blocked_attention(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """softmax(query key^T / sqrt(head_dim) + bias) value by the online softmax (Rabe and Staats 2021; Dao et al. 2022).

    Nothing of the size `[q, k]` is ever held: neither the logits nor their bias nor, for
    the backward pass, the weights. Tiles that the causal mask or a window hides are not computed, nor
    are those that a bounded bias proves to be without influence, see `alibi.attention.skipping`.
    """
    *batch, q_length, heads, _ = call.query.shape
    plan = make_plan(call)
    sides = make_sides(call, plan)
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value))
    ranges = key_ranges(call, plan, sides)
    whole = None if call.bias is None else call.bias.folded(len(batch)).padded(*plan.padding)
    # Flattened, since jax.custom_vjp passes objects that are no arrays, which a class that checks its fields refuses.
    bias, bias_tree = jax.tree.flatten(whole)
    side_leaves, side_tree = jax.tree.flatten(sides)
    out = _attention(q, k, v, tuple(bias), tuple(side_leaves), ranges, plan, (bias_tree, side_tree))
    return out.reshape(*batch, q_length, heads, -1)


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
    """`out`, of `dtype`, and `lse`, which comes group by group as the backward pass will read it."""
    bias, sides = jax.tree.unflatten(trees[0], bias_leaves), jax.tree.unflatten(trees[1], side_leaves)

    def add_group(out: Array, group: tuple[Array, Array]) -> tuple[Array, Array]:
        index, ranges = group
        own = _make_group(index, q, k, v, bias, sides, plan)
        rows, lse = lax.map(lambda block: _forward_rows(own, *block), (jnp.arange(plan.q_blocks), ranges))
        return put_group(out, plan, index, _joined(rows)), _joined(lse[..., None])[..., 0]

    out = jnp.zeros((*q.shape[:3], v.shape[-1]), dtype)
    return lax.scan(add_group, out, (jnp.arange(plan.groups), ranges))


@dataclasses.dataclass(frozen=True)
class _Group:
    """What is computed at one time: some batch entries by some heads, with their queries, keys, values and bias.

    Attributes:
      index: the number of the group.
      q, k, v: of the group, filled up with zeros to whole blocks.
      bias, sides: of the whole call; each tile cuts its own part out of them.
    """

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
        added: Any,
    ) -> Float[Array, "batch heads q k"]:
        """The logits of one tile, scaled, with the values of its bias and masked, float32."""
        logits = _product(q, k, 3, 3, self.plan) * q.shape[-1] ** -0.5
        if added is not None:
            logits = logits + added
        visible = tile_visible(self.plan, self.sides, place)
        return logits if visible is None else jnp.where(visible, logits, MASKED)

    def bias_of(self, place: Place) -> Any:
        """The bias cut to one tile."""
        return None if self.bias is None else self.bias.cut(part_of(self.plan, place))

    def values_of(self, place: Place, bias: Any) -> Any:
        """The values of a bias that has been cut to one tile; one for all batch entries where they share it."""
        return None if bias is None else tile_bias(bias, self.plan, self.sides, place)

    @property
    def adds_values(self) -> bool:
        return self.bias is not None and self.bias.adds_values

    def added(
        self, place: Place, bias: Any, weights: Float[Array, "batch heads q k"]
    ) -> Float[Array, "batch heads q value_dim"]:
        """What the bias of one tile adds to the results of its queries, if it `adds_values`."""
        return tile_values(bias, weights, self.plan, self.sides, place)

    def dropout(self, weights: Float[Array, "batch heads q k"], place: Place) -> Float[Array, "batch heads q k"]:
        keep = tile_dropout(self.plan, self.sides, place)
        return weights if keep is None else weights * keep


def _make_group(index: Array, q: Array, k: Array, v: Array, bias: Any, sides: Sides, plan: Plan) -> _Group:
    """The group whose number is `index`, taken from the queries, keys and values of the whole call."""
    q = take_group(q, plan, index, plan.q_blocks * plan.q_block)
    k, v = (take_group(x, plan, index, plan.k_blocks * plan.k_block) for x in (k, v))
    return _Group(index, q, k, v, bias, sides, plan)


def _forward_rows(group: _Group, q_block: Array, key_range: Int[Array, " two"]) -> tuple[Array, Array]:
    """`out` and `lse` of one block of queries, from the blocks of keys in `key_range` (first, after the last)."""
    q = group.queries(group.q, q_block)

    def add(k_block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, out = state
        place = group.place(q_block, k_block)
        bias = group.bias_of(place)
        logits = group.logits(q, group.keys(group.k, k_block), place, group.values_of(place, bias))
        larger = jnp.maximum(largest, logits.max(axis=-1))
        exponentials = jnp.exp(logits - larger[..., None])
        rescale = jnp.exp(largest - larger)
        dropped = group.dropout(exponentials, place)
        of_tile = _product(dropped.astype(group.v.dtype), group.keys(group.v, k_block), 3, 2, group.plan)
        if group.adds_values:
            of_tile = of_tile + group.added(place, bias, dropped)
        return larger, total * rescale + exponentials.sum(axis=-1), out * rescale[..., None] + of_tile

    rows = q.shape[:3]
    start = (jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((*rows, group.v.shape[-1])))
    largest, total, out = lax.fori_loop(key_range[0], key_range[1], add, start)
    # A query that sees no key has gathered exp(MASKED - MASKED) = 1 for each of them, and gets zeros instead.
    # (NaN is looked for in the sum, since XLA's maximum may pass over it.)
    unseen = (largest <= MASKED / 2) & ~jnp.isnan(total)
    total = jnp.where(unseen, 1.0, total)
    out = jnp.where(unseen[..., None], 0.0, out / total[..., None])
    # With an lse of -MASKED all its weights come out as zero in the backward pass.
    return out, jnp.where(unseen, -MASKED, largest + jnp.log(total))


def _forward_saving(
    q: Any, k: Any, v: Any, bias: Leaves, sides: Leaves, ranges: Any, plan: Plan, trees: Trees
) -> tuple[Array, tuple[Any, ...]]:
    """`_forward` and what the backward pass needs; the inputs say whether their gradients are wanted (`perturbed`)."""
    q, k, v, ranges = (x.value for x in (q, k, v, ranges))
    bias_values, side_values = (tuple(x.value for x in leaves) for leaves in (bias, sides))
    # `out` is kept in float32 for delta: rounded to half precision, it would make the errors of dq and dk up to 1.4
    # times as large.
    out, lse = _forward(q, k, v, bias_values, side_values, ranges, plan, trees, jnp.float32)
    # An array if the gradient of the bias is wanted, else None: that is all that the backward pass asks of it.
    learned = jnp.zeros(()) if any(x.perturbed for x in bias) else None
    return out.astype(v.dtype), (q, k, v, bias_values, side_values, ranges, out, lse, learned)


def _backward(plan: Plan, trees: Trees, saved: tuple[Any, ...], dout: Any) -> tuple[Any, ...]:
    q, k, v, bias_leaves, side_leaves, ranges, out, lse, learned = saved
    bias, sides = jax.tree.unflatten(trees[0], bias_leaves), jax.tree.unflatten(trees[1], side_leaves)
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    dbias = None if learned is None else jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), bias)

    def add_group(state: tuple[Any, ...], group: tuple[Array, ...]) -> tuple[tuple[Any, ...], None]:
        dbias, dq, dk, dv = state
        index, lse, ranges = group
        own = _make_group(index, q, k, v, bias, sides, plan)
        group_dout, group_out = (take_group(x, plan, index, own.q.shape[2]) for x in (dout, out))
        delta = dot_rows(group_dout, group_out)
        rows = functools.partial(_backward_rows, own, group_dout, delta, lse)
        start = (dbias, *(jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2])) for x in (own.k, own.v)))
        (dbias, group_dk, group_dv), group_dq = lax.scan(rows, start, (jnp.arange(plan.q_blocks), ranges))
        scale = q.shape[-1] ** -0.5
        return (
            dbias,
            put_group(dq, plan, index, _joined(group_dq) * scale),
            put_group(dk, plan, index, group_dk.swapaxes(2, 3) * scale),
            put_group(dv, plan, index, group_dv.swapaxes(2, 3)),
        ), None

    start: tuple[Any, ...] = (dbias, *(jnp.zeros(x.shape, x.dtype) for x in (q, k, v)))
    groups: tuple[Array, ...] = (jnp.arange(plan.groups), lse, ranges)
    (dbias, dq, dk, dv), _ = lax.scan(add_group, start, groups)
    if dbias is not None:
        dbias = tuple(x.astype(like.dtype) for x, like in zip(jax.tree.leaves(dbias), bias_leaves, strict=True))
    return dq, dk, dv, dbias, None, None


def _backward_rows(
    group: _Group,
    dout: Float[Array, "batch heads q value_dim"],
    delta: Float[Array, "batch heads q"],
    lse: Float[Array, "batch heads q"],
    state: tuple[Any, Array, Array],
    block: tuple[Array, Array],
) -> tuple[tuple[Any, Array, Array], Float[Array, "batch heads block features"]]:
    """The backward pass of one block of queries: its dq, and what it adds to dbias, dk and dv.

    Args:
      dout, delta, lse: of the whole group.
      state: dbias, dk and dv so far; the last two transposed, `[batch, heads, features, k]`.
      block: the number of the block of queries, and its range of blocks of keys.
    """
    q_block, key_range = block
    plan, q, block_dout = group.plan, group.queries(group.q, q_block), group.queries(dout, q_block)
    delta, lse = (group.queries(x[..., None], q_block) for x in (delta, lse))
    # With the small operand first and transposed, products that contract the queries of
    # [q, k] take a third of the time on a CPU.
    transposed_q, transposed_dout = q.swapaxes(2, 3), block_dout.swapaxes(2, 3)

    def add(k_block: Array, state: tuple[Array, Any, Array, Array]) -> tuple[Array, Any, Array, Array]:
        dq, dbias, dk, dv = state
        place = group.place(q_block, k_block)
        k, v = group.keys(group.k, k_block), group.keys(group.v, k_block)
        bias = group.bias_of(place)
        added_to_logits, bias_vjp = jax.vjp(functools.partial(group.values_of, place), bias)
        weights = jnp.exp(group.logits(q, k, place, added_to_logits) - lse)
        dropped, dweights = group.dropout(weights, place), _product(block_dout, v, 3, 3, plan)
        if group.adds_values:
            added, added_vjp = jax.vjp(functools.partial(group.added, place), bias, dropped)
            dbias_of_values, more = added_vjp(block_dout.astype(added.dtype))
            dweights = dweights + more
            if dbias is not None:
                dbias = dbias.with_added(dbias_of_values, part_of(plan, place))
        dlogits = weights * (group.dropout(dweights, place) - delta)
        if dbias is not None:
            # Those of keys that a query does not see are zero, like their weights.
            of_all = dlogits if added_to_logits.shape[0] > 1 else sum_first(dlogits)[None]
            dbias = dbias.with_added(bias_vjp(of_all)[0], part_of(plan, place))
        dlogits = dlogits.astype(q.dtype)
        dropped = dropped.astype(v.dtype)
        dq = dq + _product(dlogits, k, 3, 2, plan)
        dk = _added(dk, _product(transposed_q, dlogits, 3, 2, plan), k_block * plan.k_block)
        dv = _added(dv, _product(transposed_dout, dropped, 3, 2, plan), k_block * plan.k_block)
        return dq, dbias, dk, dv

    start = (jnp.zeros(q.shape), *state)
    dq, *state = lax.fori_loop(key_range[0], key_range[1], add, start)
    return tuple(state), dq


_attention.defvjp(_forward_saving, _backward, symbolic_zeros=True)


def _added(
    x: Float[Array, "batch heads features k"], part: Array, start: Array
) -> Float[Array, "batch heads features k"]:
    """`x` with `part` added to the columns that begin at `start`."""
    old = lax.dynamic_slice_in_dim(x, start, part.shape[-1], axis=3)
    return lax.dynamic_update_slice_in_dim(x, old + part, start, axis=3)


def _joined(blocks: Float[Array, "blocks batch heads block features"]) -> Float[Array, "batch heads length features"]:
    return jnp.moveaxis(blocks, 0, 2).reshape(*blocks.shape[1:3], -1, blocks.shape[-1])


def _product(a: Array, b: Array, of_a: int, of_b: int, plan: Plan) -> Float[Array, "batch heads rows columns"]:
    if plan.platform == "cpu" and a.dtype == jnp.bfloat16:
        # XLA's CPU backend converts them itself, but can't run a bfloat16 product into which it folded a transpose.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(
        a, b, (((of_a,), (of_b,)), ((0, 1), (0, 1))), precision=plan.precision, preferred_element_type=jnp.float32
    )
