"""Attention for CPUs at short lengths: it keeps the logits' exponentials for the backward
pass.

With `dout`, the gradient of the result `out`, and `delta`, the sum of dout * out over features,
weights are exponentials / totals, and as in FlashAttention

    dv = weights^T dout    dlogits = weights * (dout v^T - delta)    dq = dlogits k    dk = dlogits^T q

A sink adds its exponential to the totals, and its logit has the gradient -exponential * delta / total.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from alibi.attention.call import AttentionCall
from alibi.attention.visible import Sight
from alibi.numerics.kernels import in_own_kernel
from alibi.numerics.products import transposed, written_out
from alibi.numerics.sums import dot_rows, sum_first
from alibi.positions.bias import MASKED, Part, consecutive
from alibi.positions.shapes import PerHead

# (batch * heads, length, features), since XLA's CPU backend has fast products for one batch
# dimension alone.
Folded = Float[Array, "batch_heads _ _"]
# one for each query block, none without a bias
Biases = tuple[Float[Array, "*batch heads _ _"], ...]

LEAST_ROWS, MOST_ROWS = 64, 192  # queries of a block, but for the last, which may have fewer


class QueryBlock(NamedTuple):
    """Queries that are computed together.

    Attributes:
      start, stop: the first query, and the query after the last.
      first_key: the key at the first query's position.
      seen: how many keys the last query sees, from the first key on.
    """

    start: int
    stop: int
    first_key: int
    seen: int


class _Settings(NamedTuple):
    """The call's static values.

    Attributes:
      shifts: True without a sink: a constant may be subtracted from a query's logits.
    """

    sight: Sight
    precision: lax.PrecisionLike
    shifts: bool


def cannot_save(call: AttentionCall) -> str:
    """Returns why `saved_attention` can't do the call, or an empty string."""
    if call.query.ndim != 4:
        return "query is not [batch, length, heads, head_dim]"
    if call.known_positions is None:
        rises = call.ascending and call.options.window is None
        return "" if rises else "positions are not known when it is traced"
    queries, keys = call.known_positions
    # Then every query sees its own key. (A query without visible keys would get the mean of all
    # values.)
    aligned = consecutive(keys) and np.array_equal(queries, keys[-queries.size :])
    hides = call.causal or call.options.window is not None
    return "" if aligned or not hides else "queries do not stand at the last of consecutive keys"


def saved_attention(call: AttentionCall) -> Float[Array, "batch q heads value_dim"]:
    """Computes softmax(query key^T / sqrt(head_dim) + bias) value, differentiable in reverse mode.

    Each query block is multiplied with the keys up to the block's end, so that at least half the
    logits above the diagonal are never computed, nor is their bias. The logits' exponentials are
    kept for the backward pass. Their memory grows with the length squared. Their sums divide the
    product with the values, which is smaller than they are. Products' operands and kept
    exponentials have the inputs' dtype, all else is float32.

    Query i stands at key i + k - q.
    """
    sink = None if call.sink is None else call.sink.astype(jnp.float32)
    blocks = query_blocks(call.query.shape[1], call.key.shape[1], causal=call.causal)
    # The barrier makes XLA write each bias once; else it computes it again for each sequence.
    biases = () if call.bias is None else lax.optimization_barrier(_biases(call, blocks))
    settings = _Settings(call.sight, call.precision, shifts=sink is None)
    out = _attention(call.query, call.key, call.value, biases, sink, settings)
    return out.astype(call.value.dtype)


def query_blocks(q_length: int, k_length: int, *, causal: bool) -> list[QueryBlock]:
    """Returns all query blocks.

    Each has a quarter of all queries, but at least `LEAST_ROWS` and at most `MOST_ROWS`. The last has
    the rest. More and smaller blocks save as much as they cost (measured).
    """
    rows = min(MOST_ROWS, max(LEAST_ROWS, -(-q_length // 4)))
    first = k_length - q_length  # the key at the first query's position
    stops = [(start, min(start + rows, q_length)) for start in range(0, q_length, rows)]
    return [
        QueryBlock(start, stop, start + first, stop + first if causal else k_length)
        for start, stop in stops
    ]


def _biases(call: AttentionCall, blocks: list[QueryBlock]) -> Biases:
    """Returns the bias for each query block, `[*batch, heads, q, k]`, or one row for all its
    queries.
    """
    # The barrier is for the backward pass: else XLA adds up the gradients of all blocks again in
    # each kernel that uses the sum.
    bias = lax.optimization_barrier(call.bias)
    queries, keys = jnp.asarray(call.query_positions), jnp.asarray(call.key_positions)
    term = bias.key_term
    if term is not None and call.sink is None:
        return tuple(jnp.swapaxes(term, 1, 2)[:, :, None, : block.seen] for block in blocks)

    def of_block(block: QueryBlock) -> Array:
        part = Part(queries=(block.start, block.stop - block.start), keys=(0, block.seen))
        return bias.cut(part)(queries[..., block.start : block.stop], keys[..., : block.seen])

    return tuple(map(of_block, blocks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(
    query: Array,
    key: Array,
    value: Array,
    biases: Biases,
    sink: PerHead | None,
    settings: _Settings,
) -> Array:
    return _forward(query, key, value, biases, sink, settings)[0]


def _forward(
    query: Array,
    key: Array,
    value: Array,
    biases: Biases,
    sink: PerHead | None,
    settings: _Settings,
) -> tuple[Array, tuple[Any, ...]]:
    """Returns `out`, float32, and the values saved for the backward pass.

    These include the exponentials for each query block, their sums (`totals`), and
    the sink's exponentials (`drained`, empty without a sink).
    """
    batch = query.shape[0]
    # Here and below barriers keep XLA from folding transposes into products, which are many times
    # slower with strided operands.
    q, k, v = (written_out(_fold(x)) for x in (query, key, value))
    outputs, exponentials, totals, drained = [], [], [], []
    of_rows = None if sink is None else jnp.tile(sink, batch)[:, None, None]
    blocks = query_blocks(q.shape[1], k.shape[1], causal=settings.sight.causal)
    for block, bias in zip(blocks, biases or (None,) * len(blocks), strict=True):
        logits = _product(q[:, block.start : block.stop], k[:, : block.seen], 2, 2, settings)
        logits = _biased(logits * query.shape[-1] ** -0.5, bias, batch, block, settings)
        largest = logits.max(axis=-1, keepdims=True)
        if of_rows is not None:
            largest = jnp.maximum(largest, of_rows)
            drained.append(jnp.exp(of_rows - largest))
        exponential = lax.optimization_barrier(jnp.exp(logits - largest).astype(v.dtype))
        exponentials.append(exponential)
        # Sums of the rounded exponentials, so that the weights of a row sum to one in the backward
        # pass.
        totals.append(exponential.astype(jnp.float32).sum(axis=-1, keepdims=True))
        if of_rows is not None:
            totals[-1] = totals[-1] + drained[-1]
        outputs.append(_product(exponential, v[:, : block.seen], 2, 1, settings) / totals[-1])
    out = _unfold(jnp.concatenate(outputs, axis=1), batch)
    return out, (q, k, v, out, tuple(exponentials), tuple(totals), tuple(drained))


def _forward_saving(
    query: Any, key: Any, value: Any, biases: Any, sink: Any, settings: _Settings
) -> tuple[Array, tuple]:
    """Returns `_forward`'s results. Inputs say if their gradients are wanted (`perturbed`)."""
    # None if the gradient of the bias is not wanted; else empty arrays that hold its shape.
    wanted = any(bias.perturbed for bias in biases)
    query, key, value, added, sink = jax.tree.map(
        lambda x: x.value, (query, key, value, biases, sink)
    )
    out, saved = _forward(query, key, value, added, sink, settings)
    learned = (
        tuple(jnp.zeros((*bias.shape[:-1], 0), jnp.float32) for bias in added) if wanted else None
    )
    return out, (*saved, learned)


def _backward(
    settings: _Settings, saved: tuple, dout: Any
) -> tuple[Array, Array, Array, Biases | None, PerHead | None]:
    q, k, v, out, exponentials, totals, drained, learned = saved
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    batch, q_length, k_length = dout.shape[0], q.shape[1], k.shape[1]
    delta = _fold(dot_rows(dout, out)[..., None])
    folded_dout = written_out(_fold(dout.astype(v.dtype)))
    dq, dbias, dsink = [], [], []
    dk = dv = jnp.zeros((), jnp.float32)
    blocks = query_blocks(q_length, k_length, causal=settings.sight.causal)
    for index, (block, exponential, total) in enumerate(
        zip(blocks, exponentials, totals, strict=True)
    ):
        rows, seen = slice(block.start, block.stop), block.seen
        block_dout, inverse = folded_dout[:, rows], 1.0 / total
        dweights = _product(block_dout, v[:, :seen], 2, 2, settings)
        dlogits = exponential.astype(jnp.float32) * ((dweights - delta[:, rows]) * inverse)
        if learned is not None:
            dlogits = lax.optimization_barrier(dlogits)
            dbias.append(_bias_gradient(dlogits, learned[index], batch, settings))
        # an operand of two products
        dlogits = lax.optimization_barrier(dlogits.astype(q.dtype))
        if drained:
            dsink.append(-(drained[index] * inverse * delta[:, rows]).sum(axis=(1, 2)))
        dq.append(_product(dlogits, k[:, :seen], 2, 1, settings))
        # These two products contract queries. With the small operand first and already transposed
        # they take half the time; `_unfold_transposed` transposes the small results back.
        unseen = [(0, 0), (0, 0), (0, k_length - seen)]
        dk = dk + jnp.pad(_product(transposed(q[:, rows]), dlogits, 2, 1, settings), unseen)
        scaled_dout = (block_dout.astype(jnp.float32) * inverse).astype(v.dtype)
        dv = dv + jnp.pad(_product(transposed(scaled_dout), exponential, 2, 1, settings), unseen)
    scale = q.shape[-1] ** -0.5
    of_query = _unfold(jnp.concatenate(dq, axis=1) * scale, batch)
    # A step between the dense layer and the keys may use each feature twice, as rotary embeddings
    # do; XLA would then add up the gradients of all blocks twice. For values, which come from the
    # layer itself, a kernel costs more than it saves.
    of_key = in_own_kernel(lambda dk: _unfold(dk.swapaxes(1, 2) * scale, batch), dk)
    return (
        of_query.astype(q.dtype),
        of_key.astype(k.dtype),
        _unfold_transposed(dv, batch).astype(v.dtype),
        None if learned is None else tuple(dbias),
        jnp.stack(dsink).reshape(len(dsink) * batch, -1).sum(axis=0) if drained else None,
    )


_attention.defvjp(_forward_saving, _backward, symbolic_zeros=True)


def _biased(
    logits: Float[Array, "batch_heads rows seen"],
    bias: Float[Array, "*batch heads _ seen"] | None,
    batch: int,
    block: QueryBlock,
    settings: _Settings,
) -> Float[Array, "batch_heads rows seen"]:
    """Returns a query block's logits with bias and masks."""
    _, rows, seen = logits.shape
    pairs = np.arange(block.first_key, block.first_key + rows)[:, None], np.arange(seen)[None, :]
    # Each query sees at least its own key, so the exponentials of hidden keys are exactly zero.
    every = np.ones((rows, seen), bool)
    visible = functools.reduce(np.logical_and, settings.sight.of_pairs(*pairs), every)
    added = jnp.zeros((1, rows, seen), jnp.float32)
    if bias is not None and bias.shape[-2] == 1 and settings.shifts:
        # Softmax ignores a constant; without it the terms of near keys are small enough to be exact.
        # They are added before the mask, which would write them out for each query.
        terms = bias.astype(jnp.float32)
        terms = terms - terms[..., min(max(block.first_key, 0), seen - 1)][..., None]
        logits = logits + jnp.broadcast_to(terms, (batch, *terms.shape[-3:])).reshape(-1, 1, seen)
    elif bias is not None:
        added = bias.astype(jnp.float32)
    if not visible.all():
        added = jnp.where(
            jnp.asarray(visible.reshape((1,) * (added.ndim - 2) + visible.shape)), added, MASKED
        )
    heads = logits.shape[0] // batch
    added = jnp.broadcast_to(added[None] if added.ndim == 3 else added, (batch, heads, rows, seen))
    return logits + added.reshape(logits.shape)


def _bias_gradient(
    dlogits: Folded, like: Float[Array, "*batch heads _ _"], batch: int, settings: _Settings
) -> Array:
    """Returns the gradient for a block's bias, shaped as `like` but for the keys."""
    seen = dlogits.shape[-1]
    if like.shape[-2] == 1:  # a product is the fastest sum over rows
        dlogits = _product(jnp.ones((*dlogits.shape[:2], 1), jnp.float32), dlogits, 1, 1, settings)
    by_sequence = dlogits.reshape(batch, -1, *dlogits.shape[1:])
    shared = like.ndim == 3 or like.shape[0] == 1
    return sum_first(by_sequence).reshape(*like.shape[:-1], seen) if shared else by_sequence


def _product(a: Folded, b: Folded, axis_a: int, axis_b: int, settings: _Settings) -> Folded:
    dimensions = (((axis_a,), (axis_b,)), ((0,), (0,)))
    return lax.dot_general(
        a, b, dimensions, precision=settings.precision, preferred_element_type=jnp.float32
    )


def _fold(x: Float[Array, "batch length heads features"]) -> Folded:
    batch, length, heads, features = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch * heads, length, features)


def _unfold(x: Folded, batch: int) -> Float[Array, "batch length heads features"]:
    return x.reshape(batch, -1, *x.shape[1:]).transpose(0, 2, 1, 3)


def _unfold_transposed(
    x: Float[Array, "batch_heads features length"], batch: int
) -> Float[Array, "batch length heads features"]:
    heads, features, length = x.shape[0] // batch, *x.shape[1:]
    # As a matrix first, since XLA then writes the result once; after a transpose to four dimensions
    # it would write it for each use, in the dense layer's product and in its bias.
    rows = lax.optimization_barrier(x).reshape(batch, heads * features, length).transpose(0, 2, 1)
    rows = lax.optimization_barrier(rows.reshape(batch * length, heads * features))
    return rows.reshape(batch, length, heads, features)
