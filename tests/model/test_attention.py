"""Options of a layer's attention: by formulas, in the cache and in loops."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import make_config
from alibi.model.decoder import build_model
from alibi.positions import make_position
from alibi.testing import check_cache, check_layers
from alibi.testing.model import SmallModel

ALL = {"normalizer": "sink", "qk_norm": True, "attention_gate": True, "logit_cap": 2.0}


def small(position: str, **keys: Any) -> SmallModel:
    sizes = {"num_heads": 4, "head_dim": 8, "width": 32, "train_length": 16}
    return SmallModel(make_position(position, **sizes), **keys)


def test_options_go_with_the_cache_and_loops() -> None:
    """With a bias of content."""
    model = small("fox", **ALL)
    for check in (check_cache, check_layers):
        check(model)


def test_a_learned_sink_begins_as_softmax1() -> None:
    learned, fixed = small("alibi", normalizer="sink"), small("alibi", normalizer="softmax1")
    added = {
        path[0].key: leaf.shape
        for path, leaf in jax.tree.leaves_with_path(learned.params["layers_0"])
        if len(path) == 1
    }
    assert added == {"sink": (4,)}
    np.testing.assert_array_equal(learned.features, fixed.features)


def test_norms_cap_gate_and_sink_of_a_layer_are_the_formulas() -> None:
    """The first layer's attention in float64, from its parameters, all of them off their initial
    values.
    """
    model = small("alibi", **ALL)
    params = jax.tree.map(
        lambda x: x + 0.3 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape),
        model.params,
    )
    capturing = functools.partial(
        model.model.apply,
        method="features",
        capture_intermediates=lambda module, _: module.name in ("attention", "attention_norm"),
    )
    _, state = jax.jit(capturing)({"params": params}, model.tokens)
    found = state["intermediates"]["layers_0"]
    x, got = (
        np.asarray(found[name]["__call__"][0], np.float64)
        for name in ("attention_norm", "attention")
    )
    layer = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["layers_0"])
    x = x.reshape(*model.tokens.shape, -1)

    def projected(name: str) -> np.ndarray:
        own = layer["attention"][name]
        return np.einsum("blw,whd->blhd", x, own["kernel"]) + own["bias"]

    def normed(name: str) -> np.ndarray:
        side = projected(name)
        size = np.sqrt((side**2).mean(axis=-1, keepdims=True) + 1e-6)
        return side / size * layer[f"{name}_norm"]["scale"]

    logits = np.einsum("bihd,bjhd->bhij", normed("query"), normed("key")) / np.sqrt(8)
    distance = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])
    slopes = 2.0 ** (-2.0 * np.arange(1, 5))
    logits = 2.0 * np.tanh(logits / 2.0) - slopes[:, None, None] * distance
    exponentials = np.where(distance >= 0, np.exp(logits), 0.0)
    total = exponentials.sum(axis=-1, keepdims=True) + np.exp(layer["sink"])[:, None, None]
    heads = np.einsum("bhij,bjhd->bihd", exponentials / total, projected("value"))
    gate = np.einsum("blw,whd->blhd", x, layer["attention_gate"]["kernel"])
    heads = heads / (1 + np.exp(-gate))
    out = layer["attention"]["out"]
    expected = np.einsum("blhd,hdw->blw", heads, out["kernel"]) + out["bias"]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_without_options_the_layer_is_flaxs_own_with_its_parameters() -> None:
    names = small("alibi").params["layers_0"].keys()
    assert names == {"attention_norm", "attention", "feed_forward_norm", "up", "down"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "model.normalizer=sink,model.attention=augmented",
            "model.normalizer=sink doesn't go with model.attention=augmented: its softmax has no sink",
        ),
        (
            "model.logit_cap=30,model.attention=saved",
            "model.logit_cap=30.0 doesn't go with model.attention=saved: it caps no logits; use",
        ),
        ("model.logit_cap=-1", "model.logit_cap=-1 must be at least 0"),
        ("model.normalizer=softmax2", "model.normalizer='softmax2' must be one of softmax"),
    ],
)
def test_options_are_refused_before_work(keys: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build_model(make_config(keys), 100)
    assert "\n" not in str(error.value)
