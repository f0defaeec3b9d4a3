"""How the paper's model starts: mean, standard deviation and range of each tensor, by the recipe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import make_config, read_config, replaced
from alibi.model.decoder import build_model
from configs import wikitext103

WIDTH, HIDDEN, CUTOFFS, VOCABULARY = 64, 192, (2_000, 5_000), 12_000
DEVIATIONS = 5.0  # of the estimate of a mean or a standard deviation: one in two million


@pytest.fixture(scope="module")
def params() -> dict:
    config = read_config(wikitext103.get_config())
    config = replaced(
        config,
        {
            "model.num_layers": 2,
            "model.width": WIDTH,
            "model.feed_forward": HIDDEN,
            "model.cutoffs": CUTOFFS,
        },
    )
    model = build_model(config, VOCABULARY)
    return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def check_uniform(tensor: jax.Array, bound: float) -> None:
    """Checks a uniform distribution on +-bound: no sample is outside and some are near the ends."""
    x = np.asarray(tensor, np.float64).ravel()
    assert np.abs(x).max() <= bound * (1 + 1e-6)
    assert np.abs(x).max() > bound * (1 - 20 / x.size)
    _check_moments(x, bound / np.sqrt(3), kurtosis=1.8)


def check_normal(tensor: jax.Array, deviation: float) -> None:
    x = np.asarray(tensor, np.float64).ravel()
    assert 3 * deviation < np.abs(x).max() < 6.5 * deviation, "a normal, neither cut off nor wide"
    _check_moments(x, deviation, kurtosis=3.0)


def _check_moments(x: np.ndarray, deviation: float, kurtosis: float) -> None:
    assert abs(x.mean()) < DEVIATIONS * deviation / np.sqrt(x.size)
    assert abs(x.std() / deviation - 1) < DEVIATIONS * np.sqrt((kurtosis - 1) / 4 / x.size)


def xavier(inputs: int, outputs: int, gain: float = 1.0) -> float:
    return gain * np.sqrt(6 / (inputs + outputs))


def test_adaptive_embeddings(params) -> None:
    for number, (start, end) in enumerate(zip((0, *CUTOFFS), (*CUTOFFS, VOCABULARY), strict=True)):
        band, features = params["adaptive"][f"band_{number}"], WIDTH // 4**number
        assert band["embedding"].shape == (end - start, features)
        check_normal(np.delete(band["embedding"], 1, axis=0), features**-0.5)
        np.testing.assert_array_equal(band["embedding"][1], 0.0, err_msg="the padding row")
        check_uniform(band["kernel"], xavier(features, WIDTH))
    check_uniform(params["adaptive"]["clusters"], xavier(WIDTH, 2))


def test_layers(params) -> None:
    for layer in (params["layers_0"], params["layers_1"]):
        for name in ("query", "key", "value"):
            check_uniform(layer["attention"][name]["kernel"], xavier(WIDTH, WIDTH, gain=2**-0.5))
            check_uniform(layer["attention"][name]["bias"], WIDTH**-0.5)
        check_uniform(layer["attention"]["out"]["kernel"], xavier(WIDTH, WIDTH))
        np.testing.assert_array_equal(layer["attention"]["out"]["bias"], 0.0)
        for name, inputs in (("up", WIDTH), ("down", HIDDEN)):
            check_uniform(layer[name]["kernel"], inputs**-0.5)
            check_uniform(layer[name]["bias"], inputs**-0.5)
        for name in ("attention_norm", "feed_forward_norm"):
            np.testing.assert_array_equal(layer[name]["scale"], 1.0)
            np.testing.assert_array_equal(layer[name]["bias"], 0.0)
    assert "final_norm" not in params
    assert not np.array_equal(
        params["layers_0"]["up"]["kernel"], params["layers_1"]["up"]["kernel"]
    )


def test_the_default_is_xavier_with_biases_of_zero() -> None:
    model = build_model(make_config("model.num_layers=1"), 256)
    layer = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"][
        "layers_0"
    ]
    check_uniform(layer["attention"]["query"]["kernel"], xavier(128, 128))
    check_uniform(layer["up"]["kernel"], xavier(128, 512))
    for bias in (layer["attention"]["query"]["bias"], layer["up"]["bias"], layer["down"]["bias"]):
        np.testing.assert_array_equal(bias, 0.0)
