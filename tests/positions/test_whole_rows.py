"""Methods that read whole rows of logits, against formulas in float64: values and gradients, under a
window and in segments, at 6 L, by the dense formula and by tiles.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.attention import AttentionOptions, attend, method_attention_fn
from alibi.attention.backends import BACKENDS, Backend
from alibi.positions import Bias, make_position
from alibi.positions.alibi import AlibiBias
from alibi.positions.bias import UNDERFLOW
from alibi.positions.stick_breaking import StickBreaking
from alibi.testing.samples import params_of
from tests.attention.calls import check_layer
from tests.programs import AS_USERS
from tests.refusals import assert_refused

HEADS, HEAD_DIM, WIDTH, TRAIN_LENGTH = 4, 8, 32, 8
SIZES = {"num_heads": HEADS, "head_dim": HEAD_DIM, "width": WIDTH, "train_length": TRAIN_LENGTH}
SLOPES = np.array([0.0, 0.0, 2.0**-4, 2.0**-8])  # half of the heads have none


def softplus(x):
    return np.logaddexp(x, 0.0)


def softmax(z, seen):
    weights = np.where(seen, np.exp(z - np.where(seen, z, -np.inf).max(axis=-1, keepdims=True)), 0)
    return weights / weights.sum(axis=-1, keepdims=True)


def distances(z):
    return np.subtract.outer(np.arange(z.shape[-2]), np.arange(z.shape[-1]))


def stick_breaking(z, seen, given):
    """Row by row and key by key, from the nearest earlier key on."""
    weights = np.zeros_like(z)
    left = np.ones(z.shape[:2])
    for i in range(z.shape[-1]):
        left = np.ones(z.shape[:2])
        for j in range(i - 1, -1, -1):
            share = np.where(seen[:, :, i, j], 1 / (1 + np.exp(-z[:, :, i, j])), 0.0)
            weights[:, :, i, j] = left * share
            left = left * (1 - share)
    return weights


def cope(z, seen, given):
    gates = np.where(seen, 1 / (1 + np.exp(-z)), 0.0)
    places = np.minimum(gates[..., ::-1].cumsum(axis=-1)[..., ::-1], 4.0)
    products = np.einsum("bihd,pd->bhip", given["query"], given["vectors"])
    hats = np.maximum(0.0, 1 - np.abs(places[..., None] - np.arange(5)))
    return softmax(z + np.einsum("bhijp,bhip->bhij", hats, products), seen)


def entmax(z, seen, given):
    """The threshold by bisection."""
    y = (z - SLOPES[:, None, None] * distances(z)) / 2
    y = np.where(seen, y, -np.inf)
    low, high = y.max(axis=-1, keepdims=True) - 1, y.max(axis=-1, keepdims=True)
    for _ in range(60):
        middle = (low + high) / 2
        above = (np.maximum(y - middle, 0) ** 2).sum(axis=-1, keepdims=True) > 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.maximum(y - (low + high) / 2, 0) ** 2


def asentmax(z, seen, given):
    chosen = np.einsum("blw,whn->bhln", given["x"], given["kernel"]) + given["start"][:, None]
    beta, gamma = softplus(chosen[..., :1]), np.tanh(chosen[..., 1:])
    count = np.maximum(seen.sum(axis=-1, keepdims=True), 2)
    return entmax(z * (given["delta"][:, None, None] + beta * np.log(count) ** gamma), seen, given)


def dape(z, seen, given):
    bias = np.broadcast_to(-(2.0 ** (-2 * np.arange(1, 5)))[:, None, None] * distances(z), z.shape)
    inputs = np.concatenate([z, bias], axis=1)
    hidden = np.einsum("bnij,nw->bwij", inputs, given["first"]) + given["first_bias"][:, None, None]
    hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
    return softmax(z + bias + np.einsum("bwij,wh->bhij", hidden, given["second"]), seen)


CASES = {
    "stick_breaking": ({}, stick_breaking),
    "cope": ({"positions": 5}, cope),
    "entmax": ({}, entmax),
    "asentmax": ({}, asentmax),
    "dape": ({"hidden": 6}, dape),
}


def given_for(name: str, length: int):
    """Returns the method, its parameters and inputs, float32."""
    rng, heads = np.random.default_rng(3), (2, length, HEADS, HEAD_DIM)
    method = make_position(name, **SIZES, options=CASES[name][0]).at_length(length)
    shapes = {"x": (2, length, WIDTH), "query": heads, "key": heads, "value": heads}
    sides = {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    return method, jax.jit(lambda: params_of(method, 0.3))() | sides


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradients_are_those_of_the_formula(name: str) -> None:
    """At 6 L, in two documents and under a window, by three tiles of 16 queries."""
    length = 6 * TRAIN_LENGTH
    (method, given), window, first = given_for(name, length), length // 2, length * 2 // 5
    segments = np.repeat([0, 1], [first, length - first])[None].repeat(2, 0)
    near = (distances(np.zeros((length, length))) >= 0) & (
        distances(np.zeros((length, length))) < window
    )
    seen = np.broadcast_to(
        near & (segments[:, None, :, None] == segments[:, None, None]), (2, HEADS, length, length)
    )

    def formula(given):
        z = np.einsum("bihd,bjhd->bhij", given["query"], given["key"]) / np.sqrt(HEAD_DIM)
        weights = np.where(seen, CASES[name][1](z, seen, given), 0.0)
        return np.einsum("bhij,bjhd->bihd", weights, given["value"])

    how = {"window": window, "block": 16, "segment_ids": jnp.asarray(segments)}
    how["backends"] = ("reference", "blocked")
    check_layer(method, given, formula, atol=1e-5, share=2e-5, **how)


class Rows(Bias):
    """Each key's share of a query's sigmoids, at most 1 in all."""

    reads_rows = True
    gives_weights = True

    def of_rows(self, logits, visible, query_positions, key_positions):
        gates = jax.nn.sigmoid(logits)
        return gates / jnp.maximum(gates.sum(axis=-1, keepdims=True), 1.0)


def test_only_backends_that_name_rows_take_them() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 2, 4)), jnp.float32)
    falls = dict.fromkeys(("query_positions", "key_positions"), np.arange(6)[::-1])
    refused = [
        ({"bias": Rows(), "backend": name}, f"{name}' can't do .*: its bias reads the logits")
        for name, backend in BACKENDS.items()
        if "rows" not in backend.features
    ]
    refused += [
        (
            {"bias": type("Wrong", (AlibiBias,), {name: True})(jnp.ones(2)), "backend": backend},
            f"declares {name}=True, which only whole rows have",
        )
        for name, backend in (("gives_weights", "reference"), ("mixes_heads", "blocked"))
    ]
    refused += [
        ({"bias": Rows(), "sink": jnp.zeros(2)}, r"Rows of .*rows gives weights, .* give no sink"),
        ({"bias": Rows(), **falls}, "key_positions fall; sort keys, values"),
    ]
    for how, message in refused:
        assert_refused(message, attend, x, x, x, **how)
    with pytest.raises(TypeError, match="features"):
        Backend(BACKENDS["reference"].run)  # no feature is had unless it is named
    one = attend(x[:, -1:], x, x, bias=Rows(), backend="single")
    np.testing.assert_allclose(one, attend(x, x, x, bias=Rows())[:, -1:], rtol=1e-5, atol=1e-6)


def test_tiles_behind_which_no_weight_is_left_are_not_needed() -> None:
    """Logits of about 20: 16 of them leave less than float32 knows, so each query needs two tiles."""
    (method, given), length = given_for("stick_breaking", 64), 64
    exact = {key: np.abs(np.asarray(x, np.float64)) for key, x in given.items()}
    exact["key"] *= 12
    z = np.einsum("bihd,bjhd->bhij", exact["query"], exact["key"]) / np.sqrt(HEAD_DIM)
    broken = [softplus(z[..., i, i - 16 : i]).sum(axis=-1).min() for i in range(16, length)]
    assert min(broken) > UNDERFLOW
    seen = np.broadcast_to(distances(z) >= 0, z.shape)
    expected = np.einsum("bhij,bjhd->bihd", stick_breaking(z, seen, {}), exact["value"])
    x, *vectors = (jnp.asarray(exact[name], jnp.float32) for name in ("x", "query", "key", "value"))
    positions = {side: np.arange(length) for side in ("query_positions", "key_positions")}
    options = AttentionOptions(backend="blocked", block=16)
    found = method_attention_fn(method, {}, x, **positions, options=options)(*vectors)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_rows_take_any_batch_shape_mask_dropout_and_cap() -> None:
    """Whole rows by tiles equal the dense formula in every part of a call."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 3, 40, 2, 4)), jnp.float32) for _ in "qkv")
    mask = jnp.asarray(rng.random((2, 1, 1, 40, 40)) < 0.7)
    how = {"bias": Rows(), "mask": mask, "logit_cap": 1.5}
    results = [
        jax.jit(functools.partial(attend, **how, backend=backend))(query, key, value)
        for backend in ("reference", "blocked")
    ]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
    ones, rngs = jnp.ones_like(value), {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    shares = jax.jit(functools.partial(attend, bias=Rows(), backend="blocked", **rngs))(
        query, key, ones
    )
    assert 0.8 < float(shares[..., -20:, :, :].mean()) < 1.2, "factors of 2 and 0 in equal numbers"


@pytest.mark.parametrize("bias", [Rows(), StickBreaking()])
def test_nothing_of_all_pairs_is_kept(bias: Bias) -> None:
    """With whole rows and with a carry, forward and backward: one [q, k] of 16,384 would be a GiB."""
    x = jax.ShapeDtypeStruct((1, 16384, 1, 16), jnp.float32)
    step = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v, bias=bias).sum(), (0, 1, 2)))
    memory = step.lower(x, x, x).compile(compiler_options=AS_USERS).memory_analysis()
    assert memory.temp_size_in_bytes < 2**26
