"""Adaptive input and softmax against dense ones of the same weights, whatever words there are and
however they lie.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import ModelConfig, read_config
from alibi.model.adaptive import check_bands
from alibi.model.decoder import DecoderLM, build_model, count_parameters
from alibi.model.loss import selected_token_nll
from configs import wikitext103
from tests.programs import AS_USERS
from tests.refusals import assert_refused

VOCABULARY, CUTOFFS, WIDTH = 60, (20, 35), 16
ENDS = (*CUTOFFS, VOCABULARY)


def make(tiny_config, **overrides: object) -> DecoderLM:
    config = tiny_config(
        model__embedding="adaptive", model__cutoffs=CUTOFFS, model__num_layers=1, **overrides
    )
    return build_model(config, VOCABULARY)


@pytest.fixture(scope="module")
def params() -> dict:
    """Parameters of the bands, larger than initial values, so no softmax is flat."""
    rng = np.random.default_rng(0)
    adaptive: dict = {"clusters": rng.normal(size=(WIDTH, 2))}
    for band, (start, end) in enumerate(zip((0, *CUTOFFS), ENDS, strict=True)):
        shape = (end - start, WIDTH // 4**band)
        adaptive[f"band_{band}"] = {
            "embedding": rng.normal(size=shape),
            "kernel": rng.normal(size=(shape[1], WIDTH)),
        }
    return {"adaptive": jax.tree.map(lambda leaf: leaf.astype(np.float32), adaptive)}


@jax.jit
def dense_log_probs(params: dict, features: jax.Array) -> jax.Array:
    """log p of every word, by the two-step formula written out."""
    bands = [params["adaptive"][f"band_{i}"] for i in range(3)]
    head = jnp.concatenate([bands[0]["embedding"], params["adaptive"]["clusters"].T])
    head = jax.nn.log_softmax(features @ head.T)
    tails = [
        head[..., 19 + i, None]
        + jax.nn.log_softmax(features @ band["kernel"].T @ band["embedding"].T)
        for i, band in enumerate(bands)
        if i > 0
    ]
    return jnp.concatenate([head[..., :20], *tails], -1)


def texts() -> dict[str, np.ndarray]:
    """Returns targets [2, 150] at the bands' boundaries, with padding, and with several chunks of a
    tail.
    """
    rng = np.random.default_rng(1)
    mixed = rng.integers(0, VOCABULARY, (2, 150))
    mixed[0, :6] = [0, 19, 20, 34, 35, 59]
    mixed[1, -30:] = -1
    return {
        "mixed": mixed,
        "last band": rng.integers(35, 60, (2, 150)),
        "first band": rng.integers(0, 20, (2, 150)),
    }


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def nll(
    model: DecoderLM,
    params: dict,
    features: jax.Array,
    targets: jax.Array,
    deterministic: bool = True,
    rngs: dict | None = None,
) -> jax.Array:
    def of_vocabulary(module: DecoderLM) -> jax.Array:
        return module.vocabulary.token_losses(features, targets, deterministic=deterministic)[1]

    return model.apply({"params": params}, method=of_vocabulary, rngs=rngs)


def test_values_and_gradients_are_those_of_a_dense_softmax_for_any_words(
    tiny_config, params
) -> None:
    model = make(tiny_config)
    features, weights = normal(0, 2, 150, WIDTH), normal(1, 2, 150)

    traced = []

    def adaptive(
        params: dict, features: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        traced.append(targets)
        values = nll(model, params, features, targets)
        return (values * weights).sum(), values

    def dense(params: dict, features: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        picked = jnp.take_along_axis(
            dense_log_probs(params, features), jnp.maximum(targets, 0)[..., None], -1
        )[..., 0]
        values = jnp.where(targets < 0, 0.0, -picked)
        return (values * weights).sum(), values

    ours, theirs = (jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True)) for f in (adaptive, dense))
    for name, targets in texts().items():
        ((_, value), gradient), ((_, expected), expected_gradient) = (
            f(params, features, targets) for f in (ours, theirs)
        )
        np.testing.assert_allclose(value, expected, atol=2e-5, err_msg=name)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), gradient, expected_gradient
        )
    assert len(traced) == 1, "how many words a tail has must not be part of the program"


def test_log_probabilities_of_all_words_sum_to_one(tiny_config, params) -> None:
    model = make(tiny_config)
    features = normal(0, 2, 5, WIDTH)

    @jax.jit
    def logits(params: dict, features: jax.Array) -> jax.Array:
        return model.apply(
            {"params": params}, method=lambda module: module.vocabulary.logits(features)
        )

    log_probs = logits(params, features)
    np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(log_probs, dense_log_probs(params, features), atol=2e-5)


def test_inputs_are_the_projected_rows_of_their_band(tiny_config, params) -> None:
    model = make(tiny_config)
    words = jnp.arange(60)[None]
    embed = jax.jit(
        lambda p: model.apply({"params": p}, method=lambda m: m.vocabulary.embed(words))
    )(params)
    bands = params["adaptive"]
    rows = [bands[f"band_{i}"]["embedding"] @ bands[f"band_{i}"]["kernel"] for i in range(3)]
    np.testing.assert_allclose(np.asarray(embed)[0], np.concatenate(rows), atol=1e-5)


def test_dropout_acts_on_the_input_and_again_inside_the_tails(tiny_config, params) -> None:
    """Dropout leaves two values of a feature; inside a tail it drops again from the projection."""
    model = make(tiny_config, model__softmax_dropout=0.5)
    features = np.broadcast_to(np.eye(WIDTH, dtype=np.float32)[0], (2, 64, WIDTH))
    targets = np.repeat([[3], [30]], 64, axis=1)
    rngs = {"dropout": jax.random.key(0)}
    dropped = jax.jit(lambda *x: nll(model, *x, deterministic=False, rngs=rngs))(
        params, features, targets
    )
    of_head, of_tail = (len(np.unique(np.round(row, 4))) for row in np.asarray(dropped))
    assert of_head == 2
    assert 4 < of_tail <= 1 + 2**4, "four features in the band"


def test_padding_rows_are_no_targets_of_a_tail_in_training_only(tiny_config, params) -> None:
    """As the paper's code computes its loss: ids 21 and 36 here, 20001 and 60001 there."""
    model = make(tiny_config, model__padding_rows=True)
    features = normal(0, 1, 3, WIDTH)
    run = jax.jit(functools.partial(nll, model), static_argnums=3)
    scored, trained = (
        np.asarray(run(params, features, np.asarray([[21, 22, 36]]), still))
        for still in (True, False)
    )
    head = np.concatenate(
        [params["adaptive"]["band_0"]["embedding"], params["adaptive"]["clusters"].T]
    )
    of_clusters = -np.asarray(jax.jit(jax.nn.log_softmax)(features @ head.T))[0, [0, 2], [20, 21]]
    np.testing.assert_allclose(trained[0, [0, 2]], of_clusters, rtol=1e-5)
    np.testing.assert_allclose(trained[0, 1], scored[0, 1], rtol=1e-6)
    assert (scored[0, [0, 2]] > of_clusters).all()


def test_the_loss_of_the_papers_vocabulary_needs_a_chunk_of_memory() -> None:
    """All logits of 2,048 tokens over the last band alone would be 1.7 GB, and their gradient as
    much again.
    """
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((207_744, 64), (1, 2048, 64))]
    targets = jax.ShapeDtypeStruct((1, 2048), jnp.int32)

    def loss(embedding: jax.Array, features: jax.Array, targets: jax.Array) -> jax.Array:
        return selected_token_nll(embedding, features, targets, chunk_rows=128).sum()

    memory = (
        jax.jit(jax.grad(loss, (0, 1)))
        .lower(*shapes, targets)
        .compile(compiler_options=AS_USERS)
        .memory_analysis()
    )
    assert memory.temp_size_in_bytes < 500e6, (
        "logits of 128 tokens are 106 MB, the gradient of the embedding 53 MB"
    )


def test_the_papers_model_has_its_number_of_parameters() -> None:
    config = read_config(wikitext103.get_config("model.scan_layers=True"))
    model = build_model(config, 267_744)
    assert count_parameters(model) == 246_933_504


@pytest.mark.parametrize(
    ("cutoffs", "factor", "message"),
    [
        ((40, 20), 4, "model.cutoffs=40:20 must ascend"),
        ((20, 60), 4, "below the 60 tokens of the vocabulary"),
        ((), 4, "must ascend"),
        ((20, 35), 8, "leaves band 2 of model.cutoffs=20:35 no feature of model.width=16"),
    ],
)
def test_bands_that_do_not_fit_are_refused(
    cutoffs: tuple[int, ...], factor: int, message: str
) -> None:
    config = ModelConfig(width=WIDTH, cutoffs=cutoffs, adaptive_factor=factor)
    assert_refused(message, check_bands, config, VOCABULARY)
