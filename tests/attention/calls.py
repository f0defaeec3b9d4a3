"""Calls and devices for several tests of attention, and ALiBi's reach as a formula of its own."""

import dataclasses
import functools
import inspect

import jax
import numpy as np

from alibi.attention import AttentionOptions, attend, method_attention_fn
from alibi.attention.call import AttentionCall
from alibi.positions.bias import UNDERFLOW


def inputs(batch, q, k, heads, head_dim, *, kv_heads=0, value_dim=0, seed=0):
    """Returns queries, keys, values, and a gradient of the result, `[batch, length, heads,
    features]`, float32.
    """
    rng, kv_heads, value_dim = np.random.default_rng(seed), kv_heads or heads, value_dim or head_dim
    shapes = (
        (q, heads, head_dim),
        (k, kv_heads, head_dim),
        (k, kv_heads, value_dim),
        (q, heads, value_dim),
    )
    return tuple(rng.standard_normal((batch, *shape), np.float32) for shape in shapes)


def value_and_gradients(arrays, bias, sink=None, **arguments):
    """Returns the result of `attend`, and the gradients of queries, keys, values, the bias and the
    sink, as one list.
    """
    *arrays, incoming = arrays

    def scalar(arrays, bias, sink):
        attended = attend(*arrays, bias=bias, sink=sink, **arguments)
        return (attended * incoming).sum(), attended

    step = jax.jit(jax.grad(scalar, argnums=(0, 1, 2), has_aux=True))
    gradients, attended = step(arrays, bias, sink)
    return jax.tree.leaves((attended, gradients))


def assert_near(found, expected, share=1e-5):
    """Compares trees of arrays, each array by a share of one more than its largest value."""
    for got, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=share * (1 + np.abs(right).max()))


def assert_equals_reference(backend, arrays, bias, sink=None, *, share=1e-5, **arguments):
    """Compares what `value_and_gradients` returns by a backend with the reference's."""
    ways = (
        value_and_gradients(arrays, bias, sink, backend=name, **arguments)
        for name in (backend, "reference")
    )
    assert_near(*ways, share)


def formula(query, key, value, bias=0.0, visible=True, *, sink=None, cap=None):
    """softmax(q k^T / sqrt(d) + bias) v in float64, from `[batch, length, heads, features]`. A sink is one
    more key with a value of zero.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    weights = np.where(visible, np.exp(logits + bias), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += np.exp(np.asarray(sink, np.float64))[:, None, None]
    return np.einsum("bhqk,bkhd->bqhd", weights / total, value)


def double(given):
    return {name: np.asarray(x, np.float64) for name, x in given.items()}


def check_derivatives(loss, given, gradients, share=1e-5):
    """Checks derivatives of a formula along a random direction of each input, by differences in
    float64, to a share of one more than the sum of the gradient's parts along it.
    """
    rng, given = np.random.default_rng(2), double(given)
    for name, gradient in gradients.items():
        direction, step = rng.normal(size=np.shape(gradient)), 1e-6
        ahead, behind = (
            loss(given | {name: given[name] + sign * step * direction}) for sign in (1, -1)
        )
        expected, along = (ahead - behind) / (2 * step), np.asarray(gradient) * direction
        assert abs(along.sum() - expected) <= share * (1.0 + np.abs(along).sum()), name
        assert np.abs(gradient).max() > 0 or expected == 0.0, name


def check_layer(
    method, given, formula, *, atol, share=1e-5, backends=("auto",), segment_ids=None, **options
):
    """Compares a layer's attention and its gradients with a formula in float64, and the gradients of
    further backends with those of the first.

    Args:
      given: x, query, key, value, and the method's parameters.

    Returns:
      The names of those that have a gradient.
    """
    wanted = np.random.default_rng(1).normal(size=given["value"].shape)
    places = np.arange(given["x"].shape[1])

    @functools.partial(jax.jit, static_argnums=1)
    @functools.partial(jax.grad, has_aux=True)
    def run(given, backend):
        layer = method_attention_fn(
            method,
            given,
            given["x"],
            query_positions=places,
            key_positions=places,
            segment_ids=segment_ids,
            options=AttentionOptions(backend=backend, **options),
        )
        out = layer(given["query"], given["key"], given["value"])
        return (out * wanted.astype(np.float32)).sum(), out

    expected = formula(double(given))
    (gradients, out), *others = (run(given, backend) for backend in backends)
    np.testing.assert_allclose(out, expected, atol=atol)
    check_derivatives(lambda given: (formula(given) * wanted).sum(), given, gradients, share)
    for further, out in others:
        np.testing.assert_allclose(out, expected, atol=atol)
        assert_near(further, gradients, share)
    return {name for name, gradient in gradients.items() if np.abs(gradient).max() > 0}


def on(call: AttentionCall, platform: str) -> AttentionCall:
    """Returns the call for another platform."""
    return dataclasses.replace(call, options=dataclasses.replace(call.options, platform=platform))


def reach(
    slopes: float | np.ndarray,
    excess: float | np.ndarray,
    epsilon: float,
    *,
    symmetric: bool = False,
):
    """Returns the distance at which keys of ALiBi are out of reach: x - m d = -104, or all together
    weigh epsilon.

    `excess` is x of `alibi.attention.skipping`; all keys at distances d, d + 1, ... on one side
    weigh at most exp(x - m d) / (1 - exp(-m)).
    """
    slopes = np.asarray(slopes, np.float64)
    if epsilon == 0:
        return (excess + UNDERFLOW) / slopes
    return (
        excess + np.log((2 if symmetric else 1) / epsilon) - np.log(-np.expm1(-slopes))
    ) / slopes


def abstract_device(platform: str) -> jax.sharding.AbstractDevice:
    """Returns a TPU ("tpu") or GPU ("cuda") to lower for. JAX 0.10.0 and 0.10.1 don't take its
    platform.
    """
    known = inspect.signature(jax.sharding.AbstractDevice).parameters
    kind, cores = {"tpu": ("TPU v5 lite", 1), "cuda": ("NVIDIA H100", None)}[platform]
    fields = {"device_kind": kind, "num_cores": cores, "platform": platform}
    return jax.sharding.AbstractDevice(
        **{name: value for name, value in fields.items() if name in known}
    )
