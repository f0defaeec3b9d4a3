"""The key-value cache: a prompt in any pieces, then token by token, is the whole sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.model.decoder import build_model
from alibi.positions import METHODS

VOCABULARY = 40


def make(tiny_config, position: str, **overrides: object):
    model = build_model(tiny_config(position=position, **overrides), VOCABULARY)
    return model, jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def read_in_pieces(model, params, tokens, pieces, slots, *, total=None, positions=None):
    """The logits of all tokens, read in pieces of these sizes."""
    batch = tokens.shape[0]
    cache = jax.jit(functools.partial(model.init, decode=True, total=total))(
        jax.random.key(0), jnp.zeros((batch, slots), jnp.int32)
    )["cache"]
    read = jax.jit(functools.partial(model.apply, decode=True, mutable=["cache"]))
    logits, start = [], 0
    for size in pieces:
        part = slice(start, start + size)
        given = {} if positions is None or positions[0, start] is None else {"positions": positions[:, part]}
        new, updated = read({"params": params, "cache": cache}, tokens[:, part], **given)
        logits.append(np.asarray(new))
        cache, start = updated["cache"], start + size
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize("position", METHODS)
def test_a_prompt_in_pieces_then_single_tokens_equal_the_whole_sequence(tiny_config, position: str) -> None:
    model, params = make(tiny_config, position)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 16))
    whole = jax.jit(model.apply)({"params": params}, tokens)
    got = read_in_pieces(model, params, tokens, [7, 5, 1, 1, 1, 1], slots=16)
    np.testing.assert_allclose(got, whole, atol=2e-5)


@pytest.mark.parametrize("position", ["alibi", "rotary", "t5", "sinusoidal"])
def test_left_padding_lets_each_sequence_stand_at_its_own_positions(tiny_config, position: str) -> None:
    """Two prompts of 6 and 4 tokens end together; then both go on from where they are."""
    model, params = make(tiny_config, position)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 10))
    positions = np.stack([np.arange(6), np.arange(6) - 2])
    cache = jax.jit(functools.partial(model.init, decode=True))(jax.random.key(0), jnp.zeros((2, 12), jnp.int32))[
        "cache"
    ]
    read = jax.jit(functools.partial(model.apply, decode=True, mutable=["cache"]))
    logits, updated = read({"params": params, "cache": cache}, tokens[:, :6], positions=positions)
    parts = [np.asarray(logits)]
    for i in range(6, 10):
        logits, updated = read({"params": params, "cache": updated["cache"]}, tokens[:, i : i + 1])
        parts.append(np.asarray(logits))
    got = np.concatenate(parts, axis=1)
    apply = jax.jit(model.apply)
    np.testing.assert_allclose(got[0], apply({"params": params}, tokens[:1])[0], atol=2e-5)
    np.testing.assert_allclose(got[1, 2:], apply({"params": params}, tokens[1:, 2:])[0], atol=2e-5)


@pytest.mark.parametrize("position", ["alibi", "rotary"])
def test_a_ring_of_slots_serves_a_window(tiny_config, position: str) -> None:
    """16 tokens through 7 slots: a window of 4, and up to 4 new tokens at a time."""
    model, params = make(tiny_config, position, model__window=4)
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, (2, 16))
    whole = jax.jit(model.apply)({"params": params}, tokens)
    got = read_in_pieces(model, params, tokens, [4, 3, 4, 1, 1, 3], slots=7, total=16)
    np.testing.assert_allclose(got, whole, atol=2e-5)
    with pytest.raises(ValueError, match=r"5 tokens at one time would overwrite .* at most 4 tokens at a time"):
        read_in_pieces(model, params, tokens, [5], slots=7, total=16)


def test_what_does_not_fit_is_an_error_or_no_number(tiny_config) -> None:
    model, params = make(tiny_config, "alibi")
    tokens = np.zeros((1, 9), np.int32)
    with pytest.raises(ValueError, match=r"a prompt of 9 tokens is longer than the cache, which has 8 slots"):
        read_in_pieces(model, params, tokens, [9], slots=8)
    with pytest.raises(ValueError, match=r"8 slots can't serve 16 tokens: only a sliding window"):
        read_in_pieces(model, params, tokens, [1], slots=8, total=16)
    logits = read_in_pieces(model, params, tokens, [8, 1], slots=8)
    assert np.isfinite(logits[:, :8]).all()
    assert np.isnan(logits[:, 8:]).all(), "the run goes on, so what is wrong must not look right"
    learned, learned_params = make(tiny_config, "learned")
    with pytest.raises(ValueError, match="16 positions and got a sequence of 17"):
        read_in_pieces(learned, learned_params, tokens, [1], slots=17)
