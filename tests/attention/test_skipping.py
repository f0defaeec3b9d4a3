"""The proof of skipping by itself: tiles left out have no more weight, in float64, than the
formulas allow.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.attention import method_attention_fn, tiles
from alibi.attention.backends import BACKENDS
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.skipping import (
    LOGIT_ROUNDING,
    key_ranges,
    skipped_share,
    tiles_needed,
)
from alibi.attention.tiles import make_sides, make_tiling
from alibi.positions import AlibiBias, make_position
from alibi.positions.bias import UNDERFLOW, Blocks

SLOPES = np.float32([4.0, 0.5, 0.1, 0.0])
HEAD_DIM = 4

# Positions of queries and keys, and what else hides keys.
GAPS = np.cumsum(np.random.default_rng(1).integers(1, 30, 61))
FORMS = {
    "a whole sequence": (np.arange(61), np.arange(61), {}),
    "gaps between positions": (GAPS, GAPS, {}),
    "queries after their cache": (np.arange(77, 90), np.arange(90), {}),
    "queries far after their cache": (np.arange(577, 590), np.arange(90), {}),
    "queries between keys far apart": (np.arange(13) * 200 + 90, np.arange(90) * 30, {}),
    "both directions": (np.arange(61), np.arange(61), {"causal": False}),
    "both directions, queries after the keys": (
        np.arange(577, 590),
        np.arange(90),
        {"causal": False},
    ),
    "a window": (np.arange(61), np.arange(61), {"window": 20}),
    "a window that hides the nearest key": (np.arange(95, 108), np.arange(90), {"window": 12}),
}


ALONG = np.eye(HEAD_DIM)[0] * 6.0


def alike(length):
    return np.broadcast_to(ALONG, (length, SLOPES.size, HEAD_DIM)).copy()


def first_third_along(q_length, k_length, others):
    """Returns far keys along the query, and near keys `others` times as long."""
    k = alike(k_length)
    k[k_length // 3 :] *= others
    return alike(q_length), k


def one_far_key_greater_than_all(q_length, k_length):
    k = -0.1 * alike(k_length)
    k[k_length // 4] = ALONG
    return alike(q_length), k


def norms_that_differ(q_length, k_length):
    rng = np.random.default_rng(0)
    q = alike(q_length) * np.exp(rng.standard_normal((q_length, SLOPES.size, 1)))
    signs = rng.choice([-1, 1], (k_length, 1, 1))
    return q, signs * alike(k_length) * np.exp(rng.standard_normal((k_length, SLOPES.size, 1)))


def normal(q_length, k_length):
    rng = np.random.default_rng(0)
    return tuple(
        3 * rng.standard_normal((length, SLOPES.size, HEAD_DIM)) for length in (q_length, k_length)
    )


# Queries and keys, `[length, heads, head_dim]`, that are hard for the bound in one way each.
CONTENTS = {
    "near keys against the query": functools.partial(first_third_along, others=-1),
    "near keys zero": functools.partial(first_third_along, others=0),
    "one far key greater than all": one_far_key_greater_than_all,
    "norms that differ": norms_that_differ,
    "normal": normal,
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 8 by 8, a single head at a time."""
    monkeypatch.setattr(tiles, "BLOCK", 8)
    monkeypatch.setattr(tiles, "TILE_WEIGHTS", 8 * 8)


def weights_and_seen(q, k, query_positions, key_positions, causal, window):
    """Exponentials relative to the largest of each row, and where queries see keys; `[heads, q, k]`
    and `[q, k]`.
    """
    distance = query_positions[:, None] - key_positions[None, :]
    bias = np.multiply.outer(SLOPES.astype(np.float64), distance if causal else np.abs(distance))
    seen = (distance >= 0) if causal else np.ones(distance.shape, bool)
    if window is not None:
        seen &= np.abs(distance) < window
    logits = np.where(seen, np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM) - bias, -np.inf)
    largest = logits.max(axis=-1, keepdims=True)
    return np.exp(logits - np.where(np.isfinite(largest), largest, 0.0)), seen


def weights_computed(call):
    """Returns whether each weight's tile is computed, `[heads, q, k]`."""
    tiling = make_tiling(call)
    assert (tiling.head_group, tiling.groups) == (1, SLOPES.size)
    first, after_last = np.moveaxis(
        np.asarray(key_ranges(call, tiling, make_sides(call, tiling))), -1, 0
    )
    block = np.arange(tiling.k_blocks)
    needed = (first[..., None] <= block) & (block < after_last[..., None])
    needed = needed.repeat(tiling.q_block, axis=1).repeat(tiling.k_block, axis=2)
    return needed[:, : tiling.q_length, : tiling.k_length]


@pytest.mark.parametrize("form", FORMS)
def test_tiles_left_out_weigh_no_more_than_epsilon(form):
    query_positions, key_positions, hides = FORMS[form]
    hides = {"causal": True, "window": None} | hides
    left_out = 0
    for name, epsilon in itertools.product(CONTENTS, (0.0, 0.5)):
        q, k = (
            x.astype(np.float32) for x in CONTENTS[name](query_positions.size, key_positions.size)
        )
        arrays = (jnp.asarray(x)[None] for x in (q, k, np.ones_like(k)))
        bias = AlibiBias(jnp.asarray(SLOPES), symmetric=not hides["causal"])
        call = AttentionCall(
            *arrays,
            bias=bias,
            query_positions=query_positions,
            key_positions=key_positions,
            causal=hides["causal"],
            options=AttentionOptions(window=hides["window"], skip_epsilon=epsilon),
            devices=1,
        )
        weights, seen = weights_and_seen(
            q.astype(np.float64), k, query_positions, key_positions, **hides
        )
        inside = weights_computed(call)
        outside = np.where(inside, 0.0, weights)
        if epsilon == 0:
            assert outside.max() <= np.exp(-UNDERFLOW), name
        else:
            total = np.where(weights.any(axis=-1), weights.sum(axis=-1), 1.0)
            assert (outside.sum(axis=-1) / total).max() <= epsilon, (name, epsilon)
        left_out += np.sum(~inside & seen)
    assert left_out > 0 or form == "a window that hides the nearest key"


def test_an_input_that_is_no_number_skips_nothing():
    """Nothing of its head for a bad key or value; nothing of its block for a bad query."""
    positions = np.arange(61)
    causal_blocks = np.tri(8, dtype=bool).repeat(8, axis=0).repeat(8, axis=1)[:61, :61]
    for where, bad in itertools.product("qkv", (np.nan, np.inf, -np.inf)):
        arrays = [*normal(61, 61), np.ones((61, SLOPES.size, HEAD_DIM))]
        arrays["qkv".index(where)][50, 0, 1] = bad
        call = AttentionCall(
            *(jnp.asarray(x, jnp.float32)[None] for x in arrays),
            bias=AlibiBias(jnp.full(SLOPES.size, 4.0)),
            causal=True,
            query_positions=positions,
            key_positions=positions,
            options=AttentionOptions(skip_epsilon=1e-6),
            devices=1,
        )
        of_it, of_another_head, *_ = weights_computed(call)
        rows = slice(48, 56) if where == "q" else slice(None)
        np.testing.assert_array_equal(of_it[rows], causal_blocks[rows])
        assert of_another_head[rows].sum() < causal_blocks[rows].sum()


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_no_tile_is_kept_that_the_formulas_leave_out(epsilon):
    """If all keys are alike, U - l is the allowance for rounding, and a query's own key has no
    bias.
    """
    positions, ones = np.arange(512), jnp.ones((1, 512, SLOPES.size, HEAD_DIM))
    options = AttentionOptions(skip_epsilon=epsilon)
    call = AttentionCall(
        ones,
        ones,
        ones,
        AlibiBias(jnp.asarray(SLOPES)),
        True,
        positions,
        positions,
        options=options,
        devices=1,
    )
    tiling = make_tiling(call)
    needed = np.asarray(jax.jit(lambda: tiles_needed(call, tiling, make_sides(call, tiling)))())
    excess = 2 * LOGIT_ROUNDING * np.sqrt(HEAD_DIM)  # |q| |k| / sqrt(head_dim) = 4 / 2
    expected = []
    for slope in SLOPES.astype(np.float64):
        for query in range(0, 512, 8):
            # the least distance to each block up to its own
            nearest = query - np.arange(0, query + 8, 8) - 7
            of_keys = -slope * (nearest[:, None] + np.arange(8)[None])
            weight = (
                of_keys[:, 0] + UNDERFLOW
                if epsilon == 0
                else np.logaddexp.accumulate(np.logaddexp.reduce(of_keys, axis=1)) - np.log(epsilon)
            )
            expected.append((weight + excess >= 0).sum())
    np.testing.assert_array_equal(needed[0].sum(axis=-1).ravel(), expected)
    of_heads = needed[0].sum(axis=(-2, -1))
    assert of_heads[0] < of_heads[1] < of_heads[3] == 64 * 65 // 2, (
        "a head without a slope sees all blocks"
    )


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_bias_that_favours_far_keys_has_no_bound(symmetric):
    distances = np.asarray([0, 3, 700])
    count, first = np.full((1, 1, 1, 3), 16), np.zeros((1, 1), int)
    blocks = Blocks(distances[None, None], -distances[None, None] - 15, 1, 3, count, first)
    rising = AlibiBias(-jnp.asarray(SLOPES), symmetric)
    assert np.isposinf(rising.upper_bound(blocks)[:, :-1]).all(), "nothing says how far"


@pytest.mark.parametrize(
    ("name", "options", "epsilon"),
    [
        ("sandwich", {"features": 512}, 1e-6),
        ("fox", {}, 0.0),
    ],
)
def test_skipping_in_two_thousand_tokens_changes_no_row(monkeypatch, name, options, epsilon):
    """The last rows of bounded biases against the dense formula, with tiles left out."""
    method = make_position(
        name, num_heads=2, head_dim=8, width=16, train_length=64, options=options
    )
    params = {**method.init(jax.random.key(0)), **method.init_layer(jax.random.key(0))}
    x = jax.random.normal(jax.random.key(1), (1, 2048, 16))
    q, k, v = (jax.random.normal(jax.random.key(seed), (1, 2048, 2, 8)) for seed in (2, 3, 4))
    shares = []

    def noted(call):
        shares.append(skipped_share(call))
        return blocked.run(call)

    monkeypatch.setattr(jax, "device_count", lambda *args: 1)  # on several nothing goes in turn
    blocked = BACKENDS["blocked"]
    monkeypatch.setitem(BACKENDS, "blocked", dataclasses.replace(blocked, run=noted))

    def attended(x, q, k, v, backend):
        places = {
            "query_positions": np.arange(2048)[-q.shape[1] :],
            "key_positions": np.arange(2048),
        }
        how = AttentionOptions(skip_epsilon=epsilon, backend=backend)
        return method_attention_fn(method, params, x, **places, options=how)(q, k, v)

    whole = attended(x, q, k, v, "blocked")
    assert shares[0] > 0.2
    dense = jax.jit(functools.partial(attended, backend="reference"))(x, q[:, -128:], k, v)
    np.testing.assert_allclose(whole[:, -128:], dense, atol=5e-6)
