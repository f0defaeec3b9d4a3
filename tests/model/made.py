"""Tiny models of the tests of the decoder, each made once."""

import dataclasses

import jax
import jax.numpy as jnp

from alibi.model.decoder import DecoderLM, build_model

VOCABULARY = 40
MADE: dict[tuple, tuple[DecoderLM, dict]] = {}


def make(tiny_config, position: str, **overrides: object) -> tuple[DecoderLM, dict]:
    """Returns a model of a layer, unless told otherwise, for up to 16 tokens, and its variables; tests share them."""
    key = (position, *sorted(overrides.items()))
    if key not in MADE:
        model = build_model(tiny_config(position=position, **overrides), VOCABULARY)
        MADE[key] = model, jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    return MADE[key]


def tokens(length: int, batch: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(length), (batch, length), 0, VOCABULARY)


def changed(model: DecoderLM, **keys: object) -> DecoderLM:
    """The model with other keys of its config."""
    return model.clone(config=dataclasses.replace(model.config, **keys))
