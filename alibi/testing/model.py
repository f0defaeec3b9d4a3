"""Checks on a small model with the method: causality, shifts, the decoding cache, recomputed and
scanned layers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from alibi.config import ModelConfig
from alibi.model.decoder import DecoderLM
from alibi.model.layers import stacked
from alibi.model.positions import LayerKind
from alibi.positions import PositionMethod
from alibi.testing.samples import (
    HEADS,
    TOKENS,
    WIDTH,
    compare,
    declared,
    fail,
    jit,
    random_moves,
)

WINDOW, CHUNK = 6, 4  # of the second layer, and tokens that its cache takes at a time
PADDING = (0, 4, 5)  # empty slots in the second sequence of `check_cache`


class SmallModel:
    """A model with two layers, its parameters, two sequences and their features.

    Position parameters are moved off their initial values.

    Args:
      keys: other values in `config.model`.
    """

    def __init__(self, method: PositionMethod, **keys: Any):
        self.method = method
        config = ModelConfig(num_layers=2, width=WIDTH, num_heads=HEADS, feed_forward=WIDTH, **keys)
        of_layers = zip(config.by_layer("window"), config.by_layer("logit_scale"), strict=True)
        kinds = tuple(LayerKind(method, *values) for values in of_layers)
        self.model = DecoderLM(config, tuple(dict.fromkeys(kinds)), vocab_size=TOKENS)
        self.length = min(TOKENS, method.max_length or TOKENS)
        self.tokens = jnp.stack([jnp.arange(self.length), jnp.arange(self.length)[::-1]])
        self.params = jit(self._init)(jax.random.key(0))
        self.apply = jit(functools.partial(self.model.apply, method="features"))
        self.features = np.asarray(self.apply({"params": self.params}, self.tokens))

    def _init(self, key: Any) -> Any:
        params = self.model.init(key, self.tokens)["params"]
        moved = jax.tree.map_with_path(
            lambda path, old, new: new if "position" in str(path) else old,
            params,
            random_moves(params, 0.1),
        )
        return self.model.within_limits(moved)


def check_causality(model: SmallModel) -> None:
    """Checks with gradients that a token's features depend on the token and not on a later one, and the
    last token's on the first.
    """
    if not model.method.causal:
        return

    @jit
    def gradients(embedding: Array) -> Array:
        def features(embedding: Array) -> Array:
            params = {**model.params, "embedding": embedding}
            return model.model.apply({"params": params}, model.tokens[:1], method="features")[0]

        _, to_gradient = jax.vjp(features, embedding)
        weights = jnp.cos(jnp.arange(WIDTH, dtype=jnp.float32))
        each = jnp.multiply.outer(jnp.eye(model.length, dtype=jnp.float32), weights)
        return jax.vmap(lambda cotangent: to_gradient(cotangent)[0])(each)

    # [token, on token]
    depends = np.abs(np.asarray(gradients(model.params["embedding"]))).max(axis=-1) > 0
    if not depends.diagonal().all():
        fail(
            model.method,
            f"the features of token {depends.diagonal().argmin()} don't depend on the token itself",
        )
    if not depends[-1, 0]:
        fail(
            model.method,
            f"in a sequence of {model.length} tokens the last one doesn't depend on the first",
        )
    ahead = np.argwhere(np.triu(depends, 1))
    if ahead.size:
        query, key = min(ahead, key=lambda pair: (pair[1], pair[0]))
        fail(
            model.method,
            f"it is not causal: in a sequence of {key + 1} tokens, token {query} depends on token {key}",
        )


def check_shift(model: SmallModel) -> None:
    """Checks that a `shift_invariant` method gives the same features at later positions."""
    if not model.method.shift_invariant:
        return
    for shift in (1, 5):
        shifted = model.apply(
            {"params": model.params}, model.tokens, positions=jnp.arange(model.length) + shift
        )
        error = np.abs(np.asarray(shifted) - model.features).max(axis=(0, 2))
        if error.max() > 1e-3:
            token = int(np.argmax(error > 1e-3))
            fail(
                model.method,
                f"it declares shift_invariant and is not: with positions greater by {shift}, the features of token "
                f"{token} differ by {error[token]:.2g} in a sequence of {token + 1}",
            )


def check_cache(model: SmallModel) -> None:
    """Checks that a prompt in two pieces and then single tokens, read through a cache, have the
    features of the whole sequence.

    The cache has more slots than tokens, or is a ring in a layer with a window. In the second
    sequence padding stands before the first token and between others. Only causal methods have a
    cache.
    """
    if not model.method.causal:
        return
    lm, slots = model.model, np.arange(model.length)
    places = [slots, np.delete(slots, PADDING)]
    tokens, positions = np.array(model.tokens), np.full((2, model.length), -1)
    for row, filled in enumerate(places):
        tokens[row, filled] = tokens[row, : filled.size].copy()
        positions[row, filled] = np.arange(filled.size)
    apply = functools.partial(lm.apply, decode=True, mutable=["cache"], method="features")
    first, later = jit(functools.partial(apply, fresh=True)), jit(apply)
    empty = jnp.zeros((2, model.length + 5), jnp.int32)
    # Under jit no parameters are made.
    cache = jit(
        lambda: lm.init(jax.random.key(0), empty, decode=True, total=model.length, chunk=CHUNK)[
            "cache"
        ]
    )()
    features = []
    for start, stop in ((0, 4), (4, 8), *((slot, slot + 1) for slot in range(8, model.length))):
        piece = np.s_[:, start:stop]
        keywords = {"positions": positions[piece]} if stop <= 8 else {}
        variables = {"params": model.params, "cache": cache}
        new, updated = (later if start else first)(variables, tokens[piece], **keywords)
        cache = updated["cache"]
        features.append(new)
    got = np.concatenate(features, axis=1)
    wrong = []
    for row, filled in enumerate(places):
        error = np.abs(got[row, filled] - model.features[row, : filled.size]).max(axis=1)
        bad = np.flatnonzero(~(error < 1e-3))
        wrong += [(int(filled[token]), row, token, error[token]) for token in bad]
    if wrong:
        slot, row, token, off = min(wrong)
        padding = f" with padding in slots {', '.join(map(str, PADDING))}" if row else ""
        way = "in a prompt of two pieces" if slot < 8 else "decoded after the prompt"
        fail(
            model.method,
            f"with a cache{padding}, token {token}, {way}, is off by {off:.2g} from the whole sequence",
        )


def check_segments(model: SmallModel) -> None:
    """Checks that nothing reaches a later segment, such as a packed document, from `keep` or a row."""
    if type(model.method).keep is PositionMethod.keep and not declared(model.method).reads_rows:
        return
    first = model.length // 2
    segments = jnp.where(jnp.arange(model.length)[None] < first, jnp.zeros_like(model.tokens), 1)
    changed = model.tokens.at[:, :first].set(model.tokens[::-1, :first])
    before, after = (
        np.asarray(model.apply({"params": model.params}, tokens, segment_ids=segments))
        for tokens in (model.tokens, changed)
    )
    error = np.abs(after - before)[:, first:].max(axis=(0, 2))
    if not error.max() < 1e-3:
        token = int(np.argmax(~(error < 1e-3)))
        fail(
            model.method,
            f"with a segment from token {first} on, token {first + token} depends on tokens before it: its features "
            f"differ by {error[token]:.2g}; let no running sum or convolution of `keep` cross `segments`",
        )


def check_layers(model: SmallModel) -> None:
    """Checks that layers in a loop, recomputed there, give the same loss and gradients."""

    def loss(params: Any, lm: DecoderLM) -> Array:
        params = stacked(params) if lm.config.scan_layers else params
        nll: Any = lm.apply({"params": params}, model.tokens, model.tokens, method="token_nll")
        return nll.sum()

    compute = jit(jax.value_and_grad(loss), static_argnums=1)
    # layers alike, so that the loop compiles one
    plain = model.model.clone(pattern=model.model.pattern[-1:])
    looped = plain.clone(config=dataclasses.replace(plain.config, remat=True, scan_layers=True))
    got, expected = (compute(model.params, lm) for lm in (looped, plain))
    compare(model.method, "a model with remat and scan_layers", got, expected, 1e-4)
