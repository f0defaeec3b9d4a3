"""Methods that make their own queries and keys, as attention, against formulas in float64."""

import jax
import numpy as np
import pytest

from alibi.attention import AttentionOptions, method_attention_fn
from tests.positions.test_biases import (
    HEAD_DIM,
    HEADS,
    LENGTH,
    D,
    check_derivatives,
    double,
    make,
    params_of,
    tokens,
)


def pope(given):
    """The logits of the paper, times sqrt(head_dim); a key's angle is delta ahead."""
    magnitudes = [np.log1p(np.exp(given[side])) for side in ("query", "key")]
    theta = 100.0 ** (-np.arange(HEAD_DIM) / HEAD_DIM)
    angles = -D[None, :, :, None] * theta + given["delta"][:, None, None]
    return np.einsum("bihc,bjhc,hijc->bhij", *magnitudes, np.cos(angles))


CASES = [("pope", {"base": 100.0}, pope)]


@pytest.mark.parametrize(("name", "options", "products"), CASES)
def test_attention_and_its_gradients_are_those_of_the_formula(name, options, products) -> None:
    method, sides = make(name, **options), tokens()
    params = params_of(method)
    wanted = np.random.default_rng(1).normal(size=(2, LENGTH, HEADS, HEAD_DIM))

    def formula(given):
        logits = np.where(D >= 0, products(given) / np.sqrt(HEAD_DIM), -np.inf)
        weights = np.exp(logits)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return np.einsum("bhij,bjhd->bihd", weights, given["value"])

    @jax.jit
    def run(given):
        def loss(given):
            positions = {side: np.arange(LENGTH) for side in ("query_positions", "key_positions")}
            attend = method_attention_fn(
                method, given, given["x"], **positions, options=AttentionOptions()
            )
            out = attend(given["query"], given["key"], given["value"])
            return (out * wanted.astype(np.float32)).sum(), out

        return jax.grad(loss, has_aux=True)(given)

    gradients, out = run(params | sides)
    exact = double(params | sides)
    np.testing.assert_allclose(out, formula(exact), atol=3e-6)
    moved = {leaf: gradient for leaf, gradient in gradients.items() if np.abs(gradient).max() > 0}
    assert moved.keys() >= {*params, "query", "key", "value"}
    check_derivatives(lambda given: (formula(given) * wanted).sum(), exact, moved)
