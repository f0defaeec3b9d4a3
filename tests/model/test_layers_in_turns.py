"""A config whose layers differ, at 16 times the training length: a float64 formula, and decoding."""

import dataclasses

import jax
import numpy as np
import pytest

from alibi.config import Config, flatten, read_config
from alibi.generation import new_cache, read
from alibi.model.decoder import build_model
from configs import irope

LENGTH, WINDOW = 16, 4  # of the tiny models


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's positions, as its source describes them."""

    base: float | None = None
    window: int = 10**6
    grows: bool = False


IROPE = [*[Layer(base=500_000.0, window=WINDOW)] * 3, Layer(grows=True)]


def tiny(tiny_config) -> Config:
    """Returns the tests' model with the layer pattern of configs/irope.py and shorter windows."""
    whole = read_config(irope.get_config())
    keys = {
        key.replace(".", "__"): value
        for key, value in flatten(whole).items()
        if key in ("position", "model.num_layers", "model.logit_scale")
        or key.startswith("position_options.")
    }
    keys["model__window"] = tuple(WINDOW if each else 0 for each in whole.model.window)
    return tiny_config(**keys, train__steps=4)


def logits(params: dict, tokens: np.ndarray, layers: list[Layer]) -> np.ndarray:
    """Returns the logits of a sequence, float64, by the definitions."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    position = np.arange(tokens.size)
    distance = position[:, None] - position

    def norm(of: dict, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * of["scale"]
            + of["bias"]
        )

    def turned(x: np.ndarray, base: float) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = (position[:, None] * base ** (-np.arange(half) / half))[:, None]
        as_complex = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([as_complex.real, as_complex.imag], axis=-1)

    x = params["embedding"][tokens] * np.sqrt(params["embedding"].shape[1])
    for number, layer in enumerate(layers):
        of, attention = params[f"layers_{number}"], params[f"layers_{number}"]["attention"]
        y = norm(of["attention_norm"], x)
        query, key, value = (
            np.einsum("td,dhe->the", y, attention[name]["kernel"]) + attention[name]["bias"]
            for name in ("query", "key", "value")
        )
        if layer.base:
            query, key = turned(query, layer.base), turned(key, layer.base)
        if layer.grows:
            query = query * (1 + 0.1 * np.log((position + 1) // LENGTH + 1))[:, None, None]
        z = np.einsum("qhe,khe->hqk", query, key) / np.sqrt(query.shape[-1])
        z = np.where((distance >= 0) & (distance < layer.window), z, -np.inf)
        weights = np.exp(z - z.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,khe->qhe", weights, value)
        x = x + np.einsum("qhe,hed->qd", out, attention["out"]["kernel"]) + attention["out"]["bias"]
        y = norm(of["feed_forward_norm"], x) @ of["up"]["kernel"] + of["up"]["bias"]
        x = x + np.maximum(y, 0) @ of["down"]["kernel"] + of["down"]["bias"]
    return norm(params["final_norm"], x) @ params["embedding"].T


@pytest.mark.slow
def test_a_pattern_of_layers(tiny_config) -> None:
    """At 16 times the training length it is the formula, and decodes as its full pass, through slots
    of a window and a chunk.
    """
    model = build_model(tiny(tiny_config), 256)
    tokens = np.random.default_rng(0).integers(0, 256, (1, 16 * LENGTH))
    params = jax.tree.map(  # off their initial values, which are zeros for the biases
        lambda leaf: (
            leaf + 0.02 * np.cos(np.arange(leaf.size, dtype=np.float32)).reshape(leaf.shape)
        ),
        jax.device_get(jax.jit(model.init)(jax.random.key(0), tokens[:, :1])["params"]),
    )
    whole = jax.jit(model.apply)({"params": params}, tokens)
    np.testing.assert_allclose(whole[0], logits(params, tokens[0], IROPE), atol=2e-5)
    cache, found = new_cache(model, 1, tokens.size, tokens.size, 100), []
    for start, end in ((0, 100), (100, 200), *((at, at + 1) for at in range(200, 210))):
        piece, cache = read(model, params, cache, tokens[:, start:end])
        found.append(np.asarray(piece))
    found = np.concatenate(found, axis=1)
    np.testing.assert_allclose(found, whole[:, :210], atol=5e-5)
    held = [cache[f"layers_{number}"]["held"].key.shape[-1] for number in range(len(IROPE))]
    assert held == [WINDOW + 99 if layer.window == WINDOW else 16 * LENGTH for layer in IROPE]
