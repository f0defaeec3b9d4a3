"""A sink in the softmax and a cap of the logits, in every backend, against formulas in float64."""

import dataclasses
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
from tests.attention.calls import inputs

BATCH, Q, K, HEADS, DIM = 2, 70, 90, 3, 8
SINKS = np.array([-1.5, 0.0, 4.0], np.float32)  # the last takes nearly all of the weight
CAP = 1.5
POSITIONS = np.arange(Q) + K - Q


def formula(query, key, value, slopes, sink, *, cap=None, visible=True):
    """Attention in float64: the sink is one more key with a value of zero."""
    query, key, value, slopes = (np.asarray(x, np.float64) for x in (query, key, value, slopes))
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(DIM)
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    distance = POSITIONS[-query.shape[1] :, None] - np.arange(K)
    logits = np.where((distance >= 0) & visible, logits - slopes[:, None, None] * distance, -np.inf)
    exponentials = np.exp(logits)
    total = exponentials.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(np.asarray(sink, np.float64))[:, None, None]
    return np.einsum("bhqk,bkhd->bqhd", exponentials / total, value)


def given(queries=Q):
    query, key, value, incoming = inputs(BATCH, Q, K, HEADS, DIM)
    slopes = np.asarray(alibi_slopes(HEADS))
    arrays = query[:, -queries:] * 2, key, value, slopes, SINKS
    return tuple(map(jnp.asarray, arrays)), incoming[:, -queries:]


def differences(arrays, incoming, **arguments):
    """Returns the largest differences of the result and of its gradients from the formula's."""

    def scalar(query, key, value, slopes, sink, incoming):
        attended = attend(
            query,
            key,
            value,
            slopes=slopes,
            sink=sink,
            query_positions=POSITIONS[-query.shape[1] :],
            key_positions=np.arange(K),
            **arguments,
        )
        return (attended * incoming).sum(), attended

    run = jax.jit(jax.grad(scalar, argnums=range(5), has_aux=True))
    gradients, attended = run(*arrays, incoming)
    how = {
        "cap": arguments.get("logit_cap"),
        "visible": np.asarray(arguments.get("mask", True)),
    }
    found = {"attended": np.abs(attended - formula(*arrays, **how)).max()}
    rng = np.random.default_rng(3)
    for number, name in enumerate(("query", "key", "value", "slopes", "sink")):
        direction, step = rng.normal(size=arrays[number].shape), 1e-6
        moved = [np.asarray(x, np.float64) for x in arrays]
        sides = []
        for sign in (1, -1):
            own = [*moved]
            own[number] = moved[number] + sign * step * direction
            sides.append((formula(*own, **how) * incoming).sum())
        expected = (sides[0] - sides[1]) / (2 * step)
        got = (np.asarray(gradients[number], np.float64) * direction).sum()
        found[name] = abs(got - expected) / (1 + np.abs(gradients[number] * direction).sum())
    return found


@pytest.mark.parametrize(
    ("backend", "cap"),
    [
        *((backend, None) for backend in ("reference", "saved", "blocked", "decoding")),
        *((backend, CAP) for backend in ("reference", "blocked", "decoding")),
    ],
)
def test_values_and_gradients_are_the_formulas(backend: str, cap: float | None) -> None:
    arrays, incoming = given(1 if backend == "decoding" else Q)
    found = differences(arrays, incoming, backend=backend, logit_cap=cap)
    assert max(found.values()) < 5e-6, found


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_a_query_that_sees_no_key_gives_zeros_and_the_sink_takes_all(backend: str) -> None:
    arrays, incoming = given()
    mask = np.random.default_rng(5).random((BATCH, HEADS, Q, K)) < 0.6
    mask[:, :, 7] = False
    found = differences(arrays, incoming, backend=backend, mask=jnp.asarray(mask))
    assert max(found.values()) < 5e-6, found
    *arrays, slopes, sink = arrays
    attended = attend(*arrays, slopes=slopes, sink=sink, mask=jnp.asarray(mask), backend=backend)
    np.testing.assert_array_equal(attended[:, 7], 0.0)


@pytest.mark.parametrize("backend", ["blocked", "saved"])
def test_on_several_devices_each_has_the_sinks_of_its_heads(backend: str) -> None:
    devices = np.asarray(jax.devices()[:6]).reshape(2, 3)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
    arrays, incoming = given()
    sharding = NamedSharding(mesh, P("data", None, "tensor"))
    found = differences(arrays, incoming, backend=backend, sharding=sharding)
    assert max(found.values()) < 5e-6, found


@pytest.mark.parametrize("backend", ["reference", "saved", "blocked", "decoding"])
def test_heads_that_share_a_key_head_have_sinks_of_their_own(backend: str) -> None:
    (query, key, value, slopes, sink), _ = given(1 if backend == "decoding" else Q)
    key, value = key[:, :, :1], value[:, :, :1]
    attended = attend(query, key, value, slopes=slopes, sink=sink, backend=backend)
    key, value = (np.repeat(x, HEADS, axis=2) for x in (key, value))
    np.testing.assert_allclose(attended, formula(query, key, value, slopes, sink), atol=2e-6)


@pytest.mark.parametrize("backend", ["reference", "saved", "blocked", "decoding"])
def test_a_sink_in_half_precision_has_a_gradient_of_its_dtype(backend: str) -> None:
    """It is summed in float32; JAX adds it to the gradients of other uses, which have this dtype."""
    (*arrays, slopes, sink), incoming = given(1 if backend == "decoding" else Q)

    def loss(sink):
        attended = attend(*arrays, slopes=slopes, sink=sink, backend=backend)
        return (attended * incoming).sum() + sink.astype(jnp.float32).sum()

    half = sink.astype(jnp.bfloat16)
    got, exact = jax.grad(loss)(half), jax.grad(loss)(half.astype(jnp.float32))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), exact, rtol=2**-7)


@pytest.mark.parametrize("queries", [1, Q])
def test_a_bias_of_query_and_key_terms_is_whole_beside_a_sink(queries: int) -> None:
    """Softmax ignores the query's term of FoX's bias; with a sink it does not."""
    method = make_position("fox", num_heads=HEADS, head_dim=DIM, width=24, train_length=K)
    params = method.init_layer(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, K, 24)), jnp.float32)
    (query, key, value, *_), _ = given(queries)

    @functools.partial(jax.jit, static_argnums=0)
    def attended(backend: str):
        attend = method_attention_fn(
            method,
            params,
            x,
            query_positions=POSITIONS[-queries:],
            key_positions=np.arange(K),
            sink=jnp.asarray(SINKS),
            options=AttentionOptions(backend=backend, block=32),
        )
        return attend(query, key, value)

    for backend in ("saved", "blocked"):
        np.testing.assert_allclose(attended(backend), attended("reference"), atol=2e-6)


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("backend", ["blocked", "decoding"])
def test_skipping_loses_no_more_than_it_may_with_sink_and_cap(backend: str, epsilon: float) -> None:
    """Far keys along the queries and near ones against them have just the weight that may not be
    lost.
    """
    length, cap, block = 512, 20.0, 32
    along = jnp.full((1, length, 1, DIM), 5.0)
    key = jnp.where((jnp.arange(length) < block)[None, :, None, None], along, -along)
    value = jnp.asarray(np.random.default_rng(0).normal(size=key.shape), jnp.float32)
    query = along[:, -1:] if backend == "decoding" else along
    apart = 2 * cap * np.tanh(25 * DIM / np.sqrt(DIM) / cap)
    slope = (apart - np.log(max(epsilon, 1e-5))) / length
    call = AttentionCall(
        query,
        key,
        value,
        AlibiBias(jnp.full(1, slope)),
        True,
        np.arange(length)[-query.shape[1] :],
        np.arange(length),
        sink=jnp.full(1, -300.0),
        options=AttentionOptions(None, epsilon, None, backend, block, logit_cap=cap),
    )
    exact, got = (
        compute_call(dataclasses.replace(call, options=how))
        for how in (dataclasses.replace(call.options, backend="reference"), call.options)
    )
    assert np.abs(got - exact).max() <= 2 * epsilon * np.abs(value).max() + 1e-5
    free = compute_call(dataclasses.replace(call, sink=None))
    assert np.abs(free - exact).max() < 1e-5, "a sink of exp(-300) takes nothing"


@pytest.mark.usefixtures("unchecked")
def test_calls_that_a_backend_can_not_do_are_refused_in_a_line() -> None:
    arrays, _ = given()
    query, key, value = (x[:, -Q:] for x in arrays[:3])
    for backend, arguments, message in (
        ("augmented", {"sink": SINKS}, "'augmented' can't do this call: its softmax has no sink"),
        ("augmented", {"logit_cap": 3.0}, "'augmented' can't do this call: it caps no logits"),
        ("saved", {"logit_cap": 3.0}, "'saved' can't do this call: it caps no logits"),
        ("auto", {"logit_cap": 0.0}, "logit_cap=0.0 must be above 0 and finite"),
        ("auto", {"sink": SINKS[:2]}, r"sink has shape \(2,\); it must be \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            attend(query, key, value, slopes=arrays[3], backend=backend, **arguments)
        assert "\n" not in str(error.value)
