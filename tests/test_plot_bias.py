"""The script which draws the additions of position methods to the logits."""

import importlib.util
import pathlib

import numpy as np
import pytest
from absl import flags

from alibi import alibi_slopes
from alibi.cli import command_line
from alibi.config import load_config
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
    assert result.returncode == 0, result.stderr
    drawn, nothing, also = result.stdout.splitlines()
    assert (drawn, also) == (f"t5: {tmp_path}/t5.png", f"fox: {tmp_path}/fox.png")
    assert nothing == "none: adds nothing to the logits itself"
    assert all(
        (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("t5", "fox")
    )
    refused = [argument.replace("none", "nune") for argument in arguments]
    result = run_script(SCRIPT, *refused)
    assert result.returncode == 1
    assert result.stderr.startswith("error: unknown position method 'nune'; did you mean 'none'?")


def test_a_length_that_a_method_is_not_defined_for_is_not_drawn(run_script, tmp_path) -> None:
    sizes = [
        "--heads=2",
        "--head_dim=4",
        "--train_length=4",
        "--length=65",
        f"--output_dir={tmp_path / 'out'}",
    ]
    result = run_script(SCRIPT, "--methods=learned", *sizes)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(
        "error: position method Learned has 4 positions and got a sequence of 65 "
    )
    assert not (tmp_path / "out").exists()


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("plot_bias", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    before = set(flags.FLAGS)
    monkeypatch.setattr(command_line, "own_flags", lambda module: None)  # they are there now
    spec.loader.exec_module(module)
    flags.FLAGS(["plot_bias", "--length=6"])
    yield module
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)


def test_the_drawing_is_the_addition(script) -> None:
    """The bias of ALiBi; for rotary embeddings the change of a product of equal features by
    turning.
    """
    sizes = {"num_heads": 2, "head_dim": 4, "width": 8, "train_length": 6}
    distance = np.subtract.outer(np.arange(6), np.arange(6))
    added = script.added_to_logits(LayerKind(make_position("alibi", **sizes)))
    np.testing.assert_allclose(
        added, -np.asarray(alibi_slopes(2))[:, None, None] * distance, rtol=1e-5, atol=1e-6
    )
    turned = script.added_to_logits(LayerKind(make_position("rotary", **sizes)))
    np.testing.assert_allclose(np.diagonal(turned, axis1=1, axis2=2), 0.0, atol=1e-5)
    np.testing.assert_allclose(turned, np.swapaxes(turned, 1, 2), atol=1e-5)
    assert (turned[:, 3, 0] < -1e-3).all(), (
        "a turned key has a smaller product with the same content"
    )
    assert script.added_to_logits(LayerKind(make_position("sinusoidal", **sizes))) is None


def test_layers_under_a_window_show_its_keys_alone(script) -> None:
    sizes = {"num_heads": 2, "head_dim": 4, "width": 8, "train_length": 2}
    distance = np.subtract.outer(np.arange(6), np.arange(6))
    added = script.added_to_logits(LayerKind(make_position("none", **sizes), window=3))
    np.testing.assert_array_equal(np.isnan(added[0]), np.abs(distance) >= 3)
    assert np.nanmax(np.abs(added)) == 0
    grown = script.added_to_logits(LayerKind(make_position("none", **sizes), logit_scale="llama4"))
    factor = 0.1 * np.log((np.arange(6) + 1) // 2 + 1)
    np.testing.assert_allclose(grown, grown[:, 5:] / factor[5] * factor[:, None], atol=1e-5)


def test_a_config_is_drawn_by_kinds_of_layers(run_script, tmp_path) -> None:
    config = SCRIPT.parent.parent / "configs" / "rnope_swa.py"
    result = run_script(SCRIPT, f"--config={config}", "--length=6", f"--output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"layers_0_1_2: {tmp_path}/layers_0_1_2.png",
        "layers_3: adds nothing to the logits itself",
    ]
    refused = run_script(SCRIPT, f"--config={config}", "--heads=2", "--nocausal")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: --config says all of --heads, --causal; leave out")


def test_a_config_that_sees_both_sides_is_drawn_so(script, monkeypatch, tmp_path) -> None:
    drawn = []

    def bias_figure(name, added, *, causal):
        drawn.append((name, added, causal))

    monkeypatch.setattr("alibi.reporting.figures.bias_figure", bias_figure)
    monkeypatch.setattr("alibi.reporting.charts.png", lambda figure: b"")
    config = SCRIPT.parent.parent / "configs" / "mlm.py"
    for words in (("objective=next_token", True), ("objective=masked", False)):
        flags.FLAGS["config"].value = load_config(f"{config}:{words[0]}")
        flags.FLAGS["output_dir"].value = str(tmp_path)
        script.main()
        (name, added, causal) = drawn.pop()
        assert (name, causal) == ("alibi", words[1])
        np.testing.assert_array_equal(np.isfinite(added), True)
    distance = np.abs(np.subtract.outer(np.arange(6), np.arange(6)))
    slopes = np.asarray(alibi_slopes(4))[:, None, None]
    np.testing.assert_allclose(added, -slopes * distance, rtol=1e-5, atol=1e-6)
