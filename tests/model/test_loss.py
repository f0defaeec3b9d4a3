"""The chunked loss equals the whole loss, in value and gradient, in a fraction of its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.cpu.products import Products
from alibi.model.decoder import build_model
from alibi.model.loss import Head, TokenLoss, cross_entropy
from alibi.parallel.sharding import make_mesh
from alibi.training.optimizer import make_optimizer
from alibi.training.step import abstract_state, make_train_step
from tests.programs import AS_USERS


def brier(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Another loss, which counts what it is given for negative targets too (Brier 1950)."""
    one_hot = jax.nn.one_hot(targets, logits.shape[-1])
    return ((jax.nn.softmax(logits) - one_hot) ** 2).sum(-1)


def head(chunk_tokens: int) -> Head:
    return Head(jnp.float32, Products.of("plain", jnp.float32), chunk_tokens, None)


@pytest.mark.parametrize("chunk_tokens", [1, 6, 1000])
@pytest.mark.parametrize("loss", [cross_entropy, brier])
def test_chunks_do_not_change_value_or_gradient(chunk_tokens: int, loss: TokenLoss) -> None:
    """Any loss comes with the cross entropy, which has no gradient beside another."""
    rng = np.random.default_rng(0)
    features, embedding = (
        rng.standard_normal(shape, np.float32) for shape in ((2, 11, 8), (20, 8))
    )
    numbers = rng.integers(0, 20, (2, 11))
    numbers[1, 9:] = -1
    targets = jnp.asarray(numbers)

    def chunked(features: jax.Array, embedding: jax.Array) -> tuple[jax.Array, jax.Array]:
        return head(chunk_tokens).token_losses(lambda x: x @ embedding.T, features, targets, loss)

    def whole(features: jax.Array, embedding: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = features @ embedding.T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        nll = jnp.where(targets < 0, 0.0, -picked)
        if loss is cross_entropy:
            return nll, nll
        return jnp.where(targets < 0, 0.0, loss(logits, targets)), jax.lax.stop_gradient(nll)

    def both(*arrays: jax.Array) -> list[tuple]:
        ways = [jax.vjp(way, *arrays) for way in (chunked, whole)]
        return [(values, back(jax.tree.map(jnp.ones_like, values))) for values, back in ways]

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        *jax.jit(both)(features, embedding),
    )
    program = str(jax.make_jaxpr(jax.grad(lambda *x: chunked(*x)[0].sum()))(features, embedding))
    assert ("f32[2,11,20]" in program) == (chunk_tokens == 1000), "all logits at a time"


def test_chunks_have_forward_mode_and_the_backward_pass_sums_no_exponentials_again() -> None:
    rng = np.random.default_rng(0)
    features, tangent = rng.standard_normal((2, 2, 11, 8), np.float32)
    embedding = rng.standard_normal((20, 8), np.float32)
    targets = jnp.asarray(rng.integers(0, 20, (2, 11)))

    def mean(features: jax.Array) -> jax.Array:
        return head(6).token_losses(lambda x: x @ embedding.T, features, targets)[0].mean()

    _, forward = jax.jit(lambda *x: jax.jvp(mean, *((one,) for one in x)))(features, tangent)
    backward = (jax.jit(jax.grad(mean))(features) * tangent).sum()
    np.testing.assert_allclose(forward, backward, rtol=1e-5)
    program = str(jax.make_jaxpr(jax.grad(mean))(features))
    assert program.count("reduce_max") == 1, "of the forward pass"


def test_huge_logits_stay_finite() -> None:
    nll = jax.jit(cross_entropy)(np.asarray([[[1e4, -1e4, 0.0]]]), np.asarray([[1]]))
    np.testing.assert_allclose(nll, 2e4)


def test_a_step_on_16k_tokens_with_a_word_vocabulary_fits_in_4_gib(tiny_config) -> None:
    """All logits of 16,384 tokens at 33,280 words would alone be 2 GiB, and their gradient as much
    again.
    """
    config = tiny_config(
        length=128, train__batch_tokens=16_384, model__width=128, model__num_heads=8, mesh__data=1
    )
    model = build_model(config, vocab_size=33_280)
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    state = abstract_state(model, optimizer, mesh)
    batch = jax.ShapeDtypeStruct((1, 128, 128), jnp.int32)
    memory = (
        make_train_step(model, optimizer, 0)
        .lower(state, batch, batch)
        .compile(compiler_options=AS_USERS)
        .memory_analysis()
    )
    total = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    assert total < 4 * 2**30
    assert total < 3 * 2**30, "the logits of a chunk of 2,048 tokens are 0.25 GiB"
