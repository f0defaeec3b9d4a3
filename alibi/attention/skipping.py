"""Which blocks of logits a bias lets one leave out, with a proof.

Before its bias no logit of a query exceeds U: the query's norm times the largest norm of a
key, over sqrt(head_dim). Let l be the biased logit of the nearest key that the query sees;
the largest logit of its row is at least that. A bias that is `bounded` says of a block of keys
how large it is at most, b, and how large the sum of its exponentials, s. So with the excess
x = U - l, relative to the row's largest exponential

    one key of the block           <= exp(x + b)
    all keys of several blocks     <= exp(x) * (s of one + s of the next + ...)

Blocks are left out from the farthest one on, as long as the first is what float32 rounds to
zero (`skip_epsilon` = 0), or the second no more than `skip_epsilon`. U and l are computed from
the queries and keys at hand when the program runs. ALiBi's b is -m d, of the nearest key at
distance d, and its s the geometric series of exp(-m d).

One query that has already seen some keys knows more: the largest logit l and the sum of
exponentials relative to it. All keys that it has not seen have together at most
exp(U - l) * (s of one block + ...), divided by that sum, of what it has gathered (`weight_left`).
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
from alibi.attention.cpu.rows import dot_rows
from alibi.attention.tiles import Plan, Sides, make_sides
from alibi.positions.base import Bias, Blocks, Part

# exp(-104) is below half of the smallest float32 above zero.
UNDERFLOW = 104.0
# A logit may be off by this share of its norms' product: norms are computed in float32, and an
# accelerator rounds a product's operands to bfloat16 or TF32 by default.
LOGIT_ROUNDING = 2.0**-6
# Of a bias, by its rounding in float32.
ROUNDING = 2.0**-20


@dataclasses.dataclass(frozen=True)
class Nearest:
    """Of each query, the nearest key that it surely sees: its index, and how far it is; int64 `[q]`.

    A query that sees no key, also where a window hides the nearest, has some key at distance 0:
    its row is zero whatever is skipped.
    """

    indices: np.ndarray
    distances: np.ndarray


def key_excess(call: AttentionCall, nearest: Nearest, plan: Plan) -> Float[Array, "batch heads q_blocks"]:
    """x of the module's proof, the largest of each block of queries, with what rounding may add.

    Infinite, so that nothing is skipped, where an input is not finite: of the whole head for a key
    or value, of its block for a query.
    """
    q, k, v = (lax.stop_gradient(x.reshape(-1, *x.shape[-3:])) for x in (call.query, call.key, call.value))
    of_queries, of_keys, of_values = (jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (q, k, v))
    # A key or value that is no number must not be skipped. Sums, since XLA's maximum may pass over NaN.
    of_keys = of_keys.max(axis=1) + 0.0 * (of_keys.sum(axis=1) + of_values.sum(axis=1))
    # No copy where each query's nearest key is its own.
    in_order = np.array_equal(nearest.indices, np.arange(k.shape[1]))
    of_nearest = dot_rows(q, k if in_order else k[:, nearest.indices])
    # Twice, as the logits of the far key and of the nearest may both be off.
    largest = (1.0 + 2 * LOGIT_ROUNDING) * of_queries * of_keys[:, None]
    excess = (largest - of_nearest) * q.shape[-1] ** -0.5 - nearest_bias(call, nearest)
    excess = jnp.where(jnp.isnan(excess), jnp.inf, excess)
    # The last block is filled up with zeros: no excess is less, as no product exceeds that of its norms.
    excess = jnp.pad(excess, [(0, 0), (0, plan.q_blocks * plan.q_block - plan.q_length), (0, 0)])
    return excess.reshape(plan.batch, plan.q_blocks, -1, plan.heads).max(axis=2).swapaxes(1, 2)


def nearest_bias(call: AttentionCall, nearest: Nearest) -> Float[Array, "batch_or_1 q heads"]:
    """The bias of each query and its nearest key; a query that has none counts as if it stood at that key."""
    assert call.bias is not None
    assert call.known_positions is not None
    bias = lax.stop_gradient(call.bias.folded(call.query.ndim - 3))
    keys = call.known_positions[1][nearest.indices].astype(np.int32)
    queries = keys + nearest.distances.astype(np.int32) * np.where(call.known_positions[0] < keys, -1, 1)

    def of_pair(query: Array, key: Array, index: Array, nearest: Array) -> Array:
        part = Part(queries=(index, 1), keys=(nearest, 1))
        return bias.cut(part)(query[None], key[None])[..., 0, 0].reshape(-1, call.query.shape[-2])

    indices = np.arange(queries.size, dtype=np.int32), nearest.indices.astype(np.int32)
    return jax.vmap(of_pair, out_axes=1)(*map(jnp.asarray, (queries.astype(np.int32), keys, *indices)))


def key_ranges(call: AttentionCall, plan: Plan, sides: Sides) -> Int[Array, "groups q_blocks two"]:
    """For each group and block of queries, the first block of keys that it needs and the one after the last."""
    needed = tiles_needed(call, plan, sides)
    grouped = (plan.batch_groups, plan.batch_group, plan.head_groups, plan.head_group)
    needed = needed.reshape(*grouped, *needed.shape[-2:]).any(axis=(1, 3)).reshape(-1, *needed.shape[-2:])
    first = jnp.argmax(needed, axis=-1)
    after_last = plan.k_blocks - jnp.argmax(needed[..., ::-1], axis=-1)
    some = needed.any(axis=-1, keepdims=True)
    return jnp.where(some, jnp.stack([first, after_last], axis=-1), 0).astype(jnp.int32)


def ranges_of(call: AttentionCall, plan: Plan) -> Int[np.ndarray, "groups q_blocks two"]:
    """The `key_ranges` that `blocked` goes through of a call whose arrays are at hand, so that they can be counted."""

    @jax.jit
    def ranges(query: Array, key: Array, value: Array) -> Array:
        same = dataclasses.replace(call, query=query, key=key, value=value)
        return key_ranges(same, plan, make_sides(same, plan))

    return np.asarray(ranges(call.query, call.key, call.value))


def tiles_needed(call: AttentionCall, plan: Plan, sides: Sides) -> Bool[Array, "batch heads q_blocks k_blocks"]:
    """The tiles that causal mask and window don't hide, and whose keys can matter."""
    lowest_query, highest_query = _extremes(sides.query_positions, plan.q_blocks)
    lowest_key, highest_key = _extremes(sides.key_positions, plan.k_blocks)
    behind = lowest_query[:, None, :, None] - highest_key[:, None, None, :]  # the least distance to a key of the tile
    ahead = lowest_key[:, None, None, :] - highest_query[:, None, :, None]
    seen = ahead <= 0 if call.causal else jnp.ones(behind.shape, bool)
    if call.window is not None:
        seen = seen & (behind < call.window) & (ahead < call.window)
    seen = jnp.broadcast_to(seen, (plan.batch, plan.heads, *seen.shape[-2:]))
    nearest = nearest_keys(call)
    if nearest is None or not call.can_skip:
        return seen
    assert call.bias is not None
    assert call.options.skip_epsilon is not None
    bias = lax.stop_gradient(call.bias.folded(call.query.ndim - 3).padded(*plan.padding))
    count = np.minimum(plan.k_block, plan.k_length - plan.k_block * np.arange(plan.k_blocks))
    blocks = Blocks(behind[:, 0], ahead[:, 0], plan.q_blocks, plan.k_blocks, count.reshape(1, 1, 1, -1))
    excess = key_excess(call, nearest, plan)[..., None]
    if call.options.skip_epsilon == 0:
        return seen & ~(excess + bias.upper_bound(blocks) < -UNDERFLOW)
    # Keys ascend, so the farthest before a query are in the first blocks, and those after it in the last ones.
    sums = bias.log_sum_bound(blocks)
    sums = jnp.broadcast_to(sums, jnp.broadcast_shapes(sums.shape, (1, 1, 1, plan.k_blocks)))
    directions = [False] if call.causal else [False, True]
    most = math.log(call.options.skip_epsilon / len(directions))
    left_out = [excess + lax.cumlogsumexp(sums, axis=3, reverse=reverse) < most for reverse in directions]
    return seen & ~functools.reduce(jnp.logical_or, left_out)


def _extremes(positions: Int[Array, "*batch length"], blocks: int) -> tuple[Array, Array]:
    """Least and greatest position of each block, `[batch or 1, blocks]`."""
    by_block = positions.reshape(-1, blocks, positions.shape[-1] // blocks)
    return by_block.min(axis=-1), by_block.max(axis=-1)


def weight_left(
    bias: Bias, bound: Float[Array, "batch heads"], blocks: Blocks, epsilon: float | None
) -> Float[Array, "batch heads blocks"]:
    """The logarithm of what all keys up to the end of each block have at most: the sum of their exponentials.

    Whatever their positions are; with epsilon 0, where sums don't count, of the largest one
    instead. A reader who has gathered exp(g) can stop where this is less than
    `g + stop_below(epsilon)`. Infinite or NaN, so that nobody stops, where nothing can be said.

    Args:
      bias: bounded.
      bound: U, which no scaled logit exceeds before its bias, rounding included.
      blocks: one of queries, and those of the keys.
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
    """How much less, as a logarithm, what is left must be than what was gathered; see `weight_left`."""
    return -math.inf if epsilon is None else -UNDERFLOW if epsilon == 0 else math.log(epsilon)


def nearest_keys(call: AttentionCall) -> Nearest | None:
    """The nearest keys where they are known in advance; None: they are not.

    Known are NumPy positions with distinct ascending keys and no mask.
    """
    if call.mask is not None or call.known_positions is None:
        return None
    queries, keys = call.known_positions
    if 0 in (queries.size, keys.size) or np.any(np.diff(keys) <= 0):
        return None
    if call.query_segments is not None:
        # Then only its own key is sure to be in a query's segment.
        own = call.query_segments is call.key_segments and np.array_equal(queries, keys)
        return Nearest(np.arange(queries.size), np.zeros(queries.size, np.int64)) if own else None
    indices = _nearest_indices(queries, keys, call.causal)
    distances = np.abs(queries - keys[indices])
    seen = (keys[indices] <= queries) if call.causal else np.ones(queries.size, bool)
    if call.window is not None:
        seen &= distances < call.window
    return Nearest(indices, np.where(seen, distances, 0))


def _nearest_indices(queries: np.ndarray, keys: np.ndarray, causal: bool) -> np.ndarray:
    """Of each query the index of the nearest key, if `causal` of those before it or the first."""
    before = np.maximum(np.searchsorted(keys, queries, side="right") - 1, 0)
    if causal:
        return before
    after = np.minimum(before + 1, keys.size - 1)
    return np.where(np.abs(keys[after] - queries) < np.abs(queries - keys[before]), after, before)
