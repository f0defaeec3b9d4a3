"""Architectures besides the paper's: norms, feed-forward layers, heads and embeddings."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import MeshConfig, make_config
from alibi.model.decoder import build_model, param_shapes
from alibi.model.flops import forward_flops
from alibi.parallel.sharding import abstract_mesh, tree_shardings
from alibi.positions import METHODS, make_position, method_class
from alibi.testing import check_cache, check_layers
from alibi.testing.model import SmallModel
from alibi.training.setup import check_trainable
from tests.attention.calls import formula
from tests.refusals import assert_refused

LLAMA_LIKE = {
    "num_kv_heads": 2,
    "head_size": 16,
    "norm": "rms",
    "gated": True,
    "activation": "silu",
    "embedding": "untied",
    "qkv_bias": True,
    "out_bias": False,
    "feed_forward_bias": False,
    "embedding_scale": 1.0,
}
# The others' options, as far as one model has room for them: MPT's, OLMo 2's, GPT-NeoX's.
NORMED_KEYS = {
    "norms": "behind",
    "qk_norm": True,
    "qk_norm_joint": True,
    "clip_qkv": 0.5,
    "attention_scale": 0.1,
}
OTHERS = {
    "parallel": True,
    "norm": "rms_one",
    "embedding_norm": True,
    "embedding": "normalised",
    "qkv_bias": False,
    "logits_scale": 0.5,
}


ATTENTION = {"normalizer": "sink", "qk_norm": True, "attention_gate": True, "logit_cap": 2.0}


def small(position: str, **keys: Any) -> SmallModel:
    sizes = {"num_heads": 4, "width": 32, "train_length": 16}
    return SmallModel(make_position(position, head_dim=keys.get("head_size", 8), **sizes), **keys)


def test_a_normalised_row_of_zeros_has_a_gradient() -> None:
    """An imported head may have one; a NaN would end the training at its first update."""
    sizes = "model.num_layers=1,model.width=16,model.num_heads=2"
    model = build_model(make_config(sizes, model__embedding="normalised"), 8)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    params["head"] = params["head"].at[3].set(0.0)
    tokens = jnp.arange(6)[None]

    def loss(params: dict[str, Any]) -> jax.Array:
        return jnp.asarray(
            model.apply({"params": params}, tokens, tokens, method="token_nll")
        ).sum()

    gradient = jax.jit(jax.grad(loss))(params)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_which_methods_need_keys_of_each_head() -> None:
    own = {name for name in METHODS if not method_class(name).takes_shared_keys}
    assert own == {"deberta", "pope", "repo", "selective_rope"}


@pytest.mark.parametrize(
    "keys",
    [LLAMA_LIKE | NORMED_KEYS, OTHERS],
    ids=["llama", "others"],
)
def test_architectures_go_with_loops_and_the_cache(keys: dict[str, Any]) -> None:
    model = small("alibi", **keys)
    for check in (check_cache, check_layers):
        check(model)


def test_options_of_attention_go_with_the_cache_and_loops() -> None:
    """With a bias of content."""
    model = small("fox", **ATTENTION)
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
    model = small("alibi", **ATTENTION)
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

    distance = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])
    bias = -(2.0 ** (-2.0 * np.arange(1, 5)))[:, None, None] * distance
    sides = normed("query"), normed("key"), projected("value")
    heads = formula(*sides, bias, distance >= 0, sink=layer["sink"], cap=2.0)
    heads = heads / (1 + np.exp(-np.einsum("blw,whd->blhd", x, layer["attention_gate"]["kernel"])))
    out = layer["attention"]["out"]
    expected = np.einsum("blhd,hdw->blw", heads, out["kernel"]) + out["bias"]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_without_options_the_layer_is_flaxs_own_with_its_parameters() -> None:
    names = small("alibi").params["layers_0"].keys()
    assert names == {"attention_norm", "attention", "feed_forward_norm", "up", "down"}


def test_names_of_axes_split_every_large_parameter() -> None:
    """In a model with all options, only norms and small biases are whole on each device."""
    config = make_config(
        "model.width=64,model.num_heads=8,model.num_kv_heads=4,model.gated=true,model.norm=rms,"
        "model.embedding=untied,model.attention_gate=true"
    )
    mesh = abstract_mesh(MeshConfig(fsdp=2, tensor=4), 8)
    shapes = param_shapes(build_model(config, 256))
    specs = jax.tree.map(lambda leaf: leaf.spec, tree_shardings(shapes, mesh))
    layer = specs["layers_0"]
    assert layer["gate"]["kernel"] == layer["up"]["kernel"] == jax.P("fsdp", "tensor")
    split_by_heads = layer["attention_gate"]["kernel"], layer["attention"]["query"]["kernel"]
    for spec in (*split_by_heads, layer["attention"]["key"]["kernel"]):
        assert spec == jax.P("fsdp", "tensor", None)
    assert specs["head"] == specs["embedding"] == jax.P("tensor", "fsdp")
    whole = [
        leaf.size
        for leaf, spec in zip(*map(jax.tree.leaves, (shapes, specs)), strict=True)
        if not any(spec)
    ]
    assert max(whole) == 64


def test_flops_count_shared_heads_and_gates() -> None:
    """Two a weight in the model's matrices; the input embedding does not count."""
    config = make_config(
        "model.width=64,model.num_heads=8,model.num_kv_heads=2,model.head_size=16,model.gated=true,"
        "model.embedding=untied,model.norm=rms,length=128"
    )
    params = param_shapes(build_model(config, 256))
    weights = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
    biases = sum(
        leaf.size
        for path, leaf in jax.tree.leaves_with_path(params)
        if leaf.ndim > 1 and path[-1].key == "bias"
    )
    of_inputs = params["embedding"].size
    attention = 4 * 8 * 16 * (128 + 1) / 2
    expected = 2 * (weights - biases - of_inputs) + config.model.num_layers * attention
    assert forward_flops(config, 256, 128) == pytest.approx(expected)


def test_parameters_of_sixteen_bits_compute_as_their_values(tiny_config) -> None:
    """A model with parameters in bfloat16 computes in float32, with the values that they have: those
    of the position method too.
    """
    kept = build_model(tiny_config(position="kerple_log", model__param_dtype="bfloat16"), 40)
    widened = build_model(tiny_config(position="kerple_log"), 40)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(param_shapes(kept))} == {"bfloat16"}
    tokens = jnp.arange(16)[None]
    params = jax.jit(widened.init)(jax.random.key(0), tokens)["params"]
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    wide = {"params": jax.tree.map(lambda x: x.astype(jnp.float32), narrow)}
    expected = jax.jit(widened.apply)(wide, tokens)
    np.testing.assert_array_equal(jax.jit(kept.apply)({"params": narrow}, tokens), expected)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model__param_dtype": "bfloat16"}, r"model\.param_dtype=bfloat16 is for imported runs"),
        ({"model__remat_keeps": "up"}, r"model\.remat_keeps=up says .*; set model\.remat=True, or"),
        (
            {"model__num_heads": 4, "model__num_kv_heads": 2, "mesh__tensor": 4},
            r"does not divide model\.num_kv_heads=2; use one of 1, 2",
        ),
    ],
)
def test_what_training_refuses(tiny_config, keys: dict[str, Any], message: str) -> None:
    assert_refused(message, check_trainable, tiny_config(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "model.normalizer=sink,model.attention=augmented",
            "model.normalizer=sink .* model.attention=augmented",
        ),
        (
            "model.logit_cap=30,model.attention=saved",
            "model.logit_cap=30.0 .* model.attention=saved",
        ),
        ("model.logit_cap=-1", "model.logit_cap=-1 must be at least 0"),
        ("model.normalizer=softmax2", "model.normalizer='softmax2' must be one of softmax"),
        ("model.num_kv_heads=3", "model.num_kv_heads=3 does not divide model.num_heads=8"),
        ("model.qk_norm_joint=true", "set model.qk_norm=True too"),
        ("model.embedding=adaptive,model.vocab_rows=9", "model.embedding=adaptive has no"),
        ("model.width=100", "or set model.head_size"),
        ("model.norm=batch", "model.norm='batch' must be one of layer, layer_no_bias, rms"),
        # Parallel layers have nothing behind which a norm could stand.
        *(
            (
                f"model.parallel={parallel},model.norms={norms}",
                f"norms={norms} doesn't go with model.parallel={parallel}",
            )
            for parallel, norms in ((True, "after"), (True, "behind"), (False, "before_each"))
        ),
        ("model.skip_epsilon=-0.1", r"model\.skip_epsilon=.* must be"),
        ("model.skip_epsilon=1.0", r"model\.skip_epsilon=.* must be"),
        ("position=pope,model.num_kv_heads=2", "position=pope needs keys of each head; set model"),
    ],
)
def test_options_are_refused_before_work(keys: str, message: str) -> None:
    assert_refused(message, lambda: build_model(make_config(keys), 100))
