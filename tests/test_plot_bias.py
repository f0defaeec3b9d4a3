"""The script which draws the additions of position methods to the logits."""

import importlib
import pathlib

import numpy as np
import pytest

from alibi import alibi_slopes
from alibi.model.positions import LayerKind
from alibi.positions import make_position

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "plot_bias.py"


def test_figures_and_a_method_without_any(run_script, tmp_path) -> None:
    arguments = [
        "--methods=t5,none,fox",
        "--heads=2",
        "--head_dim=4",
        "--length=6",
        f"--output_dir={tmp_path}",
    ]
    result = run_script(SCRIPT, *arguments)
    drawn, nothing, also = result.stdout.splitlines()
    assert (drawn, also) == (f"t5: {tmp_path}/t5.png", f"fox: {tmp_path}/fox.png")
    assert nothing == "none: adds nothing to the logits itself"
    assert all(
        (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("t5", "fox")
    )
    result = run_script(
        SCRIPT, *[argument.replace("none", "nune") for argument in arguments], code=1
    )
    assert result.stderr.startswith("error: unknown position method 'nune'; did you mean 'none'?")


def test_a_length_that_a_method_is_not_defined_for_is_not_drawn(run_script, tmp_path) -> None:
    sizes = [
        "--heads=2",
        "--head_dim=4",
        "--train_length=4",
        "--length=65",
        f"--output_dir={tmp_path / 'out'}",
    ]
    result = run_script(SCRIPT, "--methods=learned", *sizes, code=1)
    assert not result.stdout
    assert result.stderr.startswith(
        "error: position method Learned has 4 positions and got a sequence of 65 "
    )
    assert not (tmp_path / "out").exists()


@pytest.fixture
def added_to_logits(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("plot_bias").added_to_logits


def test_the_drawing_is_the_addition(added_to_logits) -> None:
    """The bias of ALiBi; for rotary embeddings the change of a product of equal features by
    turning.
    """
    sizes = {"num_heads": 2, "head_dim": 4, "width": 8, "train_length": 6}
    distance = np.subtract.outer(np.arange(6), np.arange(6))
    added = added_to_logits(LayerKind(make_position("alibi", **sizes)), 6)
    np.testing.assert_allclose(
        added, -np.asarray(alibi_slopes(2))[:, None, None] * distance, rtol=1e-5, atol=1e-6
    )
    turned = added_to_logits(LayerKind(make_position("rotary", **sizes)), 6)
    np.testing.assert_allclose(np.diagonal(turned, axis1=1, axis2=2), 0.0, atol=1e-5)
    np.testing.assert_allclose(turned, np.swapaxes(turned, 1, 2), atol=1e-5)
    assert (turned[:, 3, 0] < -1e-3).all(), (
        "a turned key has a smaller product with the same content"
    )
    assert added_to_logits(LayerKind(make_position("sinusoidal", **sizes)), 6) is None


def test_layers_under_a_window_show_its_keys_alone(added_to_logits) -> None:
    sizes = {"num_heads": 2, "head_dim": 4, "width": 8, "train_length": 2}
    distance = np.subtract.outer(np.arange(6), np.arange(6))
    added = added_to_logits(LayerKind(make_position("none", **sizes), window=3), 6)
    np.testing.assert_array_equal(np.isnan(added[0]), np.abs(distance) >= 3)
    assert np.nanmax(np.abs(added)) == 0
    grown = added_to_logits(LayerKind(make_position("none", **sizes), logit_scale="llama4"), 6)
    factor = 0.1 * np.log((np.arange(6) + 1) // 2 + 1)
    np.testing.assert_allclose(grown, grown[:, 5:] / factor[5] * factor[:, None], atol=1e-5)


def test_a_config_is_drawn_by_kinds_of_layers(run_script, tmp_path) -> None:
    config = SCRIPT.parent.parent / "configs" / "rnope_swa.py"
    result = run_script(SCRIPT, f"--config={config}", "--length=6", f"--output_dir={tmp_path}")
    assert result.stdout.splitlines() == [
        f"layers_0_1_2: {tmp_path}/layers_0_1_2.png",
        "layers_3: adds nothing to the logits itself",
    ]
    refused = run_script(SCRIPT, f"--config={config}", "--heads=2", "--nocausal", code=1)
    assert refused.stderr.startswith("error: --config says all of --heads, --causal; leave out")
