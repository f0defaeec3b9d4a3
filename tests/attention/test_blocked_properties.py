"""Attention by tiles equals the dense one whatever is hidden, drawn at random: values and all gradients."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi import attend

BATCH, HEADS, HEAD_DIM = 2, 2, 4
# Queries and keys; few, since each is compiled. In tiles of 8, the last ones filled up; queries at the end.
LENGTHS = ((19, 19), (5, 26))


@pytest.fixture(scope="module", autouse=True)
def small_tiles() -> Iterator[None]:
    """Many tiles at short lengths, on one device: where there are several, heads and sequences go at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("alibi.attention.tiles.BLOCK", 8)
        patch.setattr(jax, "device_count", lambda *args: 1)
        patch.setattr("alibi.attention.tiles.TILE_WEIGHTS", 64)
        yield


@functools.partial(jax.jit, static_argnames="backend")
def value_and_gradients(arrays: dict, hiding: dict, backend: str) -> tuple[jax.Array, dict]:
    def scalar(arrays: dict) -> tuple[jax.Array, jax.Array]:
        attended = attend(
            arrays["query"], arrays["key"], arrays["value"], slopes=arrays["slopes"], backend=backend, **hiding
        )
        return jnp.sin(attended).sum(), attended  # sin: so that each entry has a gradient of its own

    gradients, attended = jax.grad(scalar, has_aux=True)(arrays)
    return attended, gradients


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict, dict]:
    """Arrays of a call, and what hides keys in it. Steep slopes and small logits put whole tiles out of reach."""
    (q_length, k_length), rng = draw(st.sampled_from(LENGTHS)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([0.1, 1.0, 3.0]))
    lengths = {"query": q_length, "key": k_length, "value": k_length}
    arrays = {name: rng.standard_normal((BATCH, n, HEADS, HEAD_DIM), np.float32) for name, n in lengths.items()}
    arrays |= {"query": arrays["query"] * np.float32(scale)}
    slopes = st.sampled_from([0.0, 2.0**-8, 0.5, 4.0, 16.0])
    arrays["slopes"] = np.asarray([draw(slopes) for _ in range(HEADS)], np.float32)
    hiding = {}
    if draw(st.booleans()):
        shown = rng.random((BATCH, 1, q_length, k_length)) < draw(st.sampled_from([0.1, 0.9]))
        hiding["mask"] = shown
    if q_length == k_length and draw(st.booleans()):
        boundaries = rng.random((BATCH, k_length)) < draw(st.sampled_from([0.05, 0.5]))
        hiding["segment_ids"] = boundaries.cumsum(axis=1).astype(np.int32)
    return arrays, hiding


@settings(max_examples=15, deadline=None, derandomize=True)
@given(calls())
def test_equals_reference(call: tuple[dict, dict]) -> None:
    expected, got = (value_and_gradients(*call, backend=backend) for backend in ("reference", "blocked"))
    for right, tiled in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        # Both are float32: they differ by the order of sums over up to 26 keys of logits up to 40.
        np.testing.assert_allclose(tiled, right, rtol=0, atol=1e-5 * (1 + np.abs(right).max()))
