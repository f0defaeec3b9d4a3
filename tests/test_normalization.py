"""Layer norm against that of Flax."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.normalization import LayerNorm


@pytest.mark.parametrize("shape", [(8,), (3, 8), (1, 5, 8), (2, 3, 8), (2, 0, 8)])
def test_layer_norm_is_that_of_flax(shape):
    """In value and gradient, and in its parameters, so that checkpoints fit."""
    rng = np.random.default_rng(0)
    x, incoming = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    params = jax.tree.map(lambda p: p + jnp.arange(8.0), nn.LayerNorm(1e-5).init(jax.random.key(0), x))

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradients(norm, params, x):
        out, vjp = jax.vjp(norm(1e-5).apply, params, x)
        return out, *vjp(incoming)

    expected, actual = (value_and_gradients(norm, params, x) for norm in (nn.LayerNorm, LayerNorm))
    jax.tree.map(lambda got, right: np.testing.assert_allclose(got, right, atol=2e-5), actual, expected)
