"""Attention for CPUs at short lengths, which keeps the exponentials of the logits for the backward pass.

With `dout`, the gradient of the result `out`, and `delta`, the sum of dout * out over features,
the weights are exponentials / totals, and as in FlashAttention

    dv = weights^T dout    dlogits = weights * (dout v^T - delta)    dq = dlogits k    dk = dlogits^T q

Here dout and delta are divided by the totals in place of the exponentials, which are larger.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from alibi.attention.call import AttentionCall
from alibi.attention.reference import MASKED
from alibi.cpu.rows import dot_rows, sum_first
from alibi.positions.bias import Part
from alibi.positions.kernels import in_own_kernel

# (batch * heads, length, features), since XLA's CPU backend has fast products for one batch dimension alone.
Folded = Float[Array, "batch_heads _ _"]
Exponentials = tuple[Float[Array, "batch_heads _ _"], ...]
Biases = tuple[Float[Array, "*batch heads _ _"], ...]  # of each block of queries; empty where there is none

LEAST_ROWS, MOST_ROWS = 64, 192  # how many queries a block has, but for the last, which may have fewer


class QueryBlock(NamedTuple):
    """Queries that are computed together.

    Attributes:
      start, stop: the first of them, and the one after the last.
      own: the key where the first of them stands.
      seen: how many keys, from the first on, the last of them sees.
    """

    start: int
    stop: int
    own: int
    seen: int


BiasOfBlock = Callable[[QueryBlock], Float[Array, "*batch heads _ seen"]]


def cannot_save(call: AttentionCall) -> str:
    """Why `saved_attention` can't do the call; empty if it can."""
    if call.query.ndim != 4:
        return "query is not [batch, length, heads, head_dim]"
    if reason := call.hides_or_drops or call.wants_weights or call.adds_values:
        return reason
    if call.known_positions is None:
        return "" if call.ascending and call.window is None else "positions are not known when it is traced"
    queries, keys = call.known_positions
    aligned = np.array_equal(np.diff(keys), np.ones(keys.size - 1)) and np.array_equal(queries, keys[-queries.size :])
    # Then every query sees its own key. (A query that saw no key would get the mean of all values.)
    hides = call.causal or call.window is not None
    return "" if aligned or not hides else "queries do not stand at the last of consecutive keys"


def attention_by_saving(call: AttentionCall) -> Float[Array, "batch q heads value_dim"]:
    """The call by `saved_attention`; it must be one that `cannot_save` has no reason against."""
    biases = None if call.bias is None else _biases(call)
    return saved_attention(
        call.query, call.key, call.value, biases, causal=call.causal, window=call.window, precision=call.precision
    )


def _biases(call: AttentionCall) -> BiasOfBlock:
    """The bias of a call, for one block of its queries at a time."""
    # The barrier is for the backward pass: XLA would else add up the gradients of all blocks again in each kernel that
    # uses the sum.
    bias = lax.optimization_barrier(call.bias)
    queries, keys, term = jnp.asarray(call.query_positions), jnp.asarray(call.key_positions), bias.key_term

    def of_block(block: QueryBlock) -> Array:
        if term is not None:
            return jnp.swapaxes(term, 1, 2)[:, :, None, : block.seen]
        part = Part(queries=(block.start, block.stop - block.start), keys=(0, block.seen))
        return bias.cut(part)(queries[..., block.start : block.stop], keys[..., : block.seen])

    return of_block


def query_blocks(q_length: int, k_length: int, *, causal: bool) -> list[QueryBlock]:
    """The blocks of all queries but those that stand before the first key and see none.

    Each has a quarter of them, but `LEAST_ROWS` to `MOST_ROWS`, and the last what is left: more and smaller ones save
    as much as they cost (measured).
    """
    before = max(0, q_length - k_length) if causal else 0
    rows = min(MOST_ROWS, max(LEAST_ROWS, -(-(q_length - before) // 4)))
    last = k_length - q_length
    stops = [(start, min(start + rows, q_length)) for start in range(before, q_length, rows)]
    return [QueryBlock(start, stop, start + last, stop + last if causal else k_length) for start, stop in stops]


def saved_attention(
    query: Float[Array, "batch q heads head_dim"],
    key: Float[Array, "batch k heads head_dim"],
    value: Float[Array, "batch k heads value_dim"],
    bias: BiasOfBlock | None,
    *,
    causal: bool,
    window: int | None = None,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "batch q heads value_dim"]:
    """softmax(query key^T / sqrt(head_dim) + bias) value, differentiable in reverse mode.

    Each block of queries is multiplied with the keys up to the block's end, so that half or
    more of the logits above the diagonal are never computed, nor is their bias. The exponentials of the logits are kept
    for the backward pass, in memory that grows with the square of the length. Their product with
    the values is divided by their sums, not they themselves, since it is smaller. All is
    computed in float32, as CPUs do with half precision anyway; only the exponentials are kept
    in the dtype of `value`, which the result has too. No dimension may have the size zero.

    Args:
      bias: gives what is added to the scaled logits of a block of queries and the keys that they see, float32, for
        all sequences or for each of them, and for each of the queries or one row for all; its gradient is computed
        only where it is wanted.
      causal: query i sees the keys 0 to i + k - q, as the last query stands at the last key. A
        query that stands before the first key gives zeros.
      window: query i sees no key that is so many places or more from the one where it stands, if given.
      precision: of the products, as in `jax.lax.dot_general`.
    """
    wide = (x.astype(jnp.float32) for x in (query, key, value))
    blocks = query_blocks(query.shape[1], key.shape[1], causal=causal)
    # By a barrier XLA writes each of them once; it would else compute it again for each sequence.
    biases = lax.optimization_barrier(tuple(bias(block) for block in blocks)) if bias else ()
    return _attention(*wide, biases, _Settings(causal, window, precision, value.dtype)).astype(value.dtype)


class _Settings(NamedTuple):
    """What is static of a call: its masks, the precision of products, and the dtype in which exponentials are kept."""

    causal: bool
    window: int | None
    precision: lax.PrecisionLike
    kept: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(query: Array, key: Array, value: Array, biases: Biases, settings: _Settings) -> Array:
    return _forward(query, key, value, biases, settings)[0]


def _forward(
    query: Array, key: Array, value: Array, biases: Biases, settings: _Settings
) -> tuple[Array, tuple[Folded, Folded, Folded, Array, Exponentials, tuple[Array, ...]]]:
    """`out` of float32 queries, keys and values, and what the backward pass needs.

    That includes the exponentials of each block of queries and their sums (`totals`).
    """
    batch, q_length, _, head_dim = query.shape
    # Here and below barriers keep XLA from folding these transposes into the products, which it
    # would then compute, on strided operands, at a fraction of the speed. (It is the queries
    # that are scaled, since a factor of the logits would be written out as large as they are.)
    q, k, v = lax.optimization_barrier((_fold(query * head_dim**-0.5), _fold(key), _fold(value)))
    outputs, exponentials, totals = [], [], []
    blocks = query_blocks(q_length, k.shape[1], causal=settings.causal)
    for block, bias in zip(blocks, biases or (None,) * len(blocks), strict=True):
        logits = _product(q[:, block.start : block.stop], k[:, : block.seen], 2, 2, settings.precision)
        logits = _biased(logits, bias, batch, block, settings)
        largest = logits.max(axis=-1, keepdims=True)
        exponentials.append(lax.optimization_barrier(jnp.exp(logits - largest).astype(settings.kept)))
        # The sums are those of the rounded exponentials, so that the weights of a row sum to one in the backward pass.
        exponential = exponentials[-1].astype(jnp.float32)
        totals.append(exponential.sum(axis=-1, keepdims=True))
        outputs.append(_product(exponential, v[:, : block.seen], 2, 1, settings.precision) / totals[-1])
    out = _unfold(_of_all(outputs, q_length), batch)
    return out, (q, k, v, out, tuple(exponentials), tuple(totals))


def _forward_saving(query: Any, key: Any, value: Any, biases: Any, settings: _Settings) -> tuple[Array, tuple]:
    """`_forward`; its inputs say whether their gradients are wanted (`perturbed`)."""
    added = tuple(bias.value for bias in biases)
    out, saved = _forward(query.value, key.value, value.value, added, settings)
    # None if the gradient of the bias is not wanted; its shape is what the gradient must know of the bias's.
    wanted = any(bias.perturbed for bias in biases)
    learned = tuple(jnp.zeros((*bias.shape[:-1], 0)) for bias in added) if wanted else None
    return out, (*saved, learned)


def _backward(settings: _Settings, saved: tuple, dout: Any) -> tuple[Array, Array, Array, Biases | None]:
    q, k, v, out, exponentials, totals, learned = saved
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    batch, q_length, head_dim = dout.shape[0], q.shape[1], q.shape[-1]
    delta = _fold(dot_rows(dout, out)[..., None])
    folded_dout = lax.optimization_barrier(_fold(dout))
    dq, dbias = [], []
    dk = dv = jnp.zeros(())
    blocks = query_blocks(q_length, k.shape[1], causal=settings.causal)
    for number, (block, narrow, total) in enumerate(zip(blocks, exponentials, totals, strict=True)):
        rows, seen, exponential = slice(block.start, block.stop), block.seen, narrow.astype(jnp.float32)
        scaled_dout, scaled_delta = lax.optimization_barrier((folded_dout[:, rows] / total, delta[:, rows] / total))
        dlogits = exponential * (_product(scaled_dout, v[:, :seen], 2, 2, settings.precision) - scaled_delta)
        dlogits = lax.optimization_barrier(dlogits)
        if learned is not None:
            of_rows, like = dlogits, learned[number]
            if like.shape[-2] == 1:  # a product is the fastest sum over rows
                of_rows = _product(jnp.ones((*dlogits.shape[:2], 1)), dlogits, 1, 1, settings.precision)
            of_rows = of_rows.reshape(batch, -1, *of_rows.shape[1:])
            of_all = like.ndim == 3 or like.shape[0] == 1
            dbias.append(sum_first(of_rows).reshape(*like.shape[:-1], seen) if of_all else of_rows)
        dq.append(_product(dlogits, k[:, :seen], 2, 1, settings.precision))
        # These two products contract the queries of [queries, keys]. With the small operand first and
        # already transposed they take half the time; `_unfold_transposed` transposes the small results back.
        transposed = q[:, rows].swapaxes(1, 2), scaled_dout.swapaxes(1, 2)
        transposed_q, transposed_dout = lax.optimization_barrier(transposed)
        dk = dk + _widened(_product(transposed_q, dlogits, 2, 1, settings.precision), k.shape[1])
        dv = dv + _widened(_product(transposed_dout, exponential, 2, 1, settings.precision), k.shape[1])
    of_query = _unfold(_of_all(dq, q_length) * head_dim**-0.5, batch)
    of_biases = None if learned is None else tuple(dbias)
    # What stands between the dense layer and the keys may use each feature twice, as rotary embeddings do; XLA would
    # then add up the parts of all blocks twice. For values, which come from the layer itself, that costs more than it
    # saves.
    of_key = in_own_kernel(lambda dk: _unfold(dk.swapaxes(1, 2), batch), dk)
    return of_query, of_key, _unfold_transposed(dv, batch), of_biases


_attention.defvjp(_forward_saving, _backward, symbolic_zeros=True)


def _biased(
    logits: Float[Array, "batch_heads rows seen"],
    bias: Float[Array, "*batch heads _ seen"] | None,
    batch: int,
    block: QueryBlock,
    settings: _Settings,
) -> Float[Array, "batch_heads rows seen"]:
    """The logits of a block of queries with their bias and masks."""
    _, rows, seen = logits.shape
    of_queries, of_keys = np.arange(block.own, block.own + rows)[:, None], np.arange(seen)[None, :]
    # Each query sees at least its own key, so the exponentials of hidden keys are exactly zero.
    visible = of_keys <= of_queries if settings.causal else np.ones((rows, seen), bool)
    if settings.window is not None:
        visible = visible & (np.abs(of_queries - of_keys) < settings.window)
    added = jnp.zeros((1, rows, seen))
    if bias is not None and bias.shape[-2] == 1:
        # Softmax ignores what is taken from all, and the numbers of near keys become small enough to be exact. They are
        # added by themselves, since with the mask they would be written out for each query.
        terms = bias.astype(jnp.float32)
        terms = terms - terms[..., min(max(block.own, 0), seen - 1)][..., None]
        logits = logits + jnp.broadcast_to(terms, (batch, *terms.shape[-3:])).reshape(-1, 1, seen)
    elif bias is not None:
        added = bias.astype(jnp.float32)
    if not visible.all():
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
    # By way of a matrix XLA writes the result once; a transpose straight to four dimensions it
    # would write once for each use, which are the dense layer's product and its bias.
    rows = lax.optimization_barrier(x).reshape(batch, heads * features, length).transpose(0, 2, 1)
    rows = lax.optimization_barrier(rows.reshape(batch * length, heads * features))
    return rows.reshape(batch, length, heads, features)


def _widened(x: Float[Array, "... keys"], k_length: int) -> Float[Array, "... k"]:
    """`x` with zeros for the keys after those that its block of queries sees."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, k_length - x.shape[-1])])


def _of_all(parts: list[Folded], q_length: int) -> Folded:
    """The rows of all blocks of queries, after zeros for the queries before the first block."""
    joined = jnp.concatenate(parts, axis=1)
    return jnp.pad(joined, ((0, 0), (q_length - joined.shape[1], 0), (0, 0)))
