"""Options of a layer's attention: with every kind of position method, in the cache and in loops."""

from typing import Any

import jax
import numpy as np
import pytest

from alibi.config import make_config
from alibi.model.decoder import build_model
from alibi.positions import make_position
from alibi.testing import check_cache, check_causality, check_layers
from alibi.testing.model import SmallModel

OPTIONS: list[dict[str, Any]] = [{"normalizer": "softmax1"}, {"normalizer": "sink"}]
METHODS = ("alibi", "fox", "rotary")  # a bias of distance, of content, and none


def small(position: str, **keys: Any) -> SmallModel:
    sizes = {"num_heads": 4, "head_dim": 8, "width": 32, "train_length": 16}
    return SmallModel(make_position(position, **sizes), **keys)


@pytest.mark.parametrize("position", METHODS)
@pytest.mark.parametrize("keys", OPTIONS, ids=str)
def test_options_go_with_the_cache_loops_and_causality(position: str, keys: dict) -> None:
    model = small(position, **keys)
    for check in (check_causality, check_cache, check_layers):
        check(model)


def test_a_learned_sink_begins_as_softmax1() -> None:
    learned, fixed = small("alibi", normalizer="sink"), small("alibi", normalizer="softmax1")
    added = {
        path[0].key: leaf.shape
        for path, leaf in jax.tree.leaves_with_path(learned.params["layers_1"])
        if len(path) == 1
    }
    assert added == {"sink": (4,)}
    np.testing.assert_array_equal(learned.features, fixed.features)
    assert np.abs(learned.features - small("alibi").features).max() > 1e-2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "model.normalizer=sink,model.attention=augmented",
            "model.normalizer=sink doesn't go with model.attention=augmented: its softmax has no sink",
        ),
        ("model.normalizer=softmax2", "model.normalizer='softmax2' must be one of softmax"),
    ],
)
def test_options_are_refused_before_work(keys: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build_model(make_config(keys), 100)
    assert "\n" not in str(error.value)
