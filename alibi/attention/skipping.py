"""Which tiles a bias allows attention to leave out, with a proof.

Before its bias no logit of a query exceeds U, the query's norm times the largest norm of a
key, over sqrt(head_dim). Let l be the biased logit of the nearest key that the query sees: the
largest logit of its row is at least l. A bias that is `bounded` says two things of each block
of keys: b, the most that it adds to a logit there (`upper_bound`), and s, the most that
the sum of exp(bias) over the block can be (`log_sum_bound`). So with the excess x = U - l,
relative to the row's largest exponential

    one key of the block           <= exp(x + b)
    all keys of several blocks     <= exp(x) * (s of one + s of the next + ...)

With `skip_epsilon` = 0 a block is left out where the first is what float32 rounds to zero; with
a larger one, blocks are left out from the farthest one on, as long as the second is less than
`skip_epsilon`. U and l are computed from the actual queries and keys when the program runs.
For ALiBi b is -m d, if the nearest key of the block is at distance d, and s is a geometric series.

In decoding, a query that has read some blocks of keys knows more than l: the largest logit g
that it has met, and the sum of exponentials relative to g. Relative to what it has gathered, all
keys that it has not read have together at most exp(U - g) * (s of one + s of the next + ...),
divided by that sum (`weight_left`).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from alibi.attention.call import AttentionCall
from alibi.attention.tiles import Plan, Sides, make_sides
from alibi.cpu.rows import dot_rows
from alibi.positions.bias import Bias, Blocks, Part

# exp(-104) is below half of the smallest float32 above zero.
UNDERFLOW = 104.0
# A computed logit may exceed the exact one by this share of the norms' product, since an accelerator
# rounds the operands of products to bfloat16 or TF32 by default.
LOGIT_ROUNDING = 2.0**-6
# A computed bias may exceed the exact one by this share of it, by float32's rounding.
ROUNDING = 2.0**-20


@dataclasses.dataclass(frozen=True)
class Nearest:
    """The nearest key that each query surely sees: the key's index and its distance, int64 `[q]`.

    A query that sees no key (where a window hides the nearest, too) gets any key and distance 0:
    its result is zero whatever is skipped.
    """

    indices: np.ndarray
    distances: np.ndarray


def key_excess(call: AttentionCall, nearest: Nearest, plan: Plan) -> Float[Array, "batch heads q_blocks"]:
    """The excess x = U - l of the proof above, the largest in each block of queries, with what rounding may add.

    It is infinite, so that nothing is skipped, where an input is not finite: for the whole head
    if that is a key or value, for its own block if it is a query.
    """
    q, k, v = (lax.stop_gradient(x.reshape(-1, *x.shape[-3:])) for x in (call.query, call.key, call.value))
    of_queries, of_keys, of_values = (jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (q, k, v))
    # A key or value that is no number must not be skipped. Sums, since XLA's maximum may pass over NaN.
    of_keys = of_keys.max(axis=1) + 0.0 * (of_keys.sum(axis=1) + of_values.sum(axis=1))
    # Where each query's nearest key is its own, which is the usual case, the keys need not be copied.
    in_order = np.array_equal(nearest.indices, np.arange(k.shape[1]))
    of_nearest = dot_rows(q, k if in_order else k[:, nearest.indices])
    # Twice, as the logits of the far key and of the nearest may both be off.
    largest = (1.0 + 2 * LOGIT_ROUNDING) * of_queries * of_keys[:, None]
    excess = (largest - of_nearest) * q.shape[-1] ** -0.5 - nearest_bias(call, nearest)
    excess = jnp.where(jnp.isnan(excess), jnp.inf, excess)
    # The last block is filled up with zeros. At worst they make its excess larger, so that less is left out.
    excess = jnp.pad(excess, [(0, 0), (0, plan.q_blocks * plan.q_block - plan.q_length), (0, 0)])
    return excess.reshape(plan.batch, plan.q_blocks, -1, plan.heads).max(axis=2).swapaxes(1, 2)


def nearest_bias(call: AttentionCall, nearest: Nearest) -> Float[Array, "batch_or_1 q heads"]:
    """The bias of each query and its nearest key, at the distance that `nearest` gives."""
    assert call.bias is not None
    assert call.known_positions is not None
    bias = lax.stop_gradient(call.bias.folded(call.query.ndim - 3))
    keys = call.known_positions[1][nearest.indices].astype(np.int32)
    queries = keys + nearest.distances.astype(np.int32) * np.where(call.known_positions[0] < keys, -1, 1)

    def of_pair(query: Array, key: Array, query_index: Array, key_index: Array) -> Array:
        part = Part(queries=(query_index, 1), keys=(key_index, 1))
        return bias.cut(part)(query[None], key[None])[..., 0, 0].reshape(-1, call.query.shape[-2])

    indices = np.arange(queries.size, dtype=np.int32), nearest.indices.astype(np.int32)
    return jax.vmap(of_pair, out_axes=1)(*map(jnp.asarray, (queries.astype(np.int32), keys, *indices)))


def key_ranges(call: AttentionCall, plan: Plan, sides: Sides) -> Int[Array, "groups q_blocks two"]:
    """The first block of keys that each group and block of queries needs, and the one after the last."""
    needed = tiles_needed(call, plan, sides)
    grouped = (plan.batch_groups, plan.batch_group, plan.head_groups, plan.head_group)
    needed = needed.reshape(*grouped, *needed.shape[-2:]).any(axis=(1, 3)).reshape(-1, *needed.shape[-2:])
    first = jnp.argmax(needed, axis=-1)
    after_last = plan.k_blocks - jnp.argmax(needed[..., ::-1], axis=-1)
    some = needed.any(axis=-1, keepdims=True)
    return jnp.where(some, jnp.stack([first, after_last], axis=-1), 0).astype(jnp.int32)


def ranges_of(call: AttentionCall, plan: Plan) -> Int[np.ndarray, "groups q_blocks two"]:
    """The `key_ranges` of a call whose arrays hold numbers (are not traced), for counting the tiles of `blocked`."""

    @jax.jit
    def ranges(query: Array, key: Array, value: Array) -> Array:
        same = dataclasses.replace(call, query=query, key=key, value=value)
        return key_ranges(same, plan, make_sides(same, plan))

    return np.asarray(ranges(call.query, call.key, call.value))


def computed_tiles(call: AttentionCall, plan: Plan) -> Int[np.ndarray, " groups"]:
    """How many tiles `blocked` computes for each group of batch entries and heads, of a call as for `ranges_of`."""
    ranges = ranges_of(call, plan)
    return (ranges[..., 1] - ranges[..., 0]).sum(axis=-1)


def skipped_share(call: AttentionCall, plan: Plan) -> float:
    """The share of the tiles which causal mask and window show that `blocked` skips by the bias."""
    everything = dataclasses.replace(call, options=dataclasses.replace(call.options, skip_epsilon=None))
    return 1.0 - float(computed_tiles(call, plan).sum() / computed_tiles(everything, plan).sum())


def tiles_needed(call: AttentionCall, plan: Plan, sides: Sides) -> Bool[Array, "batch heads q_blocks k_blocks"]:
    """Which tiles must be computed: neither causal mask nor window hides them, and the proof can't leave them out."""
    lowest_query, highest_query = _extremes(sides.query_positions, plan.q_blocks)
    lowest_key, highest_key = _extremes(sides.key_positions, plan.k_blocks)
    behind = lowest_query[:, None, :, None] - highest_key[:, None, None, :]  # the least distance in the tile
    ahead = lowest_key[:, None, None, :] - highest_query[:, None, :, None]
    seen = ahead <= 0 if call.causal else jnp.ones(behind.shape, bool)
    if call.window is not None:
        seen = seen & (behind < call.window) & (ahead < call.window)
    seen = jnp.broadcast_to(seen, (plan.batch, plan.heads, *seen.shape[-2:]))
    epsilon, nearest = call.options.skip_epsilon, nearest_keys(call)
    if epsilon is None or call.bias is None or not call.bias.bounded or nearest is None:
        return seen
    bias = lax.stop_gradient(call.bias.folded(call.query.ndim - 3).padded(*plan.padding))
    count = np.minimum(plan.k_block, plan.k_length - plan.k_block * np.arange(plan.k_blocks))
    blocks = Blocks(behind[:, 0], ahead[:, 0], plan.q_blocks, plan.k_blocks, count.reshape(1, 1, 1, -1))
    excess = key_excess(call, nearest, plan)[..., None]
    if epsilon == 0:
        return seen & ~(excess + bias.upper_bound(blocks) < -UNDERFLOW)
    # Keys ascend, so the farthest before a query are in the first blocks, and those after it in the last ones.
    sums = bias.log_sum_bound(blocks)
    sums = jnp.broadcast_to(sums, jnp.broadcast_shapes(sums.shape, (1, 1, 1, plan.k_blocks)))
    directions = [False] if call.causal else [False, True]
    most = math.log(epsilon / len(directions))
    left_out = [excess + lax.cumlogsumexp(sums, axis=3, reverse=reverse) < most for reverse in directions]
    return seen & ~functools.reduce(jnp.logical_or, left_out)


def _extremes(positions: Int[Array, "*batch length"], blocks: int) -> tuple[Array, Array]:
    """Least and greatest position of each block, `[batch or 1, blocks]`."""
    by_block = positions.reshape(-1, blocks, positions.shape[-1] // blocks)
    return by_block.min(axis=-1), by_block.max(axis=-1)


def weight_left(
    bias: Bias, bound: Float[Array, "batch heads"], blocks: Blocks, epsilon: float | None
) -> Float[Array, "batch heads blocks"]:
    """A bound, for each block of keys, of what all keys up to its end can add, as a logarithm.

    It bounds the sum of their exponentials, or, with epsilon 0, the largest of them. A query
    that has read all later keys, and gathered exp(g) from them, can stop where this is less than
    `g + stop_below(epsilon)`. The keys may have any positions, in any order. Where nothing can
    be said, it is infinite or NaN, with which no query stops.

    Args:
      bias: one that is `bounded`.
      bound: U, which no scaled logit exceeds before its bias, rounding included.
      blocks: the one block of queries, of one query, against all blocks of keys.
    """
    of_block = bias.upper_bound(blocks)[:, :, 0]
    count = jnp.asarray(blocks.key_count)[:, :, 0]
    largest = jnp.where(count > 0, ROUNDING * jnp.abs(of_block) + of_block, -jnp.inf)
    if epsilon == 0:
        gathered = lax.cummax(largest, axis=2)
    else:
        gathered = lax.cumlogsumexp(largest + jnp.log(count.astype(jnp.float32)), axis=2)
    return bound[..., None] + gathered


def stop_below(epsilon: float | None) -> float:
    """The logarithm of the ratio of what is left to what was gathered below which a query stops, see `weight_left`."""
    return -math.inf if epsilon is None else -UNDERFLOW if epsilon == 0 else math.log(epsilon)


def nearest_keys(call: AttentionCall) -> Nearest | None:
    """The nearest key of each query, if it is known when the call is traced, else None.

    It is known where positions are NumPy arrays, those of the keys ascend, and there is no mask.
    """
    if call.mask is not None or call.known_positions is None:
        return None
    queries, keys = call.known_positions
    if 0 in (queries.size, keys.size) or np.any(np.diff(keys) <= 0):
        return None
    if call.query_segments is not None:
        # A query is sure to share its segment with its own key alone.
        own = call.query_segments is call.key_segments and np.array_equal(queries, keys)
        return Nearest(np.arange(queries.size), np.zeros(queries.size, np.int64)) if own else None
    indices = _nearest_indices(queries, keys, call.causal)
    distances = np.abs(queries - keys[indices])
    seen = (keys[indices] <= queries) if call.causal else np.ones(queries.size, bool)
    if call.window is not None:
        seen &= distances < call.window
    return Nearest(indices, np.where(seen, distances, 0))


def _nearest_indices(queries: np.ndarray, keys: np.ndarray, causal: bool) -> np.ndarray:
    """The index of each query's nearest key; if `causal`, of the keys up to it, or 0 if there is none."""
    before = np.maximum(np.searchsorted(keys, queries, side="right") - 1, 0)
    if causal:
        return before
    after = np.minimum(before + 1, keys.size - 1)
    return np.where(np.abs(keys[after] - queries) < np.abs(queries - keys[before]), after, before)
