"""The PyTorch peer of the paper's model computes what the project's model does, or its speed would
mean nothing.
"""

import importlib

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import replaced
from alibi.model.decoder import build_model

pytestmark = pytest.mark.slow

VOCABULARY = 300


@pytest.fixture
def peer():
    pytest.importorskip(
        "torch", reason="PyTorch, which is no requirement of the project, is not installed"
    )
    return importlib.import_module("benchmarks.torch_peer")


def test_the_peer_has_the_nll_of_the_papers_model(peer):
    import torch

    config = importlib.import_module("benchmarks.evaluate").small_config()
    sizes = {
        "num_layers": 2,
        "width": 32,
        "num_heads": 4,
        "feed_forward": 48,
        "cutoffs": (100, 200),
    }
    config = replaced(config, {f"model.{key}": size for key, size in sizes.items()})
    model = build_model(config, VOCABULARY)
    length, stride = 16, 4
    tokens = (
        np.random.default_rng(0).integers(0, VOCABULARY, length + 1 + 5 * stride).astype(np.int32)
    )
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::stride]
    inputs, targets = jnp.asarray(windows[:, :-1]), jnp.asarray(windows[:, 1:])
    params = jax.jit(model.init)(jax.random.key(0), inputs)["params"]
    expected = jax.jit(
        lambda params: model.apply({"params": params}, inputs, targets, method="token_nll")
    )(params)

    decoder = peer.PaperDecoder(config, VOCABULARY)
    _copy(flax.traverse_util.flatten_dict(params, sep="/"), decoder)
    # the last batch is a smaller one
    score = peer.make_scorer(decoder, tokens, length, stride, rows=4)
    np.testing.assert_allclose(score(), expected[:, -stride:], atol=2e-5)
    batch = [torch.from_numpy(np.array(x)).long() for x in (inputs, targets)]
    np.testing.assert_allclose(decoder(*batch).item(), expected.mean(), rtol=1e-5)
    assert sum(x.numel() for x in decoder.parameters()) == sum(
        x.size for x in jax.tree.leaves(params)
    )


def _copy(params, decoder):
    """The project's parameters, whose matrices are [inputs, outputs], to the peer, where they are
    turned.
    """
    import torch

    def fill(parameter, values):
        parameter.data.copy_(torch.from_numpy(np.array(values)).reshape(parameter.shape))

    def fill_layer(layer, prefix, inputs):
        fill(layer.weight, params[f"{prefix}/kernel"].reshape(inputs, -1).T)
        fill(layer.bias, params[f"{prefix}/bias"])

    for band, (words, projection) in enumerate(
        zip(decoder.words, decoder.projections, strict=True)
    ):
        fill(words.weight, params[f"adaptive/band_{band}/embedding"])
        fill(projection.weight, params[f"adaptive/band_{band}/kernel"].T)
    fill(decoder.clusters.weight, params["adaptive/clusters"].T)
    for number, layer in enumerate(decoder.layers):
        for name in ("query", "key", "value", "out"):
            fill_layer(getattr(layer, name), f"layers_{number}/attention/{name}", decoder.width)
        fill_layer(layer.up, f"layers_{number}/up", decoder.width)
        fill_layer(layer.down, f"layers_{number}/down", layer.up.out_features)
        for name in ("attention_norm", "feed_forward_norm"):
            fill(getattr(layer, name).weight, params[f"layers_{number}/{name}/scale"])
            fill(getattr(layer, name).bias, params[f"layers_{number}/{name}/bias"])
