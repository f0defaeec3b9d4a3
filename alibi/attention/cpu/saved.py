"""Attention for CPUs at short lengths: few passes over the logits, and none that a causal mask hides."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from alibi.attention.call import AttentionCall, within
from alibi.attention.cpu.rows import dot_rows
from alibi.attention.reference import MASKED
from alibi.positions.base import Part, rows_and_columns

# (batch * heads, length, features): XLA's CPU backend has products for one batch dimension.
Folded = Float[Array, "batch_heads _ _"]
Exponentials = tuple[Float[Array, "batch_heads _ _"], ...]

# Of a block of queries. Measured: without a backward pass smaller ones are 1.05 to 1.08 times as fast at 1,024 tokens.
LEAST_ROWS, MOST_ROWS, FORWARD_ROWS = 64, 256, 192


def cannot_save(call: AttentionCall) -> str:
    """Why `saved_attention` can't do the call; empty if it can."""
    if call.query.ndim != 4:
        return "query is not [batch, length, heads, head_dim]"
    if reason := call.hides_or_drops or call.wants_weights:
        return reason
    if call.known_positions is None:
        return "positions are not known when it is traced"
    queries, keys = call.known_positions
    aligned = np.array_equal(np.diff(keys), np.ones(keys.size - 1)) and np.array_equal(queries, keys[-queries.size :])
    # Then every query sees its own key; one that saw none would get the mean of all values.
    hides = call.causal or call.window is not None
    return "" if aligned or not hides else "queries do not stand at the last of consecutive keys"


def attention_by_saving(call: AttentionCall) -> Float[Array, "batch q heads value_dim"]:
    """A call that `cannot_save` has no objection to, by `saved_attention`."""
    bias = None
    queries, keys = jnp.asarray(call.query_positions), jnp.asarray(call.key_positions)
    if call.bias is not None:
        whole = Part(queries=(0, queries.size), keys=(0, keys.size))
        bias = call.bias.cut(whole)(queries, keys)
    if call.window is not None:
        near = within(*rows_and_columns(queries, keys), call.window)
        hidden = jnp.where(near, 0.0, MASKED)[None]
        shape = call.weights_shape[-3:]
        bias = jnp.broadcast_to(hidden, shape) if bias is None else bias + jnp.broadcast_to(hidden, bias.shape)
    return saved_attention(call.query, call.key, call.value, bias, causal=call.causal, precision=call.precision)


def saved_attention(
    query: Float[Array, "batch q heads head_dim"],
    key: Float[Array, "batch k heads head_dim"],
    value: Float[Array, "batch k heads value_dim"],
    bias: Float[Array, "*batch heads q k"] | None,
    *,
    causal: bool,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "batch q heads value_dim"]:
    """softmax(query key^T / sqrt(head_dim) + bias) value, differentiable in reverse mode in all four.

    Queries are taken in blocks of rows, each with the keys up to its end, so that half
    of the logits above the diagonal cost nothing. The exponentials of the logits are
    kept for the backward pass (memory grows with the square of the length), and what is
    divided by their sums is the product with the values, which is smaller. All is computed
    in float32, as CPUs do with half precision anyway; only the exponentials are kept in the
    dtype of `value`, which the result has too. No size may be zero.

    Args:
      bias: added to the scaled logits, float32, for all sequences or for each; its gradient costs nothing where
        it is a constant.
      causal: query i sees keys 0..i + k - q: the last query stands at the last key. A
        query before the first key gives zeros.
      precision: of the products.
    """
    unseen = max(0, query.shape[1] - key.shape[1]) if causal else 0
    if unseen:
        query, bias = query[:, unseen:], None if bias is None else bias[..., unseen:, :]
    wide = (x.astype(jnp.float32) for x in (query, key, value))
    attended = _attention(*wide, bias, causal, precision, value.dtype).astype(value.dtype)
    return jnp.pad(attended, ((0, 0), (unseen, 0), (0, 0), (0, 0))) if unseen else attended


def query_blocks(q_length: int, most: int) -> list[tuple[int, int]]:
    """Ranges of rows: four, but of 64 to `most` rows each (measured: what a finer cut saves, its overhead costs)."""
    rows = min(most, max(LEAST_ROWS, -(-q_length // 4)))
    return [(start, min(start + rows, q_length)) for start in range(0, q_length, rows)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attention(
    query: Array, key: Array, value: Array, bias: Array | None, causal: bool, precision: Any, kept: Any
) -> Array:
    return _forward(query, key, value, bias, causal, precision, kept, FORWARD_ROWS)[0]


def _forward(
    query: Array, key: Array, value: Array, bias: Array | None, causal: bool, precision: Any, kept: Any, most_rows: int
) -> tuple[Array, tuple[Folded, Folded, Folded, Array, Exponentials, tuple[Array, ...]]]:
    """Of float32; the exponentials are kept in the dtype `kept`."""
    batch, q_length, _, head_dim = query.shape
    # Barriers here and below: XLA would fold these transposes into the products, and
    # compute products of strided operands at a fraction of the speed. (The queries are
    # scaled, since XLA would write a factor of the logits out as large as those.)
    q, k, v = lax.optimization_barrier((_fold(query * head_dim**-0.5), _fold(key), _fold(value)))
    outputs, exponentials, totals = [], [], []
    for start, stop in query_blocks(q_length, most_rows):
        seen = _keys_seen(stop, q_length, k.shape[1], causal)
        logits = _product(q[:, start:stop], k[:, :seen], 2, 2, precision)
        logits = _biased(logits, bias, batch, start, q_length, k.shape[1], causal)
        largest = logits.max(axis=-1, keepdims=True)
        exponentials.append(lax.optimization_barrier(jnp.exp(logits - largest).astype(kept)))
        # Of what is kept, so that the weights of a row sum to one in the backward pass too.
        exponential = exponentials[-1].astype(jnp.float32)
        totals.append(exponential.sum(axis=-1, keepdims=True))
        outputs.append(_product(exponential, v[:, :seen], 2, 1, precision) / totals[-1])
    attended = _unfold(jnp.concatenate(outputs, axis=1), batch)
    return attended, (q, k, v, attended, tuple(exponentials), tuple(totals))


def _forward_saving(
    query: Any, key: Any, value: Any, bias: Any, causal: bool, precision: Any, kept: Any
) -> tuple[Array, tuple]:
    """As `_forward`, of inputs that know whether their gradients are asked for."""
    added = None if bias is None else bias.value
    attended, saved = _forward(query.value, key.value, value.value, added, causal, precision, kept, MOST_ROWS)
    # Only its presence says, in the backward pass, that the bias learns.
    learned = jnp.zeros((*added.shape[:-3], 0)) if added is not None and bias.perturbed else None
    return attended, (*saved, learned)


def _backward(
    causal: bool, precision: Any, kept: Any, saved: tuple, gradient: Any
) -> tuple[Array, Array, Array, Array | None]:
    q, k, v, attended, exponentials, totals, learned = saved
    if isinstance(gradient, SymbolicZero):
        gradient = jnp.zeros(gradient.shape, gradient.dtype)
    batch, q_length, head_dim = gradient.shape[0], q.shape[1], q.shape[-1]
    along = _fold(dot_rows(gradient, attended)[..., None])
    incoming = lax.optimization_barrier(_fold(gradient))
    of_query, of_bias = [], []
    of_key = of_value = jnp.zeros(())
    for (start, stop), narrow, total in zip(query_blocks(q_length, MOST_ROWS), exponentials, totals, strict=True):
        rows, seen, exponential = slice(start, stop), narrow.shape[-1], narrow.astype(jnp.float32)
        part, of_total = lax.optimization_barrier((incoming[:, rows] / total, along[:, rows] / total))
        of_logits = exponential * (_product(part, v[:, :seen], 2, 2, precision) - of_total)
        if learned is not None:
            of_rows = of_logits.reshape(batch, -1, *of_logits.shape[1:])
            of_bias.append(_widened(of_rows if learned.ndim > 1 else of_rows.sum(axis=0), k.shape[1]))
        of_logits = lax.optimization_barrier(of_logits)
        of_query.append(_product(of_logits, k[:, :seen], 2, 1, precision))
        # These contract the rows of [rows, keys]. With the small operand first and already
        # transposed they take half the time; `_unfold_transposed` turns the small results.
        turned_query, turned_part = lax.optimization_barrier((_turned(q[:, rows]), _turned(part)))
        of_key = of_key + _widened(_product(turned_query, of_logits, 2, 1, precision), k.shape[1])
        of_value = of_value + _widened(_product(turned_part, exponential, 2, 1, precision), k.shape[1])
    return (
        _unfold(jnp.concatenate(of_query, axis=1) * head_dim**-0.5, batch),
        _unfold_transposed(of_key, batch),
        _unfold_transposed(of_value, batch),
        jnp.concatenate(of_bias, axis=-2) if of_bias else None,
    )


_attention.defvjp(_forward_saving, _backward, symbolic_zeros=True)


def _keys_seen(stop: int, q_length: int, k_length: int, causal: bool) -> int:
    return stop + k_length - q_length if causal else k_length


def _biased(
    logits: Float[Array, "batch_heads rows keys"],
    bias: Array | None,
    batch: int,
    start: int,
    q_length: int,
    k_length: int,
    causal: bool,
) -> Float[Array, "batch_heads rows keys"]:
    """Logits of the block of queries from `start` with what is added to them and the causal mask."""
    _, rows, seen = logits.shape
    added = jnp.zeros((1, rows, seen))
    if bias is not None:
        added = bias[..., start : start + rows, :seen].astype(jnp.float32)
    if causal:
        last = np.arange(start, start + rows) + k_length - q_length
        # A query of a block sees at least its own key, so the exponentials of hidden ones are exactly zero.
        visible = np.arange(seen)[None, :] <= last[:, None]
        added = jnp.where(jnp.asarray(visible.reshape((1,) * (added.ndim - 2) + visible.shape)), added, MASKED)
    heads = logits.shape[0] // batch
    added = jnp.broadcast_to(added[None] if added.ndim == 3 else added, (batch, heads, rows, seen))
    return logits + added.reshape(logits.shape)


def _product(a: Folded, b: Folded, of_a: int, of_b: int, precision: Any) -> Float[Array, "batch_heads rows columns"]:
    dimensions = (((of_a,), (of_b,)), ((0,), (0,)))
    return lax.dot_general(a, b, dimensions, precision=precision)


def _fold(x: Float[Array, "batch length heads features"]) -> Folded:
    batch, length, heads, features = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch * heads, length, features)


def _unfold(x: Folded, batch: int) -> Float[Array, "batch length heads features"]:
    return x.reshape(batch, -1, *x.shape[1:]).transpose(0, 2, 1, 3)


def _unfold_transposed(
    x: Float[Array, "batch_heads features length"], batch: int
) -> Float[Array, "batch length heads features"]:
    heads, features, length = x.shape[0] // batch, *x.shape[1:]
    # By way of a matrix: XLA writes the result once. A transpose straight to four
    # dimensions it writes once for each use (the dense layer's product and its bias).
    rows = lax.optimization_barrier(x).reshape(batch, heads * features, length).transpose(0, 2, 1)
    rows = lax.optimization_barrier(rows.reshape(batch * length, heads * features))
    return rows.reshape(batch, length, heads, features)


def _turned(x: Folded) -> Float[Array, "batch_heads features length"]:
    return x.transpose(0, 2, 1)


def _widened(x: Float[Array, "... keys"], k_length: int) -> Float[Array, "... k"]:
    """With zeros for the keys that a block doesn't see."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, k_length - x.shape[-1])])
