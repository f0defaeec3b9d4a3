"""Biases that are computed in two ways, the plain one and the one that is fast in order: values and gradients."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.positions.bias import Bias
from alibi.positions.fire import FireBias, LogDistance
from alibi.positions.lookup import KeyProducts, QueryProducts


def compare(bias: Bias, fast: Callable[[Bias], Bias], rows: np.ndarray, columns: np.ndarray) -> None:
    """The values of both, and the gradients of a random sum of them, by all arrays of the bias."""

    @functools.partial(jax.jit, static_argnums=0)
    def run(way: Callable[[Bias], Bias]):
        whole, pullback = jax.vjp(lambda bias: way(bias)(jnp.asarray(rows), jnp.asarray(columns)), bias)
        return whole, jax.tree.leaves(pullback(jax.random.normal(jax.random.key(1), whole.shape))[0])

    (expected, of_plain), (got, of_fast) = run(lambda bias: bias), run(fast)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    for one, other in zip(of_fast, of_plain, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("kind", [QueryProducts, KeyProducts])
@pytest.mark.parametrize(("distances", "lowest"), [(200, -150), (200, -20), (5, -4), (1, 0)])
def test_products_of_consecutive_positions_are_those_of_any(kind, distances: int, lowest: int) -> None:
    """In bands of 64 rows where there are many vectors; the first and the last of them serve beyond both ends."""
    rng = np.random.default_rng(0)
    queries, keys = np.arange(70) + 40, np.arange(90)
    tokens = rng.normal(size=(2, 70 if kind is QueryProducts else 90, 3, 8)).astype(np.float32)
    vectors = rng.normal(size=(distances, 3, 8)).astype(np.float32)
    plain = kind(jnp.asarray(tokens), jnp.asarray(vectors), lowest)
    assert plain.tabulated(queries, keys).in_order
    assert not plain.in_order
    compare(plain, lambda bias: bias.tabulated(queries, keys), queries, keys)


@pytest.mark.parametrize(("first_key", "keys"), [(0, 40), (0, 300), (250, 20)])
def test_fire_by_its_linear_parts_is_its_formula(first_key: int, keys: int) -> None:
    """Where few, many or none of its 32 units bend among the pairs of a tile; some are on throughout, some never."""
    rng = np.random.default_rng(0)
    bend, kernel = np.linspace(-0.5, 1.5, 32), rng.choice([-1.0, 1.0], 32) * rng.uniform(0.5, 1.0, 32)
    plain = FireBias(
        hidden_kernel=jnp.asarray(kernel, jnp.float32),
        hidden_bias=jnp.asarray(-bend * kernel, jnp.float32),
        kernel=jnp.asarray(rng.normal(size=(32, 2)), jnp.float32),
        log_distance=LogDistance(jnp.full(2, 0.1)),
        c=jnp.asarray(0.1),
        threshold=jnp.asarray(256.0),
    )
    compare(plain, lambda bias: bias.replace(by_parts=True), np.arange(37) + 270, np.arange(keys) + first_key)
