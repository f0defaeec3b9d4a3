"""Which blocks of logits ALiBi lets one leave out, with a proof.

No logit of a query exceeds U before its bias: the query's norm times the largest norm of a
key, over sqrt(head_dim). Let l be the biased logit of the nearest key that the query sees,
which has no bias if it is the query's own; the largest of its row is at least that. So with
the excess x = U - l, relative to the row's largest exponential

    one key at distance d                 <= exp(x - m d)
    all keys at distances d, d + 1, ...   <= exp(x - m d) / (1 - exp(-m))

the second because a distance occurs once on each side. All this is computed from the
queries and keys at hand when the program runs.

One query that has already seen some keys knows more: the largest logit l and the sum s
of exponentials relative to it. All keys of a set that it has not seen have together at
most exp(U - l) / s times the sum of exp(-m d) of what it has gathered (`weight_left`).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from alibi.attention.call import AttentionCall
from alibi.attention.tiles import Plan, Sides, make_sides
from alibi.positions import AlibiBias
from alibi.products import dot_rows

# exp(-104) is below half of the smallest float32 above zero.
UNDERFLOW = 104.0
# A logit may be off by this share of its norms' product: norms are computed in float32, and an
# accelerator rounds a product's operands to bfloat16 or TF32 by default.
LOGIT_ROUNDING = 2.0**-6
# Of m d, by its rounding in float32.
ROUNDING = 2.0**-20
# A distance that says: this key is not seen.
HIDDEN = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Nearest:
    """Of each query, the nearest key that it surely sees: its index, and how far it is; int64 `[q]`.

    A query that sees no key, also where a window hides the nearest, has some key at distance 0:
    its row is zero whatever is skipped.
    """

    indices: np.ndarray
    distances: np.ndarray


def key_excess(
    call: AttentionCall, slopes: Float[Array, " heads"], nearest: Nearest, plan: Plan
) -> Float[Array, "batch heads q_blocks"]:
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
    penalty = slopes[None, None, :] * nearest.distances.astype(np.float32)[None, :, None]
    # Twice, as the logits of the far key and of the nearest may both be off.
    largest = (1.0 + 2 * LOGIT_ROUNDING) * of_queries * of_keys[:, None]
    excess = (largest - of_nearest) * q.shape[-1] ** -0.5 + penalty
    excess = jnp.where(jnp.isnan(excess), jnp.inf, excess)
    # The last block is filled up with zeros: no excess is less, as no product exceeds that of its norms.
    excess = jnp.pad(excess, [(0, 0), (0, plan.q_blocks * plan.q_block - plan.q_length), (0, 0)])
    return excess.reshape(plan.batch, plan.q_blocks, -1, plan.heads).max(axis=2).swapaxes(1, 2)


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
    if nearest is None or call.skip_epsilon is None or not isinstance(call.bias, AlibiBias):
        return seen
    slopes = lax.stop_gradient(call.bias.slopes).astype(jnp.float32)
    excess = key_excess(call, slopes, nearest, plan)
    farthest = skip_distance(slopes[None, :, None], excess, call.skip_epsilon, symmetric=call.bias.symmetric)
    distance = jnp.maximum(behind, ahead) if call.bias.symmetric else behind
    return seen & ~(jnp.broadcast_to(distance, seen.shape).astype(jnp.float32) > farthest[..., None])


def _extremes(positions: Int[Array, "*batch length"], blocks: int) -> tuple[Array, Array]:
    """Least and greatest position of each block, `[batch or 1, blocks]`."""
    by_block = positions.reshape(-1, blocks, positions.shape[-1] // blocks)
    return by_block.min(axis=-1), by_block.max(axis=-1)


def skip_distance(
    slopes: Float[Array, "*#shape"],
    excess: Float[Array, "*#shape"],
    epsilon: float,
    *,
    symmetric: bool = False,
) -> Float[Array, "*shape"]:
    """The distance beyond which keys can be left out; infinite where nothing can be said.

    Args:
      slopes: m of a head.
      excess: x of the module's proof, scaled as logits are.
      epsilon: the share of a row's attention mass that may be lost; 0: only what float32
        rounds to zero, so that with values of ordinary size the result is the same bit by bit.
      symmetric: keys lie on both sides of a query.

    A slope that is not positive and an excess that is not finite skip nothing.
    """
    if epsilon == 0:
        slack = excess + UNDERFLOW
    else:
        slack = excess + math.log((2 if symmetric else 1) / epsilon) - jnp.log(-jnp.expm1(-slopes))
    known = (slopes > 0) & jnp.isfinite(slack)
    return jnp.where(known, slack / jnp.where(known, slopes, 1.0), jnp.inf)


def weight_left(
    slopes: Float[Array, " heads"],
    bound: Float[Array, "batch heads"],
    nearest: Int[Array, "batch heads_or_1 blocks"],
    count: Int[Array, "batch heads_or_1 blocks"],
    epsilon: float | None,
) -> Float[Array, "batch heads blocks"]:
    """The logarithm of what all keys up to the end of each block have at most: the sum of their exponentials.

    Whatever their positions are; with epsilon 0, where sums don't count, of the largest one
    instead. A reader who has gathered exp(g) can stop where this is less than
    `g + stop_below(epsilon)`. Infinite or NaN, so that nobody stops, where nothing can be said.

    Args:
      bound: U, which no scaled logit exceeds before its bias, rounding included.
      nearest: the least distance of a key of each block.
      count: of the keys of each block that are seen.
    """
    slopes = slopes[None, :, None]
    penalty = slopes * nearest.astype(jnp.float32)
    largest = jnp.where(count > 0, ROUNDING * jnp.abs(penalty) - penalty, -jnp.inf)
    if epsilon == 0:
        gathered = lax.cummax(largest, axis=2)
    else:
        gathered = lax.cumlogsumexp(largest + jnp.log(count.astype(jnp.float32)), axis=2)
    # With a slope below zero the nearest key is not the one with the largest bias.
    return jnp.where(slopes >= 0, bound[..., None], jnp.inf) + gathered


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


def check_skipping(call: AttentionCall) -> None:
    """Raises ValueError for an epsilon out of range, or above zero with a known slope below zero."""
    epsilon = call.skip_epsilon
    if epsilon is None:
        return
    if not 0 <= epsilon < 1:
        raise ValueError(f"skip_epsilon={epsilon} must be from 0 to below 1, or None to skip nothing")
    # With epsilon 0 a slope below zero is right: it skips nothing, and may be on its way through training.
    if epsilon > 0 and call.known_slopes is not None and np.any(call.known_slopes < 0):
        raise ValueError(
            f"slopes={call.known_slopes.tolist()} have one below zero, which favours far keys; skip_epsilon={epsilon} "
            "needs slopes of at least 0: use skip_epsilon=0, which skips nothing for such a head"
        )
