"""Recomputed layers, and layers in a loop, compute the same as unrolled layers."""

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

from alibi.model.decoder import DecoderLM, build_model
from alibi.model.layers import stacked
from alibi.numerics.target import traced_for
from tests.model.made import VOCABULARY, changed, make, tokens
from tests.programs import AS_USERS
from tests.refusals import assert_refused


def test_remat_of_unrolled_layers_changes_no_gradient(tiny_config) -> None:
    """Also where some of the layers' results are kept."""
    model, variables = make(tiny_config, "fox", model__num_layers=1, model__gated=True)

    def loss(params: dict, model: DecoderLM) -> jax.Array:
        return model.apply({"params": params}, tokens(12), tokens(12), method="token_nll").sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    plain = gradient(variables["params"], model)
    remat = gradient(variables["params"], changed(model, remat=True, remat_keeps="up"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), plain, remat)


def gradient_of(tiny_config, keeps: str | None, platform: str = "cpu", **keys: Any) -> str:
    """Returns the program of a loss's gradient, of two layers in a loop. None: without remat."""
    sizes = {"model__gated": True, "model__num_layers": 2, "model__scan_layers": True}
    config = tiny_config(position="none", **sizes, **keys)
    model, inputs = build_model(config, VOCABULARY), tokens(12)
    remat = changed(model, remat=keeps is not None, remat_keeps=keeps or "nothing")

    def loss(params: dict) -> jax.Array:
        return remat.apply({"params": params}, inputs, inputs, method="token_nll").sum()

    with traced_for(platform, 1):
        params = jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]
        return str(jax.make_jaxpr(jax.grad(loss))(params))


@pytest.mark.parametrize("keeps", ["up", "up_attention"])
def test_remat_keeps_the_wide_products(tiny_config, keeps: str) -> None:
    """Two in the loop's body, up and gate."""
    nothing, kept = (
        gradient_of(tiny_config, one).count(" dot_general[") for one in ("nothing", keeps)
    )
    assert nothing - kept == 2


@pytest.mark.parametrize("keeps", ["attention", "up_attention"])
def test_remat_keeps_the_result_of_blocked_attention(tiny_config, keeps: str) -> None:
    plain, nothing, kept = (
        gradient_of(tiny_config, one, model__attention="blocked").count(" exp ")
        for one in (None, "nothing", keeps)
    )
    assert kept == plain < nothing


def test_remat_keeps_the_result_of_fused_attention(tiny_config) -> None:
    """Counts kernels with two results, the forward pass and the gradients of keys and values. XLA
    leaves out a kernel whose result nothing reads.
    """

    def read(keeps: str | None) -> int:
        program = gradient_of(tiny_config, keeps, model__attention="fused")
        kernels = re.findall(r"(\w+):\S+ \w+:\S+ = pallas_call\[", program)
        return sum(len(re.findall(rf"\b{kernel}\b", program)) > 1 for kernel in kernels)

    assert (read(None), read("nothing"), read("attention")) == (2, 3, 2)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_remat_keeps_the_sums_of_norms(tiny_config, platform: str, monkeypatch) -> None:
    """Two of each of a layer's two norms. On CPUs norms get `[rows, features]`."""
    axes = {"cpu": "(1,)", "tpu": "(2,)"}[platform]

    def sums(keeps: str | None) -> int:
        program = gradient_of(tiny_config, keeps, platform, model__attention="reference")
        return program.count(f"reduce_sum[axes={axes}")

    plain, kept = sums(None), sums("nothing")
    monkeypatch.setattr("alibi.model.decoder.is_norm_sum", lambda *_, **__: False)
    assert (kept, sums("nothing")) == (plain, plain + 4)


def test_feed_forward_layers_multiply_matrices_on_tpus(tiny_config) -> None:
    """With the same logits. Two sequences of 12 tokens are 24 rows."""
    keys = {"model__attention": "reference", "model__feed_forward": 56}
    model, variables = make(tiny_config, "none", model__num_layers=1, **keys)
    with traced_for("tpu", 1):
        program = jax.jit(lambda variables: model.apply(variables, tokens(12))).trace(variables)
    assert "f32[24,56] = dot_general" in str(program.jaxpr)
    expected = jax.jit(model.apply)(variables, tokens(12))
    np.testing.assert_allclose(program.lower().compile()(variables), expected, atol=1e-5)


def test_scanned_layers_of_another_number_are_refused(tiny_config) -> None:
    """An index beyond the stack would take its last layer again."""
    model = build_model(tiny_config(position="alibi", model__num_layers=3), VOCABULARY)
    params = jax.eval_shape(lambda: stacked(model.init(jax.random.key(0), tokens(12))["params"]))
    for layers in (2, 4):
        scanned = changed(model, scan_layers=True, num_layers=layers)
        other = functools.partial(jax.eval_shape, scanned.apply, {"params": params}, tokens(12))
        assert_refused(rf"3 layers.* {layers}; set model\.num_layers", other)


def test_the_last_tokens_copy_no_part_of_the_stack(tiny_config) -> None:
    """Where only these are scored, the last layer is a program of its own, and the loop takes the
    others.
    """
    model = changed(
        make(tiny_config, "alibi", model__num_layers=1)[0], scan_layers=True, num_layers=8
    )
    inputs = tokens(12)
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]
    score = jax.jit(
        lambda params, scored: model.apply({"params": params}, inputs, scored, method="token_nll")
    )
    held = [
        score.lower(params, inputs[:, -n:])
        .compile(compiler_options=AS_USERS)
        .memory_analysis()
        .temp_size_in_bytes
        for n in (12, 5)
    ]
    of_layer = sum(4 * leaf.size for leaf in jax.tree.leaves(params["layers"])) // 8
    assert held[1] - held[0] < 3 * of_layer, "two layers' parameters at most, not seven"


def test_dropout_of_scanned_layers_differs_between_them(tiny_config) -> None:
    model, variables = make(tiny_config, "alibi", model__num_layers=2, model__dropout=0.5)
    apply = jax.jit(functools.partial(changed(model, scan_layers=True).apply, deterministic=False))
    variables = {"params": stacked(variables["params"])}
    one, same, other = (
        apply(variables, tokens(12), rngs={"dropout": jax.random.key(seed)}) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 1e-3
