"""A sink in the softmax and a cap of the logits against formulas in float64; test_backend_grid.py
compares the backends.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from alibi import alibi_slopes, attend
from alibi.attention import method_attention_fn
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.dispatch import compute_call
from alibi.positions import make_position
from alibi.positions.alibi import AlibiBias
from tests.attention.calls import (
    assert_near,
    check_derivatives,
    formula,
    inputs,
    value_and_gradients,
)

BATCH, Q, K, HEADS, DIM = 2, 70, 90, 3, 8
SINKS = np.array([-1.5, 0.0, 4.0], np.float32)  # the last takes nearly all of the weight
CAP = 1.5
DISTANCE = np.arange(Q)[:, None] + K - Q - np.arange(K)


def by_hand(query, key, value, slopes, sink, *, cap=None, visible=True):
    bias = -np.asarray(slopes, np.float64)[:, None, None] * DISTANCE
    return formula(query, key, value, bias, (DISTANCE >= 0) & visible, sink=sink, cap=cap)


def given():
    """Returns queries, keys, values and a gradient of the result; a bias; and sinks."""
    query, *others = inputs(BATCH, Q, K, HEADS, DIM)
    return (query * 2, *others), AlibiBias(alibi_slopes(HEADS)), SINKS


@pytest.mark.parametrize(
    ("backend", "cap", "masked"),
    [
        ("reference", CAP, False),
        ("reference", None, True),
        ("saved", None, False),
        ("blocked", CAP, True),
    ],
)
def test_values_and_gradients_are_the_formulas(
    backend: str, cap: float | None, masked: bool
) -> None:
    """A query that sees no key gives zeros: the sink takes all."""
    (*arrays, incoming), bias, sink = given()
    mask = np.random.default_rng(5).random((BATCH, HEADS, Q, K)) < 0.6
    mask[:, :, 7] = False
    how = {"cap": cap, "visible": mask if masked else True}
    attended, *gradients = value_and_gradients(
        *given(), backend=backend, logit_cap=cap, mask=jnp.asarray(mask) if masked else None
    )
    names = ("query", "key", "value", "slopes", "sink")
    exact = dict(zip(names, (*arrays, bias.slopes, sink), strict=True))
    np.testing.assert_allclose(attended, by_hand(**exact, **how), rtol=0, atol=5e-6)
    if masked:
        np.testing.assert_array_equal(attended[:, 7], 0.0)
    check_derivatives(
        lambda moved: (by_hand(**moved, **how) * incoming).sum(),
        exact,
        dict(zip(names, gradients, strict=True)),
        share=5e-6,
    )


def test_on_several_devices_each_has_the_sinks_of_its_heads() -> None:
    devices = np.asarray(jax.devices()[:6]).reshape(2, 3)
    sharding = NamedSharding(
        jax.sharding.Mesh(devices, ("data", "tensor")), P("data", None, "tensor")
    )
    split = value_and_gradients(*given(), backend="blocked", sharding=sharding)
    assert_near(split, value_and_gradients(*given(), backend="reference"))


@pytest.mark.parametrize("backend", ["saved", "blocked"])
def test_a_sink_in_half_precision_has_a_gradient_of_its_dtype(backend: str) -> None:
    """It is summed in float32; JAX adds it to the gradients of other uses, which have this dtype."""
    (*arrays, incoming), bias, sink = given()

    @jax.jit
    @jax.grad
    def gradient(sink):
        attended = attend(*map(jnp.asarray, arrays), bias=bias, sink=sink, backend=backend)
        return (attended * incoming).sum() + sink.astype(jnp.float32).sum()

    half = jnp.asarray(sink, jnp.bfloat16)
    got = gradient(half)
    assert got.dtype == jnp.bfloat16
    exact = gradient(half.astype(jnp.float32))
    np.testing.assert_allclose(got.astype(jnp.float32), exact, rtol=2**-7)


def test_a_bias_of_query_and_key_terms_is_whole_beside_a_sink() -> None:
    """Softmax ignores the query's term of FoX's bias; with a sink it does not."""
    method = make_position("fox", num_heads=HEADS, head_dim=DIM, width=24, train_length=K)
    params = method.init_layer(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, K, 24)), jnp.float32)
    query, key, value, _ = given()[0]

    @functools.partial(jax.jit, static_argnums=0)
    def attended(backend: str):
        attend = method_attention_fn(
            method,
            params,
            x,
            query_positions=np.arange(K - Q, K),
            key_positions=np.arange(K),
            sink=jnp.asarray(SINKS),
            options=AttentionOptions(backend=backend, block=32),
        )
        return attend(query, key, value)

    for backend in ("saved", "blocked"):
        np.testing.assert_allclose(attended(backend), attended("reference"), atol=2e-6)


def test_skipping_loses_no_more_than_it_may_with_sink_and_cap() -> None:
    """Far keys along the queries and near ones against them have just the weight that may not be
    lost.
    """
    length, cap, block, epsilon = 512, 20.0, 32, 1e-3
    along = jnp.full((1, length, 1, DIM), 5.0)
    key = jnp.where((jnp.arange(length) < block)[None, :, None, None], along, -along)
    value = jnp.asarray(np.random.default_rng(0).normal(size=key.shape), jnp.float32)
    slope = ((2 * cap * np.tanh(25 * DIM / np.sqrt(DIM) / cap)) - np.log(epsilon)) / length

    @functools.partial(jax.jit, static_argnums=0)
    def attended(backend, sink):
        call = AttentionCall(
            along,
            key,
            value,
            AlibiBias(jnp.full(1, slope)),
            True,
            np.arange(length),
            np.arange(length),
            sink=sink,
            options=AttentionOptions(None, epsilon, None, backend, block, logit_cap=cap),
        )
        return compute_call(call)

    small = jnp.full(1, -300.0)
    exact, got = attended("reference", small), attended("blocked", small)
    assert np.abs(got - exact).max() <= 2 * epsilon * np.abs(value).max() + 1e-5
    free = attended("blocked", None)
    assert np.abs(free - exact).max() < 1e-5, "a sink of exp(-300) takes nothing"
