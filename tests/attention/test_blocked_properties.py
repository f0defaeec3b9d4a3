"""Backends equal the reference whatever is hidden and however long it is, drawn at random: values and all gradients."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alibi.attention.backends import BACKENDS, compute
from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.positions import AlibiBias

HEAD_DIM = 4


@pytest.fixture(scope="module", autouse=True)
def small_tiles() -> Iterator[None]:
    """Many tiles at short lengths, on one device: where there are several, heads and sequences go at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("alibi.attention.tiles.BLOCK", 8)
        patch.setattr(jax, "device_count", lambda *args: 1)
        patch.setattr("alibi.attention.tiles.TILE_WEIGHTS", 64)
        yield


class Form(NamedTuple):
    """All that a program is compiled for; `seed` is of positions with gaps, None: 0, 1, ..."""

    q_length: int
    k_length: int
    batch: int
    heads: int
    causal: bool
    window: int | None
    mask: tuple[int, int, int, int] | None
    segments: bool
    seed: int | None
    known: bool

    def positions(self) -> dict[str, np.ndarray]:
        """Keys in order, each a step or several after the one before; queries in none."""
        keys = np.arange(self.k_length)
        if self.seed is None:
            return {"query_positions": np.arange(self.q_length) + self.k_length - self.q_length, "key_positions": keys}
        rng = np.random.default_rng(self.seed)
        keys = rng.integers(1, 6, self.k_length).cumsum()
        return {"query_positions": rng.integers(0, keys[-1] + 3, self.q_length), "key_positions": keys}


@st.composite
def forms(draw: st.DrawFn, kind: str) -> Form:
    """Some of all that hides keys; or known positions with gaps, or nothing, so that tiles out of reach are skipped."""
    k_length, batch, heads = 28 - draw(st.integers(1, 27)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_length = draw(st.sampled_from([k_length, draw(st.integers(1, 27)), 1]))
    causal, window = draw(st.sampled_from([True, False])), draw(st.sampled_from([None, 1, 6, 40]))
    seed = None if kind == "plain" else draw(st.integers(0, 2**32 - 1))
    if kind != "hidden":
        return Form(q_length, k_length, batch, heads, causal, window, None, False, seed, True)
    masks = [(batch, heads, q_length, k_length), (batch, 1, 1, k_length), (1, 1, q_length, k_length), None]
    mask, segments, known = draw(st.sampled_from(masks)), draw(st.sampled_from([True, False])), draw(st.booleans())
    return Form(q_length, k_length, batch, heads, causal, window, mask, segments, seed, known)


def contents(form: Form, seed: int) -> tuple[dict, dict]:
    """Arrays of a call, and what hides keys in it. Steep slopes and small logits put whole tiles out of reach."""
    rng = np.random.default_rng(seed)
    lengths = {"query": form.q_length, "key": form.k_length, "value": form.k_length}
    learned = {
        name: rng.standard_normal((form.batch, n, form.heads, HEAD_DIM), np.float32) for name, n in lengths.items()
    }
    learned["query"] *= rng.choice(np.asarray([0.1, 1.0, 3.0], np.float32))
    learned["slopes"] = rng.choice(np.asarray([0.0, 2.0**-8, 0.5, 4.0, 16.0], np.float32), form.heads)
    hiding = {}
    if form.mask is not None:
        hiding["mask"] = rng.random(form.mask) < rng.choice([0.1, 0.9])
    if form.segments:
        starts = rng.random((2, form.batch, 27)) < rng.choice([0.05, 0.5])
        of_queries, of_keys = starts.cumsum(axis=-1).astype(np.int32)
        hiding |= {"query_segments": of_queries[:, : form.q_length], "key_segments": of_keys[:, : form.k_length]}
    if not form.known:
        shifts = rng.integers(0, 4, (form.batch, 1))  # each sequence has its own positions
        hiding |= {name: side[None] + shifts for name, side in form.positions().items()}
    return jax.tree.map(jnp.asarray, (learned, hiding))


def as_call(form: Form, learned: dict, hiding: dict) -> AttentionCall:
    bias = AlibiBias(learned["slopes"], symmetric=not form.causal)
    arrays = {name: learned[name] for name in ("query", "key", "value")}
    options = AttentionOptions(window=form.window)
    return AttentionCall(**arrays, bias=bias, causal=form.causal, options=options, **(form.positions() | hiding))


@functools.partial(jax.jit, static_argnums=(0, 1))
def value_and_gradients(form: Form, backends: tuple[str, ...], learned: dict, hiding: dict) -> dict:
    """Of each backend, as one program."""

    def scalar(learned: dict, backend: str) -> tuple[jax.Array, jax.Array]:
        attended = compute(as_call(form, learned, hiding), backend)
        return jnp.sin(attended).sum(), attended  # sin: so that each entry has a gradient of its own

    return {name: jax.grad(scalar, has_aux=True)(learned, name) for name in backends}


# What a few drawn forms may miss: a plain call that every backend takes; keys with gaps on both sides; and masks of
# each sequence and head where each sequence has its own positions.
ALWAYS = {
    "plain": Form(27, 27, 2, 3, True, None, None, False, None, True),
    "gaps": Form(19, 26, 1, 2, False, None, None, False, 7, True),
    "hidden": Form(23, 23, 2, 3, True, None, (2, 3, 23, 23), True, 11, False),
}


@pytest.mark.parametrize("kind", ["plain", "gaps", "hidden"])
def test_equals_reference(kind: str) -> None:
    """Few forms, since each is compiled; several contents of each."""
    taken = set()

    @settings(max_examples=3, deadline=None, derandomize=True)
    @given(forms(kind), st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3))
    @example(ALWAYS[kind], [1, 2, 3])
    def check(form: Form, seeds: list[int]) -> None:
        call = as_call(form, *contents(form, seeds[0]))
        able = tuple(name for name, backend in BACKENDS.items() if not backend.cannot(call))
        taken.update(able)
        gaps = 0 if form.seed is None else max(10, np.ptp(np.concatenate(list(form.positions().values()))))
        for seed in seeds:
            found = jax.device_get(value_and_gradients(form, able, *contents(form, seed)))
            expected = found.pop("reference")
            for backend, results in found.items():
                for (path, right), got in zip(
                    jax.tree.leaves_with_path(expected), jax.tree.leaves(results), strict=True
                ):
                    what = f"{backend}{jax.tree_util.keystr(path)}"
                    # All are float32: they differ by the order of sums over up to 27 keys of logits up to 40,
                    # of which the gradient of a slope takes each times a distance, which is large where there are gaps.
                    share = 1e-6 * gaps if gaps and "slopes" in what else 1e-5
                    tolerance = share * (1 + np.abs(right).max())
                    np.testing.assert_allclose(got, right, rtol=0, atol=tolerance, err_msg=what)

    check()
    assert taken >= {"reference", "blocked"} | ({"saved", "augmented"} if kind == "plain" else set())
