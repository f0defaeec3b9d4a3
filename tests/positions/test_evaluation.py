"""Biases computed in two ways, plainly and fast for consecutive positions: values and gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.attention import AttentionOptions, method_attention_fn
from alibi.positions.bias import Bias, Part
from alibi.positions.deberta import Deberta
from alibi.positions.fire import FireBias, LogDistance
from alibi.positions.products import KeyProducts, QueryProducts


def compare(
    given: list[Any],
    fast: Callable[[Any], Bias],
    rows: np.ndarray,
    columns: np.ndarray,
    plain: Callable[[Any], Bias] = lambda bias: bias,
    rough: str = "",
) -> None:
    """Compares the values of both biases of each of `given`, and the gradients of a random sum by
    all its arrays.

    The gradient of `rough` is compared to a thousandth.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def run(way: Callable[[Any], Bias], arrays: Any):
        whole, pullback = jax.vjp(
            lambda arrays: way(arrays)(jnp.asarray(rows), jnp.asarray(columns)), arrays
        )
        return whole, pullback(jax.random.normal(jax.random.key(1), whole.shape))[0]

    for arrays in given:
        (expected, of_plain), (got, of_fast) = run(plain, arrays), run(fast, arrays)
        np.testing.assert_allclose(got, expected, atol=2e-5)
        for (path, one), other in zip(
            jax.tree.leaves_with_path(of_fast), jax.tree.leaves(of_plain), strict=True
        ):
            tolerance = 1e-3 if jax.tree_util.keystr(path, simple=True) == rough else 1e-5
            np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())


@pytest.mark.parametrize("kind", [QueryProducts, KeyProducts])
@pytest.mark.parametrize(("distances", "lowest"), [(200, -150), (200, -20), (5, -4), (1, 0)])
def test_products_of_consecutive_positions_are_those_of_any(
    kind, distances: int, lowest: int
) -> None:
    """In bands of 64 rows where there are many vectors; the first and the last of them serve beyond
    both ends.
    """
    rng = np.random.default_rng(0)
    queries, keys = np.arange(70) + 40, np.arange(90)
    tokens = rng.normal(size=(2, 70 if kind is QueryProducts else 90, 3, 8)).astype(np.float32)
    vectors = rng.normal(size=(distances, 3, 8)).astype(np.float32)
    plain = kind(jnp.asarray(tokens), jnp.asarray(vectors), lowest)
    assert plain.tabulated(queries, keys).in_order
    assert not plain.in_order
    compare([plain], lambda bias: bias.tabulated(queries, keys), queries, keys)


@pytest.mark.parametrize("kind", [QueryProducts, KeyProducts])
def test_any_part_of_products_that_are_laid_out_is_that_part_of_the_whole(kind) -> None:
    """Filled up or not, cut on both sides, on a single side, or twice: attention and decoding do
    all of these.
    """
    rng = np.random.default_rng(0)
    queries, keys = np.arange(70) + 20, np.arange(90)
    tokens = jnp.asarray(
        rng.normal(size=(2, 70 if kind is QueryProducts else 90, 3, 8)), jnp.float32
    )
    plain = kind(tokens, jnp.asarray(rng.normal(size=(100, 3, 8)), jnp.float32), -50)
    whole = np.asarray(plain(jnp.asarray(queries), jnp.asarray(keys)))
    known = plain.tabulated(queries, keys)
    assert known.laid_out
    assert known.tabulated(queries, keys) is known
    parts = [
        (Part(queries=(5, 33), keys=(7, 50)), np.s_[:, :, 5:38, 7:57]),
        (Part(heads=(1, 2), queries=(64, 6), keys=(89, 1)), np.s_[:, 1:3, 64:70, 89:90]),
        (Part(keys=(5, 17)), np.s_[:, :, :, 5:22]),
        (Part(queries=(3, 20)), np.s_[:, :, 3:23]),
    ]

    @jax.jit
    def cut(known: Bias) -> list[tuple[jax.Array, np.ndarray]]:
        found = []
        for part, place in parts:
            sides = [
                jnp.arange(start, start + size)
                for start, size in (part.queries or (0, 70), part.keys or (0, 90))
            ]
            # What fills a side up would be in the result where that side is not cut.
            for bias in (known, known.padded(10, 6)) if part.queries and part.keys else (known,):
                found.append((bias.cut(part)(*sides), whole[place]))
        again = known.cut(Part(queries=(0, 30), keys=(10, 60))).cut(
            Part(queries=(10, 15), keys=(20, 25))
        )
        return [*found, (again(jnp.arange(15), jnp.arange(25)), whole[:, :, 10:25, 30:55])]

    for got, right in cut(known):
        np.testing.assert_allclose(got, right, atol=2e-5)


@pytest.mark.parametrize("window", [None, 60])
def test_deberta_by_tiles_in_bands_is_the_dense_formula(window: int | None) -> None:
    """Values and gradients with more vectors than a band has rows, in tiles that bands don't
    divide.
    """
    method = Deberta(num_heads=4, head_dim=8, width=32, train_length=16, max_distance=90)
    params = {**method.init(jax.random.key(0)), **method.init_layer(jax.random.key(1))}
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 130, 4, 8)) for i in (2, 3, 4))

    @functools.partial(jax.jit, static_argnums=0)
    def run(options: AttentionOptions):
        def loss(params, q, k, v):
            positions = np.arange(130)
            attend = method_attention_fn(
                method,
                params,
                q.reshape(2, 130, 32),
                query_positions=positions,
                key_positions=positions,
                options=options,
            )
            attended = attend(q, k, v)
            return jnp.sin(3.0 * attended).sum(), attended

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(params, q, k, v)

    dense, tiles = (
        run(AttentionOptions(backend=one, block=48, window=window))
        for one in ("reference", "blocked")
    )
    for expected, got in zip(jax.tree.leaves(dense), jax.tree.leaves(tiles), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("first_key", "keys"), [(0, 40), (0, 300), (250, 20)])
def test_fire_by_tables_is_its_formula(first_key: int, keys: int) -> None:
    """Where few, many or none of its 32 units bend among the pairs of a tile; some are on
    throughout, some never.

    With queries at 270 to 306 all, some or none of them stand behind the threshold.
    """
    rng = np.random.default_rng(0)
    bend, kernel = (
        np.linspace(-0.5, 1.5, 32),
        rng.choice([-1.0, 1.0], 32) * rng.uniform(0.5, 1.0, 32),
    )
    learned = {
        "hidden_kernel": jnp.asarray(kernel, jnp.float32),
        "hidden_bias": jnp.asarray(-bend * kernel, jnp.float32),
        "kernel": jnp.asarray(rng.normal(size=(32, 2)), jnp.float32),
        "c": jnp.asarray(0.1),
    }
    given = [learned | {"threshold": jnp.asarray(threshold)} for threshold in (200.0, 290.0, 400.0)]
    positions = np.arange(37) + 270, np.arange(keys) + first_key

    def plain(learned: dict) -> FireBias:
        return FireBias(**learned, log_distance=LogDistance(jnp.broadcast_to(learned["c"], 2)))

    # The gradient of c is a small difference, of what it does to the distances and to their scale.
    compare(
        given, lambda learned: plain(learned).tabulated(*positions), *positions, plain, rough="c"
    )
