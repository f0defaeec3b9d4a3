"""The peers of a training step make this project's updates, and the paper's model in PyTorch has its NLL,
or their speed would mean nothing.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import make_config, replaced
from alibi.model.decoder import build_model
from alibi.parallel.sharding import make_mesh
from alibi.training.step import initial_state
from tests.torch_states import fused_state, paper_state

pytestmark = pytest.mark.slow

VOCABULARY, UPDATES = 40, 3
# Three heads, since slopes of a power of two follow another rule. The norm is clipped.
KEYS = (
    "length=16,train.batch_tokens=64,mesh.data=1,model.num_layers=2,model.width=24,model.num_heads=3,"
    "model.feed_forward=48,optimizer.schedule=constant,optimizer.warmup_steps=0,"
    "optimizer.learning_rate=0.01,optimizer.clip_norm=0.5"
)


def load(name):
    return importlib.import_module(f"benchmarks.{name}")


@functools.cache
def of_project(position):
    """The config, the batch, initial parameters, and the losses of some updates on the batch."""
    contenders, config = load("training_contenders"), make_config(f"{KEYS},position={position}")
    mesh = make_mesh(config.mesh)
    batch = contenders.make_batch(config, VOCABULARY)
    model, optimizer, shape, step = contenders.compile_step(config, VOCABULARY, mesh)
    state = initial_state(model, optimizer, mesh, 0)
    params, losses = jax.tree.map(np.array, state.params), []
    for _ in range(UPDATES):
        state, metrics = step(state, *(x.reshape(shape.shape) for x in batch))
        losses.append(float(metrics["nll_nats"] / metrics["tokens"]))
        assert metrics["gradient_norm"] > config.optimizer.clip_norm
    assert losses[-1] < losses[0] - 0.1
    return config, batch, params, losses


@pytest.mark.parametrize(("attention", "position"), [("sdpa", "alibi"), ("rotary", "rotary")])
def test_pytorch_makes_the_same_updates(attention, position):
    """Clipping, moments and decay too, since each loss follows from the updates before it."""
    pytest.importorskip("torch")
    config, batch, params, losses = of_project(position)
    train_step, decoder = load("torch_peer").make_train_step(
        config, VOCABULARY, batch, compiled=False, attention=attention
    )
    decoder.load_state_dict(fused_state(params, config))
    assert_near([train_step() for _ in range(UPDATES)], losses)
    sizes = [parameter.numel() for parameter in decoder.parameters()]
    assert sum(sizes) == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="compiling takes 20 s, for a peer on GPUs: bash tools/more_tests.sh gpu",
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch's own compiler
def test_flex_attention_has_the_same_loss():
    """In the first update alone, as FlexAttention has no backward pass on CPUs."""
    torch = pytest.importorskip("torch")
    config, batch, params, losses = of_project("alibi")
    _, decoder = load("torch_peer").make_train_step(
        config, VOCABULARY, batch, compiled=False, attention="flex"
    )
    decoder.load_state_dict(fused_state(params, config))
    with torch.no_grad():
        loss = decoder(*(torch.from_numpy(x).long() for x in batch))
    np.testing.assert_allclose(loss, losses[0], rtol=1e-5)


def assert_near(got, losses):
    """Compares losses: of the same parameters to 1e-5. Updates magnify the rounding, by the processor."""
    np.testing.assert_allclose(got[0], losses[0], rtol=1e-5)
    np.testing.assert_allclose(got, losses, rtol=1e-4)


@pytest.mark.parametrize("own", [False, True])
def test_flax_makes_the_same_updates(own):
    """With Flax's own attention under a mask, too, as it is compiled for TPUs."""
    contenders = load("training_contenders")
    config, batch, params, losses = of_project("none")
    attention = None if own else contenders.causal_attention
    model, optimizer, update = contenders.flax_program(config, VOCABULARY, attention)
    params = params | {"embedding": {"embedding": params["embedding"]}}
    assert jax.tree.map(np.shape, params) == jax.tree.map(
        np.shape, jax.eval_shape(model.init, jax.random.key(0), batch[0])["params"]
    )
    both, got = (params, optimizer.init(params)), []
    inputs, targets = map(jnp.asarray, batch)
    for _ in range(UPDATES):
        both, loss = jax.jit(update)(both, inputs, targets)
        got.append(loss)
    assert_near(got, losses)


def test_the_peer_has_the_nll_of_the_papers_model():
    torch = pytest.importorskip("torch")
    sizes = {"num_layers": 2, "width": 32, "num_heads": 4, "feed_forward": 48}
    sizes["cutoffs"] = (100, 200)
    config = load("evaluate").small_config()
    config = replaced(config, {f"model.{key}": size for key, size in sizes.items()})
    model, random, length, stride = build_model(config, 300), np.random.default_rng(0), 16, 4
    tokens = random.integers(0, 300, length + 1 + 5 * stride).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::stride]
    inputs, targets = jnp.asarray(windows[:, :-1]), jnp.asarray(windows[:, 1:])
    params = jax.jit(model.init)(jax.random.key(0), inputs)["params"]
    nll_of = jax.jit(functools.partial(model.apply, method="token_nll"))
    expected = nll_of({"params": params}, inputs, targets)
    peer = load("torch_peer")
    decoder = peer.PaperDecoder(config, 300)
    decoder.load_state_dict(paper_state(params, config))  # of all its parameters
    # the last batch is a smaller one
    score = peer.make_scorer(decoder, tokens, length, stride, rows=4)
    np.testing.assert_allclose(score(), expected[:, -stride:], atol=2e-5)
    batch = [torch.from_numpy(np.array(x)).long() for x in (inputs, targets)]
    np.testing.assert_allclose(decoder(*batch).item(), expected.mean(), rtol=1e-5)
