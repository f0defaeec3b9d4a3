"""Layers that differ: lists of position methods, options, windows and scales, repeated over the
layers.
"""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import Config, flatten, make_config, read_config
from alibi.generation import generate
from alibi.generation.decoding import prefill
from alibi.model.decoder import UNKNOWN_VOCABULARY, DecoderLM, build_model
from alibi.model.flops import forward_flops, keys_seen
from alibi.model.layers import stacked
from configs import irope
from tests.attention.calls import formula
from tests.model.made import changed, make, tokens
from tests.model.test_generation import read_in_pieces
from tests.refusals import assert_refused


def methods(arg: str) -> list[tuple]:
    """Returns each layer kind's name, base, window and scale."""
    model = build_model(make_config(arg), UNKNOWN_VOCABULARY)
    return [
        (
            type(kind.position).__name__,
            getattr(kind.position, "base", None),
            kind.window,
            kind.logit_scale,
        )
        for kind in model.pattern
    ]


@pytest.mark.parametrize(
    ("arg", "pattern"),
    [
        ("position=rotary,model.num_layers=6", [("Rotary", 1e4, 0, "")]),
        (
            "position=rotary,none,model.window=32,0",
            [("Rotary", 1e4, 32, ""), ("NoPosition", None, 0, "")],
        ),
        (
            "position=rotary,none,position_options.base=100,model.window=8:0,model.logit_scale=,log_n",
            [("Rotary", 100.0, 8, ""), ("NoPosition", None, 0, "log_n")],
        ),
        (
            "position=rotary,position_options.base=1e4,1e4,1e6,model.num_layers=6",
            [("Rotary", 1e4, 0, ""), ("Rotary", 1e4, 0, ""), ("Rotary", 1e6, 0, "")],
        ),
        # a list of equal values is the value
        ("position=alibi,alibi,model.window=8,8", [("Alibi", None, 8, "")]),
        (
            "position=rotary,none,model.window=8,8,0,model.num_layers=6",
            [
                ("Rotary", 1e4, 8, ""),
                ("NoPosition", None, 8, ""),
                ("Rotary", 1e4, 0, ""),
                ("NoPosition", None, 8, ""),
                ("Rotary", 1e4, 8, ""),
                ("NoPosition", None, 0, ""),
            ],
        ),
    ],
)
def test_each_list_is_repeated_over_the_layers(arg: str, pattern: list[tuple]) -> None:
    assert methods(arg) == pattern


def test_a_tuple_of_an_option_that_takes_tuples_is_no_list() -> None:
    keys = "position=alibi,none,model.num_heads=2,position_options.slopes=0.5:0.25"
    model = build_model(make_config(keys), UNKNOWN_VOCABULARY)
    assert model.pattern[0].position.slopes == (0.5, 0.25)
    assert len(model.pattern) == 2


def test_a_list_that_does_not_divide_the_layers_is_said_and_repeated(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        # it is said once in a process, and no other test has this list
        found = methods("position=rotary,alibi,xpos,model.num_layers=7")
    assert [name for name, *_ in found] == ["Rotary", "Alibi", "XPos"]
    (message,) = caplog.messages
    assert message.startswith(
        "position=rotary,alibi,xpos lists 3 values, which don't divide model.num_layers=7: the list"
    )


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        (
            "position=alibi,none,rotary,model.num_layers=2",
            "position=alibi,none,rotary .* model.num_layers=2 .* 1 to 2",
        ),
        ("model.window=1,2,3,model.num_layers=2", "model.window=1,2,3 lists 3 values"),
        ("model.window=()", r"model.window=\(\) lists 0 values"),
        ("model.window=8,-1", r"model.window=\(8, -1\) must be at least 0"),
        ("model.window=8,x", "model.window='8,x' must be of type int"),
        ("model.logit_scale=log_n,loud", "must be one of '', log_n, log_n_beyond, ssmax, "),
        ("position=rotary,nune", "unknown position method 'nune'; did you mean 'none'"),
        (
            "position=none,rotary,position_options.bsae=3",
            "position method 'none' has no option 'bsae'",
        ),
        (
            "position=rotary,position_options.base=1,2,3,model.num_layers=2",
            "position_options.base=1,2,3 lists 3 values",
        ),
        (
            "position=rotary,position_options.base=1,-1",
            "base=-1 of position method .rotary. must be above 0",
        ),
        (
            "position=rotary,sinusoidal",
            "position=rotary,sinusoidal: sinusoidal",
        ),
        (
            "model.window=8,0,model.logit_scale=log_n,log_n",
            "model.logit_scale=log_n,log_n, model.window=8,0 .* layer 0",
        ),
        (
            "model.window=0,8,model.max_position=512",
            "model.max_position=512, model.window=0,8 .* layer 1",
        ),
        ("model.logit_scale=,log_n,length=1", "model.logit_scale=,log_n needs a train_length"),
        (
            "position=fox,none,model.scan_layers=True",
            "layers of position=fox,none have different ones; set model.scan_layers=False",
        ),
    ],
)
def test_lists_that_cannot_be(arg: str, message: str) -> None:
    assert_refused(message, methods, arg)


def test_methods_share_parameters_between_their_own_layers(tiny_config) -> None:
    """Each of several methods has its own under its number, and is clipped to its own limits."""
    model, variables = make(tiny_config, "t5,none,kerple_power", model__num_layers=3)
    params = variables["params"]
    shapes = jax.tree.map(jnp.shape, params["position"])
    assert set(shapes) == {"0", "2"}
    assert shapes["0"] == {"table": (32, 2)}
    moved = model.within_limits(jax.tree.map(lambda leaf: leaf + 5.0, params))["position"]
    assert moved["2"]["r2"].max() == 2.0, "a power above 2 is no kernel"
    assert moved["0"]["table"].max() > 4.0

    def loss(params: dict) -> jax.Array:
        return model.apply({"params": params}, tokens(12), tokens(12), method="token_nll").sum()

    gradient = jax.jit(jax.grad(loss))(params)["position"]
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


def test_each_window_has_slots_of_its_own(tiny_config) -> None:
    """A layer under a window keeps a window and a chunk, a layer without one keeps all tokens."""
    keys = {"model__num_layers": 2, "model__window": (4, 0)}
    model, variables = make(tiny_config, "fox,alibi", **keys)
    inputs, pieces = tokens(16), [3, 3, 1, 1, 3, 3, 1, 1]
    whole = jax.jit(model.apply)(variables, inputs)
    sizes = {"total": 16, "chunk": 3}
    got, cache = read_in_pieces(model, variables["params"], inputs, pieces, **sizes)
    np.testing.assert_allclose(got, whole, atol=2e-5)
    held = [cache[f"layers_{layer}"]["held"].key.shape[-1] for layer in range(2)]
    assert held == [4 + 3 - 1, 16]
    assert_refused(
        "4 tokens at one time", read_in_pieces, model, variables["params"], inputs, [4, 12], **sizes
    )
    prompt = np.asarray(inputs)
    made = jax.eval_shape(lambda: prefill(model, variables["params"], prompt, None, 3, 5, None)[2])
    held = [made[f"layers_{layer}"]["held"].key.shape[-1] for layer in range(2)]
    assert held == [4 + 5 - 1, 16 + 3], "generate holds no more under a window"
    answer = generate(model, variables["params"], prompt, 3, chunk=5)
    logits = jax.jit(model.apply)(variables, np.concatenate([inputs, answer], axis=1))
    np.testing.assert_array_equal(np.asarray(logits)[:, 15:-1].argmax(axis=-1), answer)


def test_scanned_patterns_compute_as_unrolled_layers_do(tiny_config) -> None:
    """Whole repeats run in the loop, and after it the fifth layer, which has few queries."""
    keys = {"model__num_layers": 5, "model__window": (4, 0)}
    model, variables = make(tiny_config, "rotary,t5", **keys)
    inputs, params = tokens(12), variables["params"]
    scanned = changed(model, scan_layers=True, remat=True)
    shapes = jax.eval_shape(scanned.init, jax.random.key(0), inputs)["params"]
    assert jax.tree.map(jnp.shape, stacked(params)) == jax.tree.map(jnp.shape, shapes)

    def loss(params: dict, model: DecoderLM) -> jax.Array:
        params = stacked(params) if model.config.scan_layers else params
        return model.apply({"params": params}, inputs, inputs[:, -5:], method="token_nll").sum()

    compute = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected, got = (compute(params, m) for m in (model, scanned))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, expected)


def test_remat_computes_each_layer_of_a_scanned_pattern_by_itself(tiny_config) -> None:
    """Two layers of the loop's body and one after it; a whole body would be held at a time.

    Barriers keep the recomputations of a body apart, and a loop over equal layers needs none.
    """
    for window, found in (((4, 0), (3, 0)), (4, (0, 1))):
        keys = {"model__num_layers": 5, "model__window": window, "model__remat": True}
        model = build_model(tiny_config(position="rotary", **keys, model__scan_layers=True), 40)
        variables = jax.eval_shape(model.init, jax.random.key(0), tokens(12))
        program = str(jax.make_jaxpr(model.apply)(variables, tokens(12)))
        assert tuple(program.count(f"prevent_cse={flag}") for flag in (True, False)) == found


def test_operations_count_each_layers_window() -> None:
    arg = "model.num_layers=4,length=128,model.window="
    windows, none, all_under = (
        forward_flops(make_config(arg + text), 256, 128) for text in ("32,32,0,0", "0", "32")
    )
    assert windows == (none + all_under) / 2
    per_key = 2 * 2 * 128  # two operations each in logits and in values, width 128
    assert none - windows == 2 * per_key * (keys_seen(0, 128) - keys_seen(32, 128)) / 128


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
        visible = (distance >= 0) & (distance < layer.window)
        (out,) = formula(query[None], key[None], value[None], visible=visible)
        x = x + np.einsum("qhe,hed->qd", out, attention["out"]["kernel"]) + attention["out"]["bias"]
        y = norm(of["feed_forward_norm"], x) @ of["up"]["kernel"] + of["up"]["bias"]
        x = x + np.maximum(y, 0) @ of["down"]["kernel"] + of["down"]["bias"]
    return norm(params["final_norm"], x) @ params["embedding"].T


def test_a_pattern_of_layers(tiny_config) -> None:
    """At 16 times the training length it is the formula."""
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
