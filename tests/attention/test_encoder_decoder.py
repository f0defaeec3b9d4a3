"""The encoder-decoders of docs/cross-attention.md learn to reverse sequences, and read longer ones."""

import functools
import re

import flax.nnx as nnx
import jax
import numpy as np
import optax
import pytest

from tests.hosts import ROOT
from tests.programs import OPTIMIZED

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

    @functools.partial(jax.jit, compiler_options=OPTIMIZED)
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


def test_the_linen_model_reverses_and_the_nnx_model_computes_the_same(page):
    """With the trained parameters, at the training length and at four times it."""
    params = trained(page)
    model, twin = page["EncoderDecoder"](), page["NnxEncoderDecoder"](nnx.Rngs(0))
    found = read(page, jax.jit(lambda *x: model.apply(params, *x)))
    assert found[8][0] > 0.98
    assert found[8][1] > 0.99, "the first token, which is the source's last"
    assert found[32][0] > 0.75
    own = params["params"]
    for block, given, norms in (
        (twin.encoder[0], own["Block_0"], (0, 2)),
        (twin.decoder[0], own["Block_1"], (0, 1, 2)),
    ):
        copy(block.own, given["SelfAttention_0"])
        copy(block.narrow, given["Dense_0"])
        copy(block.wide, given["Dense_1"])
        for number, place in enumerate(norms):
            copy(block.norms[place], given[f"LayerNorm_{number}"])
    copy(twin.decoder[0].cross, own["Block_1"]["CrossAttention_0"])
    copy(twin.embed, own["Embed_0"])
    copy(twin.head, own["Dense_0"])
    for number, norm in enumerate(twin.norms):
        copy(norm, own[f"LayerNorm_{number}"])
    assert read(page, nnx.jit(twin))[32] == pytest.approx(found[32], abs=2e-3)
    source, target, output = page["batch"](jax.random.key(2), 32)
    np.testing.assert_allclose(
        np.where(output[..., None] > 0, nnx.jit(twin)(source, target), 0),
        np.where(output[..., None] > 0, jax.jit(model.apply)(params, source, target), 0),
        atol=2e-4,
    )


def copy(module, params):
    for name, value in params.items():
        if isinstance(value, dict):
            copy(getattr(module, name), value)
        else:
            assert getattr(module, name).shape == value.shape
            getattr(module, name).set_value(value)
