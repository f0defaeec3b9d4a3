"""The encoder-decoders of docs/cross-attention.md learn to reverse sequences, and read longer ones."""

import re

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.hosts import ROOT

STEPS = 400
PAGE = (ROOT / "docs" / "cross-attention.md").read_text()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page():
    """The names that the page's Python defines."""
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        exec(code, names)
    return names


def optimizer():
    return optax.adam(optax.warmup_cosine_decay_schedule(0.0, 3e-3, STEPS // 10, STEPS))


def trained(page):
    model, optimize = page["EncoderDecoder"](), optimizer()

    @jax.jit
    def all_steps(key):
        def step(state, key):
            params, moments = state
            value, gradients = jax.value_and_grad(page["loss"])(params, *page["batch"](key, 8))
            updates, moments = optimize.update(gradients, moments)
            return (optax.apply_updates(params, updates), moments), value

        params = model.init(key, *page["batch"](key, 8)[:2])
        return jax.lax.scan(step, (params, optimize.init(params)), jax.random.split(key, STEPS))

    (params, _), _ = all_steps(jax.random.key(0))
    return params


def read(page, apply):
    """Returns the shares of right tokens and of right first ones at each length."""
    found = {}
    for length in (8, 16, 32):
        source, target, output = page["batch"](jax.random.key(1), length, 256)
        found[length] = page["right"](apply(source, target), output)
    return found


def test_the_linen_model_reverses(page):
    params = trained(page)
    model = page["EncoderDecoder"]()
    found = read(page, jax.jit(lambda *x: model.apply(params, *x)))
    assert found[8][0] > 0.95
    assert found[32][0] > 0.6


def test_the_nnx_model_learns(page):
    """The Linen model, which computes the same, is trained to its end."""
    model = page["NnxEncoderDecoder"](nnx.Rngs(0))
    optimize = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    def loss(model, source, target, output):
        nats = optax.softmax_cross_entropy_with_integer_labels(model(source, target), output)
        return jnp.mean(nats, where=output > 0)

    @nnx.jit
    def step(model, optimize, key):
        value, gradients = nnx.value_and_grad(loss)(model, *page["batch"](key, 8))
        optimize.update(model, gradients)
        return value

    losses = [step(model, optimize, key) for key in jax.random.split(jax.random.key(0), 40)]
    assert np.mean(losses[-5:]) < 0.8 * losses[0]
