"""Whole logits times s ln n: softmax(s ln n (q . k / sqrt(d) + bias)), against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.attention import method_attention_fn
from alibi.attention.call import AttentionOptions
from alibi.model.positions import bias_scale, init_position, scaled_queries
from alibi.positions import AlibiBias, Blocks, make_position
from alibi.positions.kerple import KerpleLogBias
from alibi.positions.scaled import ScaledBias
from tests.attention.calls import check_derivatives

HEADS, HEAD_DIM, LENGTH, TRAIN_LENGTH, BATCH = 2, 8, 21, 12, 2
S = np.asarray([0.7, -0.4])  # learned, so it may fall below 0
VISIBLE = np.tri(LENGTH, dtype=bool)


def made(name: str, rule: str):
    """Returns a method, its parameters with those of the scale, and q, k, v, x and a gradient."""
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "width": HEADS * HEAD_DIM}
    method = make_position(name, **sizes, train_length=TRAIN_LENGTH)
    params = {**method.init(jax.random.key(0)), **init_position(method, rule, jax.random.key(1))}
    if rule == "ssmax":
        params["ssmax"] = jnp.asarray(S, jnp.float32)
    rng = np.random.default_rng(0)
    shape = (BATCH, LENGTH, HEADS, HEAD_DIM)
    shapes = [shape] * 3 + [(BATCH, LENGTH, HEADS * HEAD_DIM), shape]
    return method, params, [jnp.asarray(rng.normal(size=each), jnp.float32) for each in shapes]


def attention(method, rule, params, arrays, last=LENGTH, **options):
    """Returns attention as a layer of the model computes it, for the `last` last queries."""
    q, k, v, x, _ = arrays
    positions = np.arange(LENGTH)
    attend = method_attention_fn(
        method,
        params,
        x,
        query_positions=positions[-last:],
        key_positions=positions,
        scale=functools.partial(scaled_queries, rule, method, params),
        bias_scale=bias_scale(rule, method, params),
        options=AttentionOptions(**options),
    )
    return attend(q[:, -last:], k, v)


def by_formula(method, rule, params, arrays, s):
    """Returns the result in float64, from the method's own queries, keys and bias."""
    q, k, v, x, _ = arrays
    positions = jnp.arange(LENGTH)
    kept = method.keep(params, x, k, padding=None, before=None)
    query, key = (
        turn(params, each, positions, kept)
        for turn, each in ((method.queries, q), (method.keys, k))
    )
    bias = method.content_bias(params, query, kept, kept)
    added = 0.0 if bias is None else np.asarray(bias(positions, positions), np.float64)
    query, key = (np.asarray(each, np.float64) for each in (query, key))
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1]) + added
    of_head = 1 / np.log(TRAIN_LENGTH) if rule == "log_n" else s[:, None, None]
    logits = logits * of_head * np.log(np.arange(1, LENGTH + 1))[:, None]
    weights = np.where(VISIBLE, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0.0)
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights, np.asarray(v, np.float64))


@pytest.mark.parametrize(
    ("name", "rule"),
    [("rotary", "log_n"), ("alibi", "ssmax"), ("deberta", "ssmax")],
)
def test_the_whole_logit_is_scaled_and_s_has_its_gradient(name: str, rule: str) -> None:
    method, params, arrays = made(name, rule)

    def loss(params):
        found = attention(method, rule, params, arrays, backend="reference")
        return (found * arrays[-1]).sum(), found

    (_, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(found, by_formula(method, rule, params, arrays, S), atol=2e-5)
    if rule == "ssmax":
        incoming = np.asarray(arrays[-1], np.float64)

        def product(given):
            return (by_formula(method, rule, params, arrays, given["ssmax"]) * incoming).sum()

        check_derivatives(product, {"ssmax": S}, {"ssmax": gradient["ssmax"]})


@pytest.mark.parametrize(
    ("name", "backend"),
    [("fox", "blocked"), ("shaw", "saved")],
)
def test_backends_equal_the_reference_with_all_gradients(name: str, backend: str) -> None:
    """With a bias of running sums and of the queries; of distance: attention/test_devices.py."""
    method, params, arrays = made(name, "ssmax")

    @functools.partial(jax.jit, static_argnums=2)
    def gradients(params, arrays, backend):
        def loss(params, arrays):
            block = 8 if backend == "blocked" else None
            found = attention(method, "ssmax", params, arrays, backend=backend, block=block)
            return (found * arrays[-1]).sum()

        return jax.value_and_grad(loss, (0, 1))(params, arrays)

    right = jax.tree.leaves(gradients(params, arrays, "reference"))
    for got, expected in zip(
        jax.tree.leaves(gradients(params, arrays, backend)), right, strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * (1 + np.abs(expected).max()))


def test_bounds_hold_in_every_tile_and_a_turned_bias_has_none() -> None:
    """The bias of a tile is scaled least for its first query; with s below 0 it grows with
    distance.
    """
    length, block = 64, 8
    positions, first = np.arange(length), np.arange(0, length, block)
    behind = first[:, None] - first - (block - 1)
    count = np.full((1, 1, 1, first.size), block)
    blocks = Blocks(
        *(jnp.asarray(side)[None] for side in (behind, behind.T)),
        first.size,
        first.size,
        count,
        first_query=first[None],
    )
    rates = jnp.asarray([2.0, 0.5, 1.0])
    for bias in (AlibiBias(rates), KerpleLogBias(rates, rates)):
        scaled = ScaledBias(bias, jnp.asarray([0.3, 2.0, -0.1]))
        assert scaled.bounded, "far keys are skipped by these bounds"
        tiles = np.asarray(scaled(jnp.asarray(positions), jnp.asarray(positions)))
        tiles = np.where(np.tri(length, dtype=bool), tiles, -np.inf)
        largest = tiles.reshape(3, first.size, block, first.size, block).max(axis=(2, 4))
        bound = np.asarray(scaled.upper_bound(blocks))[0]
        assert (largest <= bound + 1e-5).all()
        before = np.tri(first.size, k=-1, dtype=bool)
        exact = tiles[:2, first][:, :, first + block - 1]  # the first query and the nearest key
        np.testing.assert_allclose(bound[:2][:, before], exact[:, before], rtol=1e-5, atol=1e-6)
        assert np.isposinf(bound[2]).all()
