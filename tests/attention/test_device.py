"""Checks that need an accelerator, for tools/device_check.sh."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.calls import inputs, value_and_gradients
from tests.attention.test_fused import bias_of

pytestmark = pytest.mark.skipif(
    "ALIBI_TEST_PLATFORM" not in os.environ,
    reason="for accelerators: ALIBI_TEST_PLATFORM=cuda pytest tests/attention/test_device.py",
)


def error(got, right):
    got, right = (np.asarray(x, np.float64) for x in (got, right))
    return np.abs(got - right).max() / (1e-9 + np.abs(right).max())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["none", "alibi_learned", "t5", "kerple_log", "fox"])
def test_kernels_equal_the_reference(name, head_dim, monkeypatch):
    """With inputs of bfloat16, to the rounding of its products; on a CPU at a shorter length."""
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    length = 200 if jax.default_backend() == "cpu" else 1500
    rng = np.random.default_rng(0)
    arrays = jnp.asarray(rng.standard_normal((4, 2, length, 4, head_dim)), jnp.bfloat16)
    params, bias = bias_of(name, 4, head_dim, length=length)
    found = value_and_gradients(arrays, bias(params), backend="fused")
    exact = arrays.astype(jnp.float32)
    expected = value_and_gradients(exact, bias(params), backend="reference", precision="highest")
    for got, right in zip(found, expected, strict=True):
        assert error(got, right) < 0.02


@pytest.mark.parametrize("head_dim", [80, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_all_features_at_once_equal_the_reference(dtype, head_dim, monkeypatch):
    """Packed documents, shared keys, a window, a sink and a cap."""
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    length = 100 if jax.default_backend() == "cpu" else 1100
    arrays = [jnp.asarray(x, dtype) for x in inputs(2, length, length, 4, head_dim, kv_heads=2)]
    tokens = np.arange(length)
    segments = jnp.asarray(np.stack([tokens // 30, 0 * tokens]))
    positions = jnp.asarray(np.stack([tokens % 30, tokens]))
    params, bias = bias_of("alibi_learned", 4, head_dim)
    arguments = {
        "query_positions": positions,
        "key_positions": positions,
        "segment_ids": segments,
        "sink": jnp.asarray([0.0, 0.5, -1.0, 2.0]),
        "window": 90,
        "logit_cap": 4.0,
        "precision": "highest" if dtype == jnp.float32 else None,
    }
    found = value_and_gradients(arrays, bias(params), backend="fused", **arguments)
    exact = [x.astype(jnp.float32) for x in arrays]
    arguments |= {"precision": "highest", "backend": "reference"}
    expected = value_and_gradients(exact, bias(params), **arguments)
    for got, right in zip(found, expected, strict=True):
        assert error(got, right) < (1e-4 if dtype == jnp.float32 else 0.02)
