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


@pytest.mark.parametrize("backend", ["fused", "blocked"])
def test_what_remat_keeps_is_not_computed_again(tiny_config, backend: str) -> None:
    """Two wide products in the loop's body, up and gate; attention's forward pass; and by default the
    sums of the layer's two norms."""
    keys = {"model__gated": True, "model__num_layers": 2, "model__scan_layers": True}
    config = tiny_config(position="none", model__attention=backend, **keys)
    model, inputs = build_model(config, VOCABULARY), tokens(12)
    with traced_for("cpu", 1):
        params = jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]

    def counted(**keys: Any) -> dict[str, int]:
        def loss(params: dict) -> jax.Array:
            of = changed(model, **keys)
            return of.apply({"params": params}, inputs, inputs, method="token_nll").sum()

        with traced_for("cpu", 1):
            program = str(jax.make_jaxpr(jax.grad(loss))(params))
        # XLA leaves out a kernel whose result is not read
        kernels = re.findall(r"(\w+):\S+ \w+:\S+ = pallas_call\[", program)
        return {
            "products": program.count(" dot_general["),
            "sums": program.count("reduce_sum[axes=(1,)"),
            "exponentials": program.count(" exp ") if backend == "blocked" else 0,
            "kernels": sum(len(re.findall(rf"\b{kernel}\b", program)) > 1 for kernel in kernels),
        }

    plain, remat, up, attention, both = (
        counted(),
        *(
            counted(remat=True, remat_keeps=k)
            for k in ("nothing", "up", "attention", "up_attention")
        ),
    )
    assert remat["sums"] == plain["sums"]
    assert remat["products"] - up["products"] == attention["products"] - both["products"] == 2
    forward = "exponentials" if backend == "blocked" else "kernels"
    assert attention[forward] == plain[forward] < remat[forward]


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
