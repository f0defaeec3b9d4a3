"""Every backend equals the reference, in value and all gradients, over shapes, dtypes, windows and
masks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import alibi_slopes, attend
from alibi.attention import tiles
from alibi.attention.accelerator import plan
from alibi.attention.backends import BACKENDS, REASONS, Backend, refusal
from tests.attention.calls import inputs

RESULTS = ("attended", "query", "key", "value", "slopes", "sink")
SINKS = (-1.5, 4.0, 0.0)  # the second takes nearly all of the weight
CAP = 1.5


class Case(NamedTuple):
    """A shape, the half precisions to test besides float32, and the backends that take it.

    Attributes:
      hiding: "mask", of each sequence and head; "segments", with positions of each sequence; "gaps"
        between positions, with queries in no order; or "".
      steepness: a factor of the paper's slopes.
      kv_heads: heads of keys and values; defaults to `heads`.
    """

    batch: int
    q: int
    k: int
    heads: int
    head_dim: int
    value_dim: int
    causal: bool
    halves: tuple[str, ...]
    backends: set[str]
    window: int | None = None
    hiding: str = ""
    steepness: float = 1.0
    sink: bool = False
    cap: bool = False
    kv_heads: int = 0


ALL = {"saved", "blocked", "augmented", "fused"}
# With blocks of 64: 77 is two and 600 ten, the last ones filled up. Queries stand at the last keys.
CASES = [
    Case(2, 77, 77, 6, 80, 40, True, ("bfloat16", "float16"), ALL),
    Case(1, 600, 600, 3, 64, 128, True, ("bfloat16",), ALL),
    Case(2, 1, 200, 3, 128, 64, True, (), {"saved", "blocked", "fused", "single"}),
    Case(1, 131, 77, 1, 80, 80, True, (), {"blocked", "fused"}),  # the first queries see no key
    Case(1, 131, 131, 2, 8, 8, True, (), ALL, window=1),
    Case(1, 70, 200, 2, 8, 8, False, (), {"saved", "blocked", "fused"}, window=20),
    Case(2, 150, 150, 3, 8, 8, True, (), {"blocked", "fused"}, 100, "mask", sink=True, cap=True),
    Case(
        2,
        150,
        150,
        4,
        8,
        8,
        True,
        (),
        {"blocked", "fused"},
        None,
        "segments",
        steepness=64.0,  # whole tiles are out of reach
        sink=True,
        kv_heads=2,
    ),
    Case(
        2,
        1,
        150,
        4,
        8,
        8,
        True,
        (),
        {"blocked", "fused", "single"},
        100,
        "mask",
        sink=True,
        kv_heads=2,
    ),
    Case(1, 90, 150, 2, 8, 8, False, (), {"saved", "blocked", "fused"}, None, "gaps", sink=True),
    Case(1, 90, 150, 2, 8, 8, True, (), {"blocked", "fused"}, 40, "gaps", cap=True),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Many tiles at short lengths, of some heads at a time, as on one device: on several all go
    together.
    """
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    monkeypatch.setattr(tiles, "BLOCK", 64)
    monkeypatch.setattr(tiles, "TILE_WEIGHTS", 2 * 64**2)
    monkeypatch.setattr(plan, "BLOCK", 64)
    monkeypatch.setattr(plan, "LANES", 64)


def inputs_of(case):
    own = {"kv_heads": case.kv_heads, "value_dim": case.value_dim}
    return inputs(case.batch, case.q, case.k, case.heads, case.head_dim, **own)


def arguments_of(case):
    """The arguments of `attend` besides arrays and slopes."""
    rng = np.random.default_rng(1)
    arguments = {"causal": case.causal, "window": case.window}
    if case.cap:
        arguments["logit_cap"] = CAP
    if case.hiding == "mask":
        arguments["mask"] = jnp.asarray(rng.random((case.batch, case.heads, case.q, case.k)) < 0.6)
    if case.hiding == "segments":
        # The first sequence has packed documents; a second is a single document.
        tokens = np.arange(case.k)
        segments = np.stack([tokens // 40, 0 * tokens])[: case.batch]
        positions = np.stack([tokens % 40, tokens])[: case.batch]
        arguments["segment_ids"] = jnp.asarray(segments)
        arguments |= dict.fromkeys(("query_positions", "key_positions"), jnp.asarray(positions))
    if case.hiding == "gaps":
        keys = rng.integers(1, 6, case.k).cumsum()
        arguments |= {
            "query_positions": rng.integers(0, keys[-1] + 3, case.q),
            "key_positions": keys,
        }
    return arguments


def sink_of(case):
    return jnp.resize(jnp.asarray(SINKS), case.heads) if case.sink else None


def backends_for(case, arrays):
    """Returns the backends that take the call `attend` makes of the case."""
    found = set()

    def note(call):
        found.update(name for name in BACKENDS if not refusal(name, call))
        return jnp.zeros((*call.query.shape[:-1], call.value.shape[-1]), call.value.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "reference", Backend(note, frozenset(REASONS)))
        attend(
            *map(jnp.asarray, arrays[:3]),
            slopes=alibi_slopes(case.heads),
            sink=sink_of(case),
            backend="reference",
            **arguments_of(case),
        )
    return found - {"reference"}


@functools.lru_cache(maxsize=8)  # of the test that runs
def value_and_gradients(backend, case):
    """Returns the program of a case; all values are arguments, so calls with others share it."""
    arguments = arguments_of(case)

    @jax.jit
    def program(learned, incoming):
        def attention(query, key, value, slopes, sink):
            return attend(query, key, value, slopes=slopes, sink=sink, backend=backend, **arguments)

        attended, to_gradients = jax.vjp(attention, *learned)
        return attended, *to_gradients(incoming)

    return program


def by(backend, case, arrays):
    """Returns value and gradients of the case, from a single program."""
    *learned, incoming = arrays
    learned += [case.steepness * alibi_slopes(case.heads), sink_of(case)]
    program = value_and_gradients(backend, case._replace(backends=frozenset()))
    return jax.device_get(program(learned, incoming))


def root_mean_square(got, right):
    return np.sqrt(np.mean(np.square(np.asarray(got, np.float64) - right)))


def test_every_backend_is_in_the_grid():
    assert set().union(*(case.backends for case in CASES)) == set(BACKENDS) - {"reference"}


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: "-".join(map(str, (*case[:7], case.window, case.hiding, case.sink))),
)
def test_equals_reference(case):
    arrays = inputs_of(case)
    assert backends_for(case, arrays) == case.backends
    assert_equals_reference(case, arrays)
    for half in case.halves:
        assert_no_worse_than_dense(case, half, arrays)
        # As those of a mean over many tokens.
        assert_no_worse_than_dense(case, half, [*arrays[:3], arrays[3] * np.float32(1e-3)])
        if case.q == case.k:
            # Each query finds its own key: gradients are small differences, which must not be of
            # two roundings.
            query, _, value, incoming = arrays
            incoming = value if incoming.shape == value.shape else incoming
            assert_no_worse_than_dense(case, half, [query, query, value, incoming])


def assert_equals_reference(case, arrays):
    expected = by("reference", case, arrays)
    # Interpreted kernels take long, those of many tiles too long; test_fused_masks.py has these others.
    left_out = case.q == 600 or case.hiding in ("mask", "segments")
    for backend in sorted(case.backends - ({"fused"} if left_out else set())):
        for name, got, right in zip(RESULTS, by(backend, case, arrays), expected, strict=True):
            if right is None:  # the gradient of a sink that is not there
                continue
            assert got.dtype == np.float32
            # A slope's gradient takes each dlogit times a distance, which is large with gaps.
            gaps = 10 if case.hiding == "gaps" and name == "slopes" else 1
            tolerance = 1e-5 * gaps * (1 + np.abs(right).max())
            np.testing.assert_allclose(
                got, right, rtol=0, atol=tolerance, err_msg=f"{name} of {backend}"
            )


# Errors at most, as shares of those of `reference` in the same dtype: of the value (queries that were rounded once more
# after their scaling would show there); of the gradients, where `saved` and `blocked` round to the dtype before each
# product; and of the gradients with the rounding of the inputs.
SHARES = {
    "saved": (1.0, 1.2, 1.15),
    "blocked": (1.0, 1.2, 1.15),
    "augmented": (1.01, 1.01, 1.01),
}
# The gradient of a slope is one sum over all its head's logits, so the luck of its rounding is
# allowed for, as a share of the largest. In `augmented` it passes through the gradient of the
# queries, in half precision.
OF_SLOPES = {"saved": 2e-3, "blocked": 2e-3, "augmented": 2e-2}


def assert_no_worse_than_dense(case, half, arrays):
    """Compares the errors of half precision with `reference`'s: to float32 of the rounded, and of
    the exact inputs.
    """
    exact = by("reference", case, arrays)
    rounded = [x.astype(half) for x in arrays]
    # The columns of `augmented` and the kernels of `fused` are made for bfloat16.
    able = case.backends - ({"augmented", "fused"} if half == "float16" else set())
    assert backends_for(case, rounded) == able
    exact_of_rounded = by("reference", case, [x.astype(np.float32) for x in rounded])
    dense = by("reference", case, rounded)
    for backend in sorted(able - {"fused"}):  # test_device.py has its half precision
        for name, got, of_dense, right, unrounded in zip(
            RESULTS[:5], by(backend, case, rounded), dense, exact_of_rounded, exact, strict=False
        ):
            what = f"{name} of {backend} in {half}"
            assert got.dtype == (np.float32 if name == "slopes" else half), what
            slack = OF_SLOPES[backend] * np.abs(right).max() if name == "slopes" else 0.0
            of_value, of_gradient, with_inputs = SHARES[backend]
            shares = (of_value, of_value) if name == "attended" else (of_gradient, with_inputs)
            for share, to in zip(shares, (right, unrounded), strict=True):
                error, allowed = (
                    root_mean_square(got, to),
                    share * root_mean_square(of_dense, to) + slack,
                )
                assert error <= allowed, what
