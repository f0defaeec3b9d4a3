"""The ALiBi bias: exact at any length, of the right sign, from explicit positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import alibi_bias, alibi_slopes


def formula(num_heads: int, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    slopes = np.asarray(alibi_slopes(num_heads), np.float64)
    return -slopes[:, None, None] * (queries[:, None] - keys[None, :])


compiled_bias = jax.jit(alibi_bias, static_argnums=0, static_argnames="symmetric")


@pytest.mark.parametrize("num_heads", [1, 8, 12])
def test_formula(num_heads: int) -> None:
    queries, keys = np.arange(3, 8), np.arange(11)
    bias = alibi_bias(num_heads, jnp.asarray(queries), jnp.asarray(keys))
    assert bias.shape == (num_heads, 5, 11)
    assert bias.dtype == jnp.float32
    np.testing.assert_allclose(bias, formula(num_heads, queries, keys), rtol=1e-6)


def test_symmetric_is_negative_on_both_sides() -> None:
    bias = np.asarray(compiled_bias(4, np.arange(9), np.arange(9), symmetric=True))
    np.testing.assert_allclose(bias, -np.abs(formula(4, np.arange(9), np.arange(9))), rtol=1e-6)
    np.testing.assert_array_equal(bias, np.swapaxes(bias, 1, 2))


@pytest.mark.parametrize("length", [16_384, 65_536])
def test_nearest_keys_stay_apart_at_long_lengths(length: int) -> None:
    """Built from positions in bf16 or fp16, neighbouring keys would be equal (Falcon, BLOOM, flash-attention)."""
    bias = np.asarray(compiled_bias(16, np.asarray([length - 1]), np.arange(length - 64, length)))
    assert (np.diff(bias, axis=-1) > 0).all(), "a nearer key must have a strictly greater bias"
    np.testing.assert_array_equal(bias[..., -1], 0.0)


def test_softmax_of_64k_positions_is_that_of_float64() -> None:
    """In float32 the form +m j, equal in exact arithmetic, would be off by 5e-4 in L1 here; in bf16 by 1.9."""
    keys = np.arange(65_536)
    bias = np.asarray(compiled_bias(16, keys[-1:], keys))[:, 0]
    exact = formula(16, keys[-1:], keys)[:, 0]
    np.testing.assert_allclose(bias, exact, rtol=2**-24)  # one rounding, of the product
    weights = np.exp(exact) / np.exp(exact).sum(axis=-1, keepdims=True)
    assert np.abs(np.asarray(jax.jit(jax.nn.softmax)(bias)) - weights).sum(axis=-1).max() < 1e-5


def test_batched_positions_give_a_bias_for_each_entry() -> None:
    positions = np.asarray([[0, 1, 2], [5, 7, 9]])
    bias = np.asarray(compiled_bias(2, positions, positions))
    assert bias.shape == (2, 2, 3, 3)
    np.testing.assert_allclose(bias[1], formula(2, np.array([5, 7, 9]), np.array([5, 7, 9])), rtol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_floating_point_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="must be integers"):
        alibi_bias(8, jnp.arange(4.0), jnp.arange(4))


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32])
def test_unsigned_positions_do_not_wrap(dtype: jnp.dtype) -> None:
    unsigned, signed = (
        compiled_bias(4, positions, positions, symmetric=True)
        for positions in (np.arange(5, dtype=dtype), np.arange(5, dtype=np.int32))
    )
    np.testing.assert_array_equal(unsigned, signed)
