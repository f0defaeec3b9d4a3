"""Every backend that the CPU can run equals the reference, in value and all gradients, over shapes and dtypes."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import alibi_slopes, attend
from alibi.attention import tiles
from alibi.attention.backends import BACKENDS
from alibi.attention.call import AttentionCall
from alibi.cpu import decoding
from alibi.positions import AlibiBias

RESULTS = ("attended", "query", "key", "value", "slopes")


class Case(NamedTuple):
    """A shape, the half precisions that it is also computed in, and the backends that must say they can do it."""

    batch: int
    q: int
    k: int
    heads: int
    head_dim: int
    value_dim: int
    causal: bool
    halves: tuple[str, ...]
    backends: set[str]


ALL = {"saved", "blocked", "augmented"}
# With blocks of 64: 77 is two and 600 ten, the last ones filled up. Queries stand at the last keys.
CASES = [
    Case(1, 1, 1, 1, 64, 64, True, (), ALL | {"decoding"}),
    Case(2, 77, 77, 12, 80, 40, True, ("bfloat16", "float16"), ALL),
    Case(1, 600, 600, 3, 64, 128, True, ("bfloat16",), ALL),
    Case(2, 1, 600, 12, 128, 64, True, (), {"saved", "blocked", "decoding"}),
    Case(1, 5, 77, 40, 64, 64, True, ("float16",), {"saved", "blocked"}),
    Case(1, 131, 77, 1, 80, 80, True, (), {"blocked"}),  # the first queries see no key
    Case(2, 131, 77, 2, 8, 24, False, (), {"saved", "blocked"}),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Many tiles at short lengths, of some heads at a time, as on one device: on several they go at once."""
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    monkeypatch.setattr(tiles, "BLOCK", 64)
    monkeypatch.setattr(tiles, "TILE_WEIGHTS", 2 * 64**2)
    monkeypatch.setattr(decoding, "BLOCK", 64)


def inputs(case):
    rng = np.random.default_rng(0)
    shapes = ((case.q, case.head_dim), (case.k, case.head_dim), (case.k, case.value_dim), (case.q, case.value_dim))
    return [rng.standard_normal((case.batch, length, case.heads, width), np.float32) for length, width in shapes]


def backends_for(case, arrays):
    query, key, value, _ = map(jnp.asarray, arrays)
    bias, keys = AlibiBias(alibi_slopes(case.heads), symmetric=not case.causal), np.arange(case.k)
    queries = np.arange(case.q) + case.k - case.q
    call = AttentionCall(query, key, value, bias, case.causal, queries, keys)
    return {name for name, backend in BACKENDS.items() if not backend.cannot(call)} - {"reference"}


@functools.partial(jax.jit, static_argnames=("backend", "causal"))
def value_and_gradients(arrays, slopes, backend, causal):
    *learned, incoming = arrays

    def attention(query, key, value, slopes):
        return attend(query, key, value, slopes=slopes, causal=causal, backend=backend)

    attended, to_gradients = jax.vjp(attention, *learned, slopes)
    return attended, *to_gradients(incoming)


def by(backend, case, arrays):
    return jax.device_get(value_and_gradients(arrays, alibi_slopes(case.heads), backend, case.causal))


def root_mean_square(got, right):
    return np.sqrt(np.mean(np.square(np.asarray(got, np.float64) - right)))


def test_every_backend_is_in_the_grid():
    assert set().union(*(case.backends for case in CASES)) == set(BACKENDS) - {"reference"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:6])))
def test_equals_reference(case):
    arrays = inputs(case)
    assert backends_for(case, arrays) == case.backends
    expected = by("reference", case, arrays)
    for backend in sorted(case.backends):
        for name, got, right in zip(RESULTS, by(backend, case, arrays), expected, strict=True):
            assert got.dtype == np.float32
            tolerance = 1e-5 * (1 + np.abs(right).max())
            np.testing.assert_allclose(got, right, rtol=0, atol=tolerance, err_msg=f"{name} of {backend}")
    for half in case.halves:
        assert_no_worse_than_dense(case, half, arrays)
        # As those of a mean over many tokens.
        assert_no_worse_than_dense(case, half, [*arrays[:3], arrays[3] * np.float32(1e-3)])
        if case.q == case.k:
            # Each query finds its own key: gradients are small differences, which must not be of two roundings.
            query, _, value, incoming = arrays
            incoming = value if incoming.shape == value.shape else incoming
            assert_no_worse_than_dense(case, half, [query, query, value, incoming])


# Errors at most, as shares of those of `reference` in the same dtype: of the value (queries that were rounded once more
# after their scaling would show there); of the gradients, where `blocked` rounds to the dtype before each product and
# `saved` does not; and of the gradients with the rounding of the inputs.
SHARES = {"saved": (1.0, 1.0, 1.0), "blocked": (1.0, 1.2, 1.15), "augmented": (1.01, 1.01, 1.01)}
# The gradient of a slope is one sum over all its head's logits, so the luck of its rounding is allowed for, as a share
# of the largest. In `augmented` it passes through the gradient of the queries, in half precision.
OF_SLOPES = {"saved": 2e-3, "blocked": 2e-3, "augmented": 2e-2}


def assert_no_worse_than_dense(case, half, arrays):
    """In half precision, than `reference` in it: against float32 of the same inputs, and of those before rounding."""
    exact = by("reference", case, arrays)
    rounded = [x.astype(half) for x in arrays]
    # The columns of `augmented` are made for bfloat16.
    able = case.backends - ({"augmented"} if half == "float16" else set())
    assert backends_for(case, rounded) == able
    exact_of_rounded = by("reference", case, [x.astype(np.float32) for x in rounded])
    dense = by("reference", case, rounded)
    for backend in sorted(able):
        found = by(backend, case, rounded)
        for name, got, of_dense, right, unrounded in zip(RESULTS, found, dense, exact_of_rounded, exact, strict=True):
            what = f"{name} of {backend} in {half}"
            assert got.dtype == (np.float32 if name == "slopes" else half), what
            slack = OF_SLOPES[backend] * np.abs(right).max() if name == "slopes" else 0.0
            of_value, of_gradient, with_inputs = SHARES[backend]
            shares = (of_value, of_value) if name == "attended" else (of_gradient, with_inputs)
            for share, to in zip(shares, (right, unrounded), strict=True):
                error, allowed = root_mean_square(got, to), share * root_mean_square(of_dense, to) + slack
                assert error <= allowed, what
