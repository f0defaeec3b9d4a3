"""What only an accelerator can show, for scripts/device_check.sh."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.test_fused import bias_of, by

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
    found = by("fused", arrays, params, bias)
    expected = by("reference", arrays, params, bias)
    for got, right in zip(found, expected, strict=True):
        assert error(got, right) < 0.02
