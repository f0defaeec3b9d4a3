"""Checks of a small model with the method: causality, shifts, the cache of decoding, and other ways to run layers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from alibi.attention import AttentionOptions
from alibi.config import ModelConfig
from alibi.model.config import attention_options
from alibi.model.decoder import DecoderLM
from alibi.model.layers import stacked
from alibi.positions import PositionMethod
from alibi.testing.samples import HEADS, TOKENS, WIDTH, compare, fail, is_bounded, jit

PADDING = (0, 4, 5)  # the slots of the second sequence of `check_cache` that hold no token


class SmallModel:
    """A small model of two layers, and its parameters."""

    def __init__(self, method: PositionMethod):
        self.method = method
        config = ModelConfig(num_layers=2, width=WIDTH, num_heads=HEADS, feed_forward=WIDTH, window=0)
        self.model = DecoderLM(config, method, vocab_size=TOKENS)
        self.length = min(TOKENS, method.max_length or TOKENS)
        self.tokens = jnp.stack([jnp.arange(self.length), jnp.arange(self.length)[::-1]])
        self.params = jit(self.model.init)(jax.random.key(0), self.tokens)["params"]

    def changed(self, **keys: Any) -> DecoderLM:
        return self.model.clone(config=dataclasses.replace(self.model.config, **keys))

    @functools.cached_property
    def features(self) -> Float[Array, "batch length width"]:
        apply = functools.partial(self.model.apply, method="features")
        return jit(apply)({"params": self.params}, self.tokens)


def check_causality(model: SmallModel) -> None:
    """Each token's features have a gradient with respect to the token itself, and none to a later one."""
    if not model.method.causal:
        return

    @jit
    def gradients(embedding: Array) -> Array:
        def features(embedding: Array) -> Array:
            params = {**model.params, "embedding": embedding}
            return model.model.apply({"params": params}, model.tokens[:1], method="features")[0]

        _, to_gradient = jax.vjp(features, embedding)
        each = jnp.eye(model.length)[:, :, None] * jnp.cos(jnp.arange(WIDTH, dtype=jnp.float32))[None, None]
        return jax.vmap(lambda cotangent: to_gradient(cotangent)[0])(each)

    depends = np.abs(np.asarray(gradients(model.params["embedding"]))).max(axis=-1) > 0  # [token, on token]
    if not depends.diagonal().all():
        fail(model.method, f"the features of token {depends.diagonal().argmin()} don't depend on the token itself")
    if not depends[-1, 0]:
        fail(model.method, f"in a sequence of {model.length} tokens the last one doesn't depend on the first")
    ahead = np.argwhere(np.triu(depends, 1))
    if ahead.size:
        query, key = min(ahead, key=lambda pair: (pair[1], pair[0]))
        fail(model.method, f"it is not causal: in a sequence of {key + 1} tokens, token {query} depends on token {key}")


def check_shift(model: SmallModel) -> None:
    """If the method says so, the same tokens at later positions give the same features."""
    if not model.method.shift_invariant:
        return
    apply = jit(functools.partial(model.model.apply, method="features"))
    for shift in (1, 5):
        shifted = apply({"params": model.params}, model.tokens, positions=jnp.arange(model.length) + shift)
        error = np.abs(np.asarray(shifted - model.features)).max(axis=(0, 2))
        if error.max() > 1e-3:
            token = int(np.argmax(error > 1e-3))
            fail(
                model.method,
                f"it declares shift_invariant and is not: with positions greater by {shift}, the features of token "
                f"{token} differ by {error[token]:.2g} in a sequence of {token + 1}",
            )


class _Decoding(ModelConfig):
    """A model whose attention reads one token by the loop over blocks of keys, however few there are."""


@attention_options.register
def _(config: _Decoding, sharding: Any) -> AttentionOptions:
    return AttentionOptions(sharding=sharding, backend="decoding", block=4)


def check_cache(model: SmallModel) -> None:
    """A prompt in two pieces, then single tokens, through a cache, give the features of the whole sequence.

    The cache has more slots than there are tokens, and in the second sequence padding stands before the first token and
    between others. With a bias that is `bounded`, single tokens are read again by the loop that skips keys. Only causal
    methods have a cache.
    """
    if not model.method.causal:
        return
    lm, slots = model.model, np.arange(model.length)
    places = [slots, np.delete(slots, PADDING)]
    tokens, positions = np.array(model.tokens), np.full((2, model.length), -1)
    for row, own in enumerate(places):
        tokens[row, own], positions[row, own] = tokens[row, : own.size].copy(), np.arange(own.size)
    read, empty = _reader(model, lm), jnp.zeros((2, model.length + 5), jnp.int32)
    cache = jit(lambda: lm.init(jax.random.key(0), empty, decode=True, total=model.length)["cache"])()
    of_prompt = []
    for part in (slice(0, 4), slice(4, 8)):
        features, cache = read(cache, tokens[:, part], positions=positions[:, part])
        of_prompt.append(features)
    ways = {"decoded after the prompt": read}
    if is_bounded(model.method):
        config = _Decoding(**dataclasses.asdict(lm.config))
        ways["decoded by the loop over keys"] = _reader(model, lm.clone(config=config))
    for how, read_one in ways.items():
        held, of_all = cache, list(of_prompt)
        for number in range(8, model.length):
            features, held = read_one(held, tokens[:, number : number + 1])
            of_all.append(features)
        _compare_features(model, np.concatenate(of_all, axis=1), places, how)


def _reader(model: SmallModel, lm: DecoderLM) -> Callable[..., Any]:
    """A function of a cache and new tokens that gives their features and the cache with them."""
    apply = jit(functools.partial(lm.apply, decode=True, mutable=["cache"], method="features"))

    def read(cache: PyTree, tokens: Any, **positions: Any) -> tuple[Array, PyTree]:
        features, updated = apply({"params": model.params, "cache": cache}, tokens, **positions)
        return features, updated["cache"]

    return read


def _compare_features(model: SmallModel, got: np.ndarray, places: list[np.ndarray], how: str) -> None:
    """Compares the features of sequences, whose tokens stand in these slots, with those of whole ones."""
    whole = np.asarray(model.features)
    off: dict[tuple[int, int], tuple[int, float]] = {}
    for row, slots in enumerate(places):
        error = np.abs(got[row, slots] - whole[row, : slots.size]).max(axis=1)
        wrong = np.flatnonzero(~(error < 1e-3)).tolist()
        off |= {(int(slots[token]), row): (token, float(error[token])) for token in wrong}
    if off:
        place, row = min(off)
        token, error = off[place, row]
        padding = f" with padding in slots {', '.join(map(str, PADDING))}" if row else ""
        how = "in a prompt of two pieces" if place < 8 else how
        fail(
            model.method,
            f"with a cache{padding}, token {token}, {how}, is off by {error:.2g} from the whole sequence",
        )


def check_layers(model: SmallModel) -> None:
    """Layers that are recomputed, or run by one scanned block, give the same loss and gradients."""

    def loss(params: Any, lm: DecoderLM) -> Array:
        params = stacked(params) if lm.config.scan_layers else params
        nll: Any = lm.apply({"params": params}, model.tokens, model.tokens, method="token_nll")
        return nll.sum()

    compute = jit(jax.value_and_grad(loss), static_argnums=1)
    expected = compute(model.params, model.changed())
    for keys in ({"remat": True}, {"scan_layers": True}):
        got = compute(model.params, model.changed(**keys))
        compare(model.method, f"a model with {next(iter(keys))}", got, expected, 1e-4)
