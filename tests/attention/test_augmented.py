"""ALiBi by added columns: exact in bfloat16, equal to the dense formula, lowered without a bias for
GPUs.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from alibi.attention.accelerator.augmented import (
    MAX_LENGTH,
    augmented_attention,
    bias_columns,
)
from alibi.attention.backends import compute, refusal
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.reference import dense
from alibi.positions import AlibiBias
from alibi.positions.t5 import T5Bias
from alibi.slopes import alibi_slopes
from tests.attention.calls import inputs, on
from tests.refusals import assert_refused


def _call(query, key, value, slopes, first=0, window=None):
    positions = first + np.arange(query.shape[-3])
    known = {"query_positions": positions, "key_positions": positions}
    return AttentionCall(
        query,
        key,
        value,
        bias=AlibiBias(slopes),
        causal=True,
        options=AttentionOptions(window=window),
        **known,
    )


def test_positions_count_from_any_number_and_batch_dimensions_are_any():
    query, key, value, _ = inputs(2, 20, 20, 3, 16)

    def attended(compute, *arrays, **first):
        return np.asarray(jax.jit(lambda *x: compute(_call(*x, alibi_slopes(3), **first)))(*arrays))

    expected = attended(dense, query, key, value)
    # float32 does not tell these positions apart.
    np.testing.assert_allclose(
        attended(augmented_attention, query, key, value, first=2**25), expected, atol=1e-5
    )
    np.testing.assert_allclose(
        attended(augmented_attention, query[0], key[0], value[0]), expected[0], atol=1e-5
    )
    folded = attended(augmented_attention, query[None], key[None], value[None])
    np.testing.assert_allclose(folded[0], expected, atol=1e-5)


@pytest.mark.parametrize(("heads", "length"), [(8, 65_536), (12, MAX_LENGTH)])
def test_weights_in_bfloat16_at_the_end_of_long_sequences(heads, length):
    """Compares the last 16 queries with 4,096 keys, as a kernel computes: float32 sums of bfloat16
    products.
    """
    head_dim, seen = 64, 4096
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 1, seen, heads, head_dim)).astype(jnp.bfloat16)
    slopes = np.asarray(alibi_slopes(heads))
    columns = jax.jit(bias_columns, static_argnums=1)(slopes * head_dim**0.5, length)
    widened = [
        np.concatenate([np.asarray(of_all)[None, -seen:].astype(jnp.bfloat16), x], axis=-1)
        for x, of_all in zip((query, key), columns, strict=True)
    ]
    products = jax.jit(
        functools.partial(jnp.einsum, "bqhd,bkhd->bhqk", preferred_element_type=jnp.float32)
    )
    logits = products(widened[0][:, -16:], widened[1])
    exact = (
        np.einsum("bqhd,bkhd->bhqk", *(np.asarray(x, np.float64) for x in (query[:, -16:], key)))
        / head_dim**0.5
    )
    distance = np.arange(seen - 16, seen)[:, None] - np.arange(seen)
    exact = exact - np.asarray(slopes, np.float64)[:, None, None] * distance
    actual, expected = (
        jax.jit(jax.nn.softmax)(np.where(distance >= 0, x - x.max(-1, keepdims=True), -1e30))
        for x in (np.asarray(logits, np.float64) / head_dim**0.5, exact)
    )
    # L1 of a row of weights, at any length: the columns stand first, so that their sums cancel
    # to m (i - j) before the small products come. The shift form, without the columns of
    # the query's own position, is off by 5e-4 at 65,536 even in float32.
    assert np.abs(np.asarray(actual) - np.asarray(expected)).sum(-1).max() < 2e-6


def _module(platform, target, shape, dtype, gradient, disabled_checks=(), window=None):
    """The StableHLO of the attention or its gradients for a platform that need not be here."""

    def loss(*arguments):
        return (
            augmented_attention(on(_call(*arguments, window=window), platform))
            .astype(jnp.float32)
            .sum()
        )

    function = jax.grad(loss, argnums=(0, 1, 2, 3)) if gradient else loss
    arrays = [jax.ShapeDtypeStruct(shape, dtype)] * 3 + [
        jax.ShapeDtypeStruct((shape[2],), jnp.float32)
    ]
    exported = jax.export.export(
        jax.jit(function), platforms=[target], disabled_checks=disabled_checks
    )(*arrays)
    return exported.mlir_module()


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(("length", "window"), [(1023, None), (1024, None), (1024, 100)])
def test_lowers_to_cudnn_without_a_bias(monkeypatch, length, window, gradient):
    # JAX asks the installed cuDNN for its version; it isn't here. What the GPU's own library
    # then says of the call, only a GPU can tell.
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91100)
    names = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    module = _module("gpu", "cuda", (2, length, 12, 64), jnp.bfloat16, gradient, unchecked, window)
    assert re.findall(r"@(__cudnn\$\w+)", module) == (names if gradient else names[:1])
    assert not re.findall(r"fmhaScaleBias", module)
    # 64 and the columns; the scale is that of 64.
    assert "tensor<2x1024x12x72xbf16>" in module
    assert re.findall(r"fmha_scale\\22: ([0-9.]+)", module) == ["0.125"] * (1 + gradient)
    # A window of 100 is a query's own key and the 99 before it; 0 is none.
    assert re.findall(r"sliding_window_length\\22: ([0-9]+)", module) == [str(window or 0)] * (
        1 + gradient
    )
    assert not re.findall(r"tensor<[0-9x]*1024x1024x[a-z]", module)


def test_a_call_that_it_cannot_do_is_refused_with_the_reason():
    query, key, value, _ = map(jnp.asarray, inputs(1, 8, 8, 2, 64))
    call = _call(query, key, value, alibi_slopes(2))
    half = {name: getattr(call, name).astype(jnp.bfloat16) for name in ("query", "key", "value")}
    wide = {name: jnp.zeros((1, 8, 2, 128), jnp.bfloat16) for name in half}
    later = np.arange(8) + 1
    assert refusal("augmented", call) == ""
    assert refusal("augmented", on(dataclasses.replace(call, **half), "gpu")) == ""
    refused = [
        ({"bias": None}, "cpu", "its bias is not"),
        ({"bias": T5Bias(jnp.zeros((4, 2)), 8)}, "cpu", "its bias is not"),
        ({"bias": AlibiBias(alibi_slopes(2), symmetric=True)}, "cpu", "its bias is not"),
        ({"causal": False}, "cpu", "its bias is not"),
        ({"dropout_rng": jax.random.key(0), "dropout_rate": 0.5}, "cpu", "no dropout"),
        ({"mask": jnp.ones((1, 1, 8, 8), bool)}, "cpu", "no masks"),
        (
            {"query_segments": jnp.zeros((1, 8), int), "key_segments": jnp.zeros((1, 8), int)},
            "cpu",
            "or segments",
        ),
        ({"sow": lambda weights: None}, "cpu", "gives no weights"),
        ({"precision": jax.lax.Precision.HIGHEST}, "cpu", "take no precision"),
        ({"key_positions": jnp.arange(8)}, "cpu", "not known when"),
        ({"query_positions": later}, "cpu", "same consecutive positions"),
        (
            {"query_positions": 2 * later, "key_positions": 2 * later},
            "cpu",
            "same consecutive positions",
        ),
        (
            {
                "query_positions": np.arange(MAX_LENGTH + 1),
                "key_positions": np.arange(MAX_LENGTH + 1),
            },
            "cpu",
            "262145",
        ),
        ({}, "tpu", "a kernel for GPUs alone"),
        ({}, "gpu", "on gpu it takes bfloat16, and got float32"),
        ({"value": half["value"]}, "cpu", "bfloat16 or float32"),
        (wide, "gpu", "heads up to 128 wide here, and with its columns this one has 136"),
    ]
    for changes, platform, reason in refused:
        changed = dataclasses.replace(call, **changes)
        assert reason in refusal("augmented", on(changed, platform))
        if platform == "cpu":
            assert_refused(reason, compute, changed, "augmented")
