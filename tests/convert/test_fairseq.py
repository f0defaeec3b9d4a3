"""A fairseq checkpoint read by PyTorch: settings of other names, and every tensor once in its
place.
"""

import argparse
import dataclasses
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import read_config
from alibi.convert.fairseq import architecture, read_checkpoint, read_settings, to_params
from alibi.extras import MissingPackageError
from alibi.model.decoder import build_model
from configs import wikitext103

DATA = pathlib.Path(__file__).parents[1] / "data"
LAYER = "decoder.layers.1"
WORDS = "decoder.embed_tokens.embeddings"


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is an extra of the project: --extra=torch")


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    with np.load(DATA / "trajectory.npz") as file:
        return {
            name.removeprefix("init/"): file[name]
            for name in file.files
            if name.startswith("init/")
        }


# Reading.


def test_settings_of_omegaconf_and_tensors_are_read(torch):
    content = read_checkpoint(DATA / "fairseq-tiny.pt")
    sizes = architecture(content["model"])
    assert (sizes.num_layers, sizes.width, sizes.feed_forward, sizes.vocab_size) == (2, 24, 40, 96)
    assert (sizes.cutoffs, sizes.adaptive_factor, sizes.final_norm) == ((40, 72), 2, False)
    found = read_settings(content, sizes)
    assert (found.num_heads, found.train_length, found.seed, found.updates) == (6, 16, 7, 150)
    assert found.position == "alibi"
    assert "max_tokens" in found.position_reason


def test_tensors_of_each_type_become_float32(torch, tmp_path):
    numbers = torch.arange(24).reshape(4, 6)
    saved = {
        kind: numbers.to(getattr(torch, kind))
        for kind in ("float64", "float32", "float16", "bfloat16", "int64")
    }
    saved |= {
        "turned": numbers.T[1:3],
        "part": numbers[1:, ::2],
        "parameter": torch.nn.Parameter(numbers.float()),
    }
    torch.save({"model": saved, "args": argparse.Namespace(arch="x")}, tmp_path / "x.pt")
    content = read_checkpoint(tmp_path / "x.pt")
    assert content["args"].arch == "x"
    for name, found in content["model"].items():
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, saved[name].detach().double().numpy(), err_msg=name)


class RunsCode:
    """Unpickling it calls os.system."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(torch, tmp_path):
    torch.save(
        {"model": {}, "extra_state": [RunsCode(f"touch {tmp_path}/made")]}, tmp_path / "x.pt"
    )
    with pytest.raises(ValueError, match=r"x\.pt can't be read .*: its pickle names posix\.system"):
        read_checkpoint(tmp_path / "x.pt")
    assert not (tmp_path / "made").exists()
    # here it does run: the pickle is one that works
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no checkpoint", "can't be read by torch.load"),
        ((DATA / "fairseq-tiny.pt").read_bytes()[:30_000], "can't be read"),
        (None, r"can't be read \(No such file"),
        ({"modal": {}}, "holds no tensors under `model`"),
        ([1], "holds no tensors under `model`"),
    ],
)
def test_each_unreadable_file_is_one_line(torch, tmp_path, content, message):
    if isinstance(content, bytes):
        (tmp_path / "x.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=message) as error:
        read_checkpoint(tmp_path / "x.pt")
    assert "\n" not in str(error.value)


def test_without_pytorch_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        MissingPackageError, match="checkpoint needs the package torch, which is not"
    ):
        read_checkpoint(DATA / "fairseq-tiny.pt")


# Settings.

ARGUMENTS = {
    "arch": "transformer_lm",
    "decoder_attention_heads": 6,
    "tokens_per_sample": 16,
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "adaptive_softmax_dropout": 0.2,
    "seed": 7,
}


def settings(tensors, **arguments):
    """Returns the settings of an older checkpoint: a Namespace of arguments."""
    content = {
        "args": argparse.Namespace(**ARGUMENTS | arguments),
        "optimizer_history": [{"num_updates": 150}],
    }
    return read_settings(content, architecture(tensors))


@pytest.mark.parametrize(
    ("arguments", "rate"),
    [
        ({"relu_dropout": 0.1}, 0.1),
        ({"activation_dropout": 0.2, "relu_dropout": 0.0}, 0.2),
        ({}, 0.0),
    ],
)
def test_the_arguments_of_older_versions(tensors, arguments, rate):
    found = settings(tensors, **arguments)
    assert found.rates == {
        "dropout": 0.3,
        "attention_dropout": 0.1,
        "activation_dropout": rate,
        "softmax_dropout": 0.2,
    }
    assert (found.num_heads, found.train_length, found.seed, found.updates) == (6, 16, 7, 150)
    assert (found.position, found.activation) == ("sinusoidal", "relu")
    assert settings(tensors, no_token_positional_embeddings=True).position == "none"


@pytest.mark.parametrize(
    ("theirs", "ours"), [("gelu", "gelu_exact"), ("gelu_fast", "gelu"), ("swish", "silu")]
)
def test_activations_have_other_names(tensors, theirs, ours):
    assert settings(tensors, activation_fn=theirs).activation == ours


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "transformer_wmt_en_de"}, "architecture transformer_wmt_en_de; only"),
        ({"base_layers": 2}, "trained with base_layers=2; only base_layers=0"),
        ({"activation_fn": "linear"}, "the activation linear; only relu, gelu, gelu_fast"),
        ({"dropout": None}, "its settings are not fairseq's"),
    ],
)
def test_other_settings_are_named(tensors, arguments, message):
    with pytest.raises(ValueError, match=message):
        settings(tensors, **arguments)
    with pytest.raises(ValueError, match="its settings are not fairseq's"):
        read_settings({"model": tensors}, architecture(tensors))


# Parameters.


def tied(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the same layers with a single matrix for all words and a norm at the end."""
    adaptive = ("decoder.embed_tokens", "decoder.adaptive_softmax")
    embedding = tensors["decoder.embed_tokens.embeddings.0.0.weight"]
    return {
        **{name: tensor for name, tensor in tensors.items() if not name.startswith(adaptive)},
        **dict.fromkeys(
            ("decoder.embed_tokens.weight", "decoder.output_projection.weight"), embedding
        ),
        **dict.fromkeys(
            ("decoder.layer_norm.weight", "decoder.layer_norm.bias"), np.ones(32, np.float32)
        ),
    }


@pytest.mark.parametrize("kind", ["adaptive", "tied"])
def test_the_tree_is_the_models_own(tensors, kind: str) -> None:
    tensors = tensors if kind == "adaptive" else tied(tensors)
    sizes = architecture(tensors)
    config = read_config(wikitext103.get_config())
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, **sizes.config, num_heads=8)
    )
    assert (sizes.vocab_size, sizes.cutoffs) == (
        (1000, (200, 500)) if kind == "adaptive" else (200, ())
    )
    model = build_model(config, sizes.vocab_size)
    needed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    found = to_params(tensors, num_heads=8)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), needed
    )
    taken = sum(leaf.size for leaf in jax.tree.leaves(found))
    buffers = ("version", "_float_tensor")
    there = {name: x.size for name, x in tensors.items() if not name.endswith(buffers)}
    copies = ("head.word_proj", "adaptive_softmax.tail", "output_projection")
    assert taken == sum(
        size for name, size in there.items() if not any(copy in name for copy in copies)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{LAYER}.fc2.bias": None}, f"no tensor {LAYER}.fc2.bias"),
        (
            {f"{LAYER}.fc2.bias": np.zeros(31)},
            rf"{LAYER}.fc2.bias of the checkpoint has shape \[31\].* \[32\]",
        ),
        ({f"{LAYER}.fc3.bias": np.zeros(32)}, f"no place for, such as {LAYER}.fc3.bias"),
        (
            {"decoder.adaptive_softmax.tail.0.0.weight": np.zeros((32, 8))},
            "tail.0.0.weight .* differs from the emb",
        ),
        ({f"{WORDS}.0.0.weight": np.zeros(5)}, f"no matrix {WORDS}.0.0.weight"),
        ({f"{WORDS}.0.0.weight": np.zeros((200, 4))}, "width 4 can't be divided"),
        (
            {f"{LAYER}.fc2.bias": np.full(32, np.nan)},
            f"{LAYER}.fc2.bias of the checkpoint has values that are not fin",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tensors, change: dict[str, np.ndarray | None], message: str
) -> None:
    changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        to_params(changed, num_heads=8)


def test_heads_that_do_not_divide_the_width_are_refused(tensors) -> None:
    with pytest.raises(ValueError, match="width 32 can't be divided into 6 heads"):
        to_params(tensors, num_heads=6)


def test_features_and_log_probabilities_are_those_of_the_papers_code(
    torch, shared_dir: pathlib.Path
) -> None:
    """A batch of a trained checkpoint; 2e-4 nats are asked for, 1e-5 found."""
    with np.load(shared_dir / "oracle" / "expected.npz") as file:
        expected = {name: file[name] for name in file.files if name.startswith("batch/")}
    tensors = read_checkpoint(shared_dir / "oracle" / "checkpoint.pt")["model"]
    sizes = architecture(tensors)
    config = read_config(wikitext103.get_config("position=alibi"))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes.config))
    model = build_model(config, sizes.vocab_size)

    @jax.jit
    def compute(params, inputs, targets):
        variables = {"params": params}
        features = model.apply(variables, inputs, method="features")
        logits = model.apply(
            variables, features, method=lambda module, x: module.vocabulary.logits(x)
        )
        return (
            features,
            logits[..., :500],
            model.apply(variables, inputs, targets, method="token_nll"),
        )

    found = compute(
        to_params(tensors, num_heads=8), expected["batch/inputs"], expected["batch/targets"]
    )
    names = ("batch/features", "batch/log_probs_first_500", "batch/log_prob_of_target")
    for name, value in zip(names, (*found[:2], -found[2]), strict=True):
        np.testing.assert_allclose(value, expected[name], atol=1e-5, rtol=1e-5, err_msg=name)
