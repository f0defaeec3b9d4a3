"""The chunked loss equals the whole loss, in value and gradient, in a fraction of its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alibi.config import make_config, replaced
from alibi.model.decoder import build_model
from alibi.model.loss import Head, TokenLoss, cross_entropy, training_loss
from alibi.numerics.products import Products
from alibi.optimizers import make_optimizer
from alibi.parallel.sharding import batch_sharding, make_mesh
from alibi.runs.identity import differing
from alibi.training.setup import check_config
from alibi.training.step import abstract_state, initial_state, make_train_step
from tests.programs import AS_USERS
from tests.refusals import assert_refused


def brier(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Another loss, which counts what it is given for negative targets too (Brier 1950)."""
    one_hot = jax.nn.one_hot(targets, logits.shape[-1])
    return ((jax.nn.softmax(logits) - one_hot) ** 2).sum(-1)


def head(chunk_tokens: int, products: str = "auto") -> Head:
    return Head(jnp.float32, Products.of(products, jnp.float32), chunk_tokens, None)


@pytest.mark.parametrize("chunk_tokens", [1, 6, 1000])
@pytest.mark.parametrize("loss", [cross_entropy, brier])
@pytest.mark.parametrize("summed", [False, True])
def test_chunks_do_not_change_value_or_gradient(
    chunk_tokens: int, loss: TokenLoss, summed: bool
) -> None:
    """Any loss comes with the cross entropy, which has no gradient beside another or a sum."""
    rng = np.random.default_rng(0)
    features, embedding = (
        rng.standard_normal(shape, np.float32) for shape in ((2, 11, 8), (20, 8))
    )
    numbers = rng.integers(0, 20, (2, 11))
    numbers[1, 9:] = -1
    targets = jnp.asarray(numbers)

    def chunked(features: jax.Array, embedding: jax.Array) -> tuple[jax.Array, jax.Array]:
        scaled = 3 * embedding  # an array that the function of a chunk closes over
        losses = head(chunk_tokens).token_losses
        return losses(lambda x: x @ scaled.T, features, targets, loss, summed)

    def whole(features: jax.Array, embedding: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = 3 * (features @ embedding.T)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        nll = jnp.where(targets < 0, 0.0, -picked)
        of_loss = jnp.where(targets < 0, 0.0, loss(logits, targets))
        fixed = nll if loss is cross_entropy and not summed else jax.lax.stop_gradient(nll)
        return (of_loss.sum(), fixed.sum()) if summed else (of_loss, fixed)

    def both(*arrays: jax.Array) -> list[tuple]:
        ways = [jax.vjp(way, *arrays) for way in (chunked, whole)]
        return [
            (values, back((3 * jnp.ones_like(values[0]), 5 * jnp.ones_like(values[1]))))
            for values, back in ways
        ]

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        *jax.jit(both)(features, embedding),
    )
    program = str(jax.make_jaxpr(jax.grad(lambda *x: chunked(*x)[0].sum()))(features, embedding))
    assert ("f32[2,11,20]" in program) == (chunk_tokens == 1000), "all logits at a time"


def test_chunks_have_forward_mode_and_a_sum_computes_no_logits_again() -> None:
    rng = np.random.default_rng(0)
    features, tangent = rng.standard_normal((2, 2, 11, 8), np.float32)
    embedding = rng.standard_normal((20, 8), np.float32)
    targets = jnp.asarray(rng.integers(0, 20, (2, 11)))

    def mean(features: jax.Array) -> jax.Array:
        losses = head(6, "plain").token_losses
        each, _ = losses(lambda x: x @ embedding.T, features, targets)
        total, _ = losses(lambda x: x @ embedding.T, features, targets, summed=True)
        return each.mean() + total / 22

    _, forward = jax.jit(lambda *x: jax.jvp(mean, *((one,) for one in x)))(features, tangent)
    backward = (jax.jit(jax.grad(mean))(features) * tangent).sum()
    np.testing.assert_allclose(forward, backward, rtol=1e-5)

    def total(*arrays: jax.Array) -> jax.Array:
        return head(6).token_losses(lambda x: x @ arrays[1].T, arrays[0], targets, summed=True)[0]

    program = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(features, embedding))
    assert program.count(" dot_general[") == 3, "logits, and the gradients of both factors"


@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.1, 0.0), (0.0, 0.2), (0.1, 0.2)])
def test_z_loss_and_label_smoothing_are_their_formulas_in_float64(z_loss, smoothing) -> None:
    """Values, and gradients of the logits x: (1 + 2 z log Z) softmax(x) - labels."""
    rng = np.random.default_rng(0)
    x, targets = rng.standard_normal((3, 5, 48)).astype(np.float32), rng.integers(0, 48, (3, 5))
    loss = training_loss(
        make_config(**{"train.z_loss": z_loss, "train.label_smoothing": smoothing})
    )
    values, back = jax.vjp(lambda x: loss(x, jnp.asarray(targets)), jnp.asarray(x))
    labels = (1 - smoothing) * np.eye(48)[targets] + smoothing / 48
    log_z = np.log(np.exp(x, dtype=np.float64).sum(-1, keepdims=True))
    expected = (labels * (log_z - x)).sum(-1) + z_loss * log_z[..., 0] ** 2
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-6)
    gradient = (1 + 2 * z_loss * log_z) * np.exp(x - log_z) - labels
    np.testing.assert_allclose(*back(jnp.ones((3, 5))), gradient, rtol=0, atol=1e-6)


def test_training_follows_its_loss_and_reports_the_cross_entropy(tiny_config) -> None:
    """In chunks, with the vocabulary and the batch split over devices; the last row is short."""
    config = tiny_config(
        model__num_layers=1, model__logits_chunk=8, mesh__data=2, mesh__tensor=2,
        train__z_loss=0.1, train__label_smoothing=0.2,
    )  # fmt: skip
    mesh = make_mesh(config.mesh, jax.devices()[:4])
    model = build_model(config, 48, sharding=batch_sharding(mesh))
    optimizer, loss = optax.sgd(1.0), training_loss(config)
    state = initial_state(model, optimizer, mesh, seed=0)
    params = jax.device_get(state.params)
    tokens = np.random.default_rng(0).integers(0, 48, (4, 17), dtype=np.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
    targets[-1, 5:] = -1
    step = make_train_step(model, optimizer, seed=0, loss=loss)
    state, metrics = step(state, *(x.reshape(2, 2, 16) for x in (inputs, targets)))

    def mean_loss(params: dict) -> tuple[jax.Array, jax.Array]:
        logits = build_model(config, 48).apply({"params": params}, jnp.asarray(inputs))
        labels = optax.smooth_labels(jax.nn.one_hot(targets, 48), 0.2)
        losses = optax.softmax_cross_entropy(logits, labels)
        losses += 0.1 * jax.nn.logsumexp(logits, axis=-1) ** 2
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, np.maximum(targets, 0))
        return losses.mean(where=targets >= 0), nll.sum(where=targets >= 0)

    gradient, nll = jax.jit(jax.grad(mean_loss, has_aux=True))(params)
    np.testing.assert_allclose(metrics["nll_nats"], nll, rtol=1e-6)
    jax.tree.map(
        lambda new, old, change: np.testing.assert_allclose(old - new, change, rtol=0, atol=1e-6),
        jax.device_get(state.params), params, gradient,
    )  # fmt: skip
    assert differing(config, replaced(config, {"train.z_loss": 0})) == {"train.z_loss": (0.1, 0.0)}
    assert_refused(
        r"z_loss=0\.1", check_config, replaced(config, {"model.embedding": "adaptive"}), mesh
    )


def test_huge_logits_stay_finite() -> None:
    nll = jax.jit(cross_entropy)(np.asarray([[[1e4, -1e4, 0.0]]]), np.asarray([[1]]))
    np.testing.assert_allclose(nll, 2e4)


@pytest.mark.slow
def test_a_step_on_16k_tokens_with_a_word_vocabulary_fits_in_3_gib(tiny_config) -> None:
    """All logits of 16,384 tokens at 33,280 words would alone be 2 GiB, and their gradient as much
    again.
    """
    config = tiny_config(
        length=128, train__batch_tokens=16_384, model__width=128, model__num_heads=8, mesh__data=1
    )
    model = build_model(config, vocab_size=33_280)
    optimizer, _ = make_optimizer(config.optimizer, config.train.steps)
    state = abstract_state(model, optimizer, make_mesh(config.mesh, jax.devices()[:1]))
    batch = jax.ShapeDtypeStruct((1, 128, 128), jnp.int32)
    memory = (
        make_train_step(model, optimizer, 0)
        .lower(state, batch, batch)
        .compile(compiler_options=AS_USERS)
        .memory_analysis()
    )
    total = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    assert total < 3 * 2**30, "the logits of a chunk of 2,048 tokens are 0.25 GiB"
