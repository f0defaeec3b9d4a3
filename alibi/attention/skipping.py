"""The proof that lets attention leave out tiles with a bounded bias.

Without its bias no logit in a row exceeds U: the query's norm times the largest key norm,
over sqrt(head_dim). Let l be the nearest visible key's biased logit. The largest logit in the
row is at least l. A `bounded` bias gives two numbers for each key block: b, the most it adds to
a logit there (`upper_bound`), and s, the most that exp(bias) can add up to over the block
(`log_sum_bound`). So with the excess x = U - l, relative to the row's largest exponential

    one key of the block           <= exp(x + b)
    all keys of several blocks     <= exp(x) * (s of one + s of the next + ...)

With `skip_epsilon` = 0 a block is left out if float32 rounds the first bound to zero. With a larger
epsilon, blocks are left out from the farthest on, as long as the second bound is less than
`skip_epsilon`. U and l are computed from the actual queries and keys when the program runs. For
ALiBi b is -m d, with d the nearest key's distance, and s is a geometric series. A
sink only makes weights smaller. A cap brings any two logits closer together, and each closer to 0,
so that x and U are bounds with it too.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from alibi.attention.call import AttentionCall
from alibi.attention.tiles import Sides, Tiling, make_sides, make_tiling
from alibi.numerics.sums import dot_rows
from alibi.positions.bias import UNDERFLOW, Blocks, Part

# The share of the norms' product by which a computed logit may exceed the exact logit, since an
# accelerator rounds the operands of products to bfloat16 or TF32 by default.
LOGIT_ROUNDING = 2.0**-6


class Nearest(NamedTuple):
    """The nearest key that each query surely sees: its index and its distance, int64 `[q]`.

    A query without visible keys (a window may hide the nearest one too) gets any key and distance 0:
    its result is zero whatever is skipped.
    """

    indices: np.ndarray
    distances: np.ndarray


def key_excess(
    call: AttentionCall, nearest: Nearest, tiling: Tiling
) -> Float[Array, "batch heads q_blocks"]:
    """Returns the largest excess x = U - l in each query block, rounding included.

    It is infinite, to skip nothing, if an input is not finite: a key or value counts for its whole
    head, a query for its block.
    """
    q, k, v = (
        lax.stop_gradient(x.reshape(-1, *x.shape[-3:])) for x in (call.query, call.key, call.value)
    )
    query_norms, key_norms, value_norms = (
        jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (q, k, v)
    )
    # Keys and values that are not finite must not be skipped. Sums, since XLA's maximum may pass
    # over NaN.
    largest_norm = key_norms.max(axis=1) + 0.0 * (key_norms.sum(axis=1) + value_norms.sum(axis=1))
    # If each query's nearest key is its own, the usual case, the keys need not be copied.
    in_order = np.array_equal(nearest.indices, np.arange(k.shape[1]))
    nearest_logits = dot_rows(q, k if in_order else k[:, nearest.indices])
    # Twice, as the logits of the far key and of the nearest may both be off.
    largest = (1.0 + 2 * LOGIT_ROUNDING) * query_norms * largest_norm[:, None]
    excess = (largest - nearest_logits) * q.shape[-1] ** -0.5 - nearest_bias(call, nearest)
    excess = jnp.where(jnp.isnan(excess), jnp.inf, excess)
    # The last block is filled up with zeros. At worst they make its excess larger, so that less is
    # left out.
    excess = jnp.pad(
        excess, [(0, 0), (0, tiling.q_blocks * tiling.q_block - tiling.q_length), (0, 0)]
    )
    return excess.reshape(len(q), tiling.q_blocks, -1, q.shape[2]).max(axis=2).swapaxes(1, 2)


def nearest_bias(call: AttentionCall, nearest: Nearest) -> Float[Array, "batch_or_1 q heads"]:
    """Returns the bias for each query and its nearest key."""
    assert call.bias is not None
    assert call.known_positions is not None
    bias = lax.stop_gradient(call.bias.folded(call.query.ndim - 3))
    keys = call.known_positions[1][nearest.indices].astype(np.int32)
    queries = keys + nearest.distances.astype(np.int32) * np.where(
        call.known_positions[0] < keys, -1, 1
    )

    def pair_bias(query: Array, key: Array, query_index: Array, key_index: Array) -> Array:
        of_pair = bias.cut(Part(queries=(query_index, 1), keys=(key_index, 1)))
        return of_pair(query[None], key[None])[..., 0, 0].reshape(-1, call.query.shape[-2])

    indices = np.arange(queries.size, dtype=np.int32), nearest.indices.astype(np.int32)
    return jax.vmap(pair_bias, out_axes=1)(
        *map(jnp.asarray, (queries.astype(np.int32), keys, *indices))
    )


def key_ranges(
    call: AttentionCall, tiling: Tiling, sides: Sides
) -> Int[Array, "groups q_blocks two"]:
    """Returns, for each group and query block, the first key block to compute and the block
    after the last.
    """
    needed = tiles_needed(call, tiling, sides)
    grouped = (tiling.batch_groups, tiling.batch_group, tiling.head_groups, tiling.head_group)
    by_group = needed.reshape(*grouped, *needed.shape[-2:]).any(axis=(1, 3))
    return ranges_of(by_group.reshape(-1, *needed.shape[-2:]))


def ranges_of(needed: Bool[Array, "*rows columns"]) -> Int[Array, "*rows two"]:
    """Returns the first needed column in each row and the column after the last."""
    first, after = needed.argmax(axis=-1), needed.shape[-1] - needed[..., ::-1].argmax(axis=-1)
    some = needed.any(axis=-1, keepdims=True)
    return jnp.where(some, jnp.stack([first, after], axis=-1), 0).astype(jnp.int32)


def computed_ranges(call: AttentionCall) -> Int[np.ndarray, "groups q_blocks two"]:
    """Returns the `key_ranges` for a call with concrete arrays, to count `blocked`'s tiles."""
    tiling = make_tiling(call)
    return np.asarray(key_ranges(call, tiling, make_sides(call, tiling)))


def skipped_share(call: AttentionCall) -> float:
    """Returns the share of tiles left out for the bias, among those that causal mask and window
    show.
    """
    everything = dataclasses.replace(
        call, options=dataclasses.replace(call.options, skip_epsilon=None)
    )
    computed, shown = (np.diff(computed_ranges(of), axis=-1).sum() for of in (call, everything))
    return 1.0 - float(computed / shown)


def tiles_needed(
    call: AttentionCall, tiling: Tiling, sides: Sides
) -> Bool[Array, "batch heads q_blocks k_blocks"]:
    """Returns True for tiles to compute: causal mask, window, segments and mask show a pair there, and
    the proof can't leave them out.
    """
    epsilon, nearest = call.options.skip_epsilon, nearest_keys(call)
    positions = sides["query_positions"], sides["key_positions"]
    behind, ahead = tile_distances(*positions, tiling)
    batch, heads = math.prod(call.query.shape[:-3]), call.query.shape[-2]
    seen_ahead = ahead
    if (reach := sides["query_reach"]) is not None:
        keys = jnp.asarray(positions[1])
        keys = jnp.broadcast_to(keys, (*reach.shape[:-1], keys.shape[-1]))
        _, seen_ahead = tile_distances(reach, keys, tiling)
    seen = tiling.sight.of_tiles(behind, seen_ahead)[:, None]
    for shown in _shown(tiling, sides):
        seen = seen & shown
    seen = jnp.broadcast_to(seen, (batch, heads, *seen.shape[-2:]))
    if epsilon is None or call.bias is None or not call.bias.bounded or nearest is None:
        return seen
    bias = lax.stop_gradient(call.bias.folded(call.query.ndim - 3).padded(*tiling.padding))
    count = np.minimum(
        tiling.k_block, tiling.k_length - tiling.k_block * np.arange(tiling.k_blocks)
    )
    blocks = Blocks(
        behind,
        ahead,
        tiling.q_blocks,
        tiling.k_blocks,
        count.reshape(1, 1, 1, -1),
        first_query=_extremes(positions[0], tiling.q_blocks)[0],
    )
    excess = key_excess(call, nearest, tiling)[..., None]
    if epsilon == 0:
        return seen & ~(excess + bias.upper_bound(blocks) < -UNDERFLOW)
    # Keys ascend, so the farthest before a query are in the first blocks, and those after it in the
    # last ones.
    sums = bias.log_sum_bound(blocks)
    sums = jnp.broadcast_to(sums, jnp.broadcast_shapes(sums.shape, (1, 1, 1, tiling.k_blocks)))
    directions = [False] if call.causal and call.query_reach is None else [False, True]
    most = math.log(epsilon / len(directions))
    left_out = [
        excess + lax.cumlogsumexp(sums, axis=3, reverse=reverse) < most for reverse in directions
    ]
    return seen & ~functools.reduce(jnp.logical_or, left_out)


def _shown(
    tiling: Tiling, sides: Sides
) -> Iterator[Bool[Array, "#batch #heads #q_blocks #k_blocks"]]:
    """Yields False for tiles in which segments hide all pairs, then for those in which the mask does."""
    if sides["query_segments"] is not None:
        lowest, highest = _extremes(sides["query_segments"], tiling.q_blocks)
        lowest_key, highest_key = _extremes(sides["key_segments"], tiling.k_blocks)
        overlap = lowest[:, :, None] <= highest_key[:, None, :]
        yield (overlap & (lowest_key[:, None, :] <= highest[:, :, None]))[:, None]
    if (mask := sides["mask"]) is not None:
        for axis, count in ((2, tiling.q_blocks), (3, tiling.k_blocks)):
            if mask.shape[axis] > 1:
                by_block = mask.reshape(*mask.shape[:axis], count, -1, *mask.shape[axis + 1 :])
                mask = by_block.any(axis=axis + 1)
        yield mask


def tile_distances(
    query_positions: Integer[Array | np.ndarray, "*batch q"],
    key_positions: Integer[Array | np.ndarray, "*batch k"],
    tiling: Tiling,
) -> tuple[Any, Any]:
    """Returns, for each tile, the least query position minus key position, and the least key position
    minus query position, `[batch or 1, q_blocks, k_blocks]`.

    NumPy positions, which are known when the call is traced, give NumPy distances.
    """
    lowest_query, highest_query = _extremes(query_positions, tiling.q_blocks)
    lowest_key, highest_key = _extremes(key_positions, tiling.k_blocks)
    behind = lowest_query[:, :, None] - highest_key[:, None, :]
    return behind, lowest_key[:, None, :] - highest_query[:, :, None]


def _extremes(positions: Any, blocks: int) -> tuple[Any, Any]:
    """Returns the least and the greatest position in each block, `[batch or 1, blocks]`."""
    by_block = positions.reshape(-1, blocks, positions.shape[-1] // blocks)
    return by_block.min(axis=-1), by_block.max(axis=-1)


def nearest_keys(call: AttentionCall) -> Nearest | None:
    """Returns each query's nearest key, or None if only the running program knows it.

    It is known if positions are NumPy arrays, the keys' positions ascend, and there is no mask.
    """
    if call.mask is not None or call.known_positions is None:
        return None
    queries, keys = call.known_positions
    if np.any(np.diff(keys) <= 0):
        return None
    if call.query_segments is not None:
        # A query is sure to share its segment with its own key alone.
        if call.query_segments is not call.key_segments or not np.array_equal(queries, keys):
            return None
        return Nearest(np.arange(queries.size), np.zeros(queries.size, np.int64))
    # the last key up to the query, or key 0
    before = np.maximum(np.searchsorted(keys, queries, side="right") - 1, 0)
    indices = before
    if not call.causal:
        after = np.minimum(before + 1, keys.size - 1)
        indices = np.where(
            np.abs(keys[after] - queries) < np.abs(queries - keys[before]), after, before
        )
    distances = np.abs(queries - keys[indices])
    for seen in call.sight.of_pairs(queries, keys[indices]):
        distances = np.where(seen, distances, 0)
    return Nearest(indices, distances)
