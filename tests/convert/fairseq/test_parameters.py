"""The paper's parameters in this project's tree: every tensor once and in its place, and what they then compute."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.convert.fairseq.archive import Archive
from alibi.convert.fairseq.parameters import architecture, to_params
from alibi.model.decoder import build_model
from configs import wikitext103

SMALL = pathlib.Path(__file__).parents[2] / "data" / "trajectory.npz"
LAYER = "decoder.layers.1"
WORDS = "decoder.embed_tokens.embeddings"


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    with np.load(SMALL) as file:
        return {name.removeprefix("init/"): file[name] for name in file.files if name.startswith("init/")}


def tied(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same layers with one matrix for all words and a norm at the end."""
    adaptive = ("decoder.embed_tokens", "decoder.adaptive_softmax")
    embedding = tensors["decoder.embed_tokens.embeddings.0.0.weight"]
    return {
        **{name: tensor for name, tensor in tensors.items() if not name.startswith(adaptive)},
        **dict.fromkeys(("decoder.embed_tokens.weight", "decoder.output_projection.weight"), embedding),
        **dict.fromkeys(("decoder.layer_norm.weight", "decoder.layer_norm.bias"), np.ones(32, np.float32)),
    }


@pytest.mark.parametrize("kind", ["adaptive", "tied"])
def test_the_tree_is_the_models_own(tensors, kind: str) -> None:
    tensors = tensors if kind == "adaptive" else tied(tensors)
    sizes = architecture(tensors)
    config = wikitext103.get_config()
    config.model.update(sizes.config | {"num_heads": 8})
    assert (sizes.vocab_size, sizes.cutoffs) == ((1000, (200, 500)) if kind == "adaptive" else (200, ()))
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
    assert taken == sum(size for name, size in there.items() if not any(copy in name for copy in copies))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{LAYER}.fc2.bias": None}, f"no tensor {LAYER}.fc2.bias"),
        ({f"{LAYER}.fc2.bias": np.zeros(31)}, rf"{LAYER}.fc2.bias of the checkpoint has shape \[31\].* \[32\]"),
        ({f"{LAYER}.fc3.bias": np.zeros(32)}, f"no place for: {LAYER}.fc3.bias"),
        ({f"encoder.{i}": np.zeros(1) for i in range(5)}, "encoder.0, encoder.1, encoder.2 and 2 more"),
        ({"decoder.adaptive_softmax.tail.0.0.weight": np.zeros((32, 8))}, "tail.0.0.weight .* differs from the emb"),
        ({"decoder.embed_tokens.embeddings.0.0.weight": np.zeros(5)}, r"has shape \[5\]; a matrix is needed"),
        ({"decoder.embed_tokens.embeddings.0.0.weight": np.zeros((200, 4))}, r"are \[4, 8, 2\] wide, and each must"),
        ({f"{LAYER}.fc2.bias": np.full(32, np.nan)}, f"{LAYER}.fc2.bias of the checkpoint has 32 of 32 values that"),
        ({f"{WORDS}.1.0.weight": np.full((300, 8), np.inf)}, "1.0.weight of the checkpoint has 2,400 of 2,400 values"),
    ],
)
def test_what_does_not_fit_is_named(tensors, change: dict[str, np.ndarray | None], message: str) -> None:
    changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        to_params(changed, num_heads=8)


def test_heads_that_do_not_divide_the_width_are_refused(tensors) -> None:
    with pytest.raises(ValueError, match="width 32 can't be divided into 6 heads"):
        to_params(tensors, num_heads=6)


def test_features_and_log_probabilities_are_those_of_the_papers_code(shared_dir: pathlib.Path) -> None:
    """A batch of a trained checkpoint; 2e-4 nats are asked for, 1e-5 found."""
    with np.load(shared_dir / "oracle" / "expected.npz") as file:
        expected = {name: file[name] for name in file.files if name.startswith("batch/")}
    with Archive(shared_dir / "oracle" / "checkpoint.pt") as archive:
        tensors = {name: tensor.read() for name, tensor in archive.content["model"].items()}
    sizes = architecture(tensors)
    config = wikitext103.get_config("position=alibi")
    config.model.update(sizes.config)
    model = build_model(config, sizes.vocab_size)

    @jax.jit
    def compute(params: dict, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        variables = {"params": params}
        features = model.apply(variables, inputs, method="features")
        logits = model.apply(variables, features, method=lambda module, x: module.vocabulary.logits(x))
        return features, logits[..., :500], model.apply(variables, inputs, targets, method="token_nll")

    found = compute(to_params(tensors, num_heads=8), expected["batch/inputs"], expected["batch/targets"])
    names = ("batch/features", "batch/log_probs_first_500", "batch/log_prob_of_target")
    for name, value in zip(names, (*found[:2], -found[2]), strict=True):
        np.testing.assert_allclose(value, expected[name], atol=1e-5, rtol=1e-5, err_msg=name)
