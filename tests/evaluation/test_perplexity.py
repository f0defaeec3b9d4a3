"""The same NLL whatever the batch and the devices, against literal loops."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alibi.config import make_config, replaced
from alibi.evaluation.scorer import Scorer, model_nll
from alibi.model.decoder import build_model, evaluated
from alibi.objectives import NextToken
from tests.refusals import assert_refused

VOCAB, BOUNDARY = 11, 10
SHAPES = [(37, 8, 8), (37, 8, 3), (37, 7, 1), (5, 8, 8), (5, 8, 3), (1, 4, 2), (64, 16, 5)]


def bigram_nll(params, inputs, targets, *_):
    """A model whose exact NLL is a table plus the number of inputs up to the token: its context."""
    columns = jnp.arange(inputs.shape[1] - targets.shape[1], inputs.shape[1])[None, :]
    previous = jnp.take_along_axis(inputs, jnp.broadcast_to(columns, targets.shape), axis=1)
    return jnp.where(targets < 0, 0.0, params[previous, targets] + columns + 1)


def stream(num_tokens, vocabulary=VOCAB):
    return np.random.default_rng(num_tokens).integers(0, vocabulary, num_tokens).astype(np.uint16)


def scorer(function=bigram_nll, **arguments):
    return Scorer(
        function, objective=NextToken(VOCAB, BOUNDARY), **({"batch_tokens": 64} | arguments)
    )


@pytest.fixture(scope="module")
def table():
    return np.random.default_rng(0).random((VOCAB, VOCAB), np.float32)


@pytest.fixture
def traced():
    """The bigram model, and the shapes of the inputs it is traced with."""
    shapes = []

    def nll(params, inputs, targets, *_):
        shapes.append(inputs.shape)
        return bigram_nll(params, inputs, targets)

    return nll, shapes


@pytest.mark.parametrize(("num_tokens", "length", "stride"), SHAPES)
@pytest.mark.parametrize("batch_size", [3, 8])
def test_exact_on_a_bigram_table(table, num_tokens, length, stride, batch_size):
    tokens = stream(num_tokens)
    score = scorer(batch_tokens=batch_size * length).score(table, tokens, length, stride)
    previous = np.concatenate([[BOUNDARY], tokens[:-1]])
    # first token of the window that scores this one
    start = np.arange(num_tokens) // stride * stride
    context = np.arange(num_tokens) - np.maximum(start - (length - stride), 0) + 1
    np.testing.assert_allclose(score.values, table[previous, tokens] + context, rtol=1e-6)
    assert score.values.size == num_tokens
    assert score.seconds > 0


def tiny_model(position):
    config = make_config(
        f"position={position},length=8,model.num_layers=1,model.width=16,model.num_heads=2"
    )
    config = replaced(config, {"model.feed_forward": 32})
    model = build_model(config, VOCAB)
    return model, jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def test_what_bfloat16_has_trained_is_scored_in_float32(monkeypatch):
    """As the paper's code does for float16; on accelerators the products have no fewer bits."""
    config = make_config(
        "length=8,model.num_layers=1,model.width=16,model.num_heads=2,model.dtype=bfloat16"
    )
    trained = build_model(config, VOCAB)
    params = jax.jit(trained.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    batch = [stream(64 + number).astype(np.int32)[:64].reshape(8, 8) for number in range(2)]
    config = replaced(config, {"model.dtype": "float32"})
    exact, rounded = (jax.jit(model_nll(model)) for model in (build_model(config, VOCAB), trained))
    found = jax.jit(model_nll(evaluated(trained, config)))(params, *batch)
    np.testing.assert_array_equal(found, exact(params, *batch))
    assert np.abs(np.asarray(rounded(params, *batch)) - np.asarray(found)).max() > 1e-4
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    model_nll.cache_clear()
    for model, precision in ((evaluated(trained, config), {"HIGHEST"}), (trained, {"DEFAULT"})):
        lowered = jax.jit(model_nll(model)).lower(params, *batch).as_text()
        assert set(re.findall(r"precision = \[(\w+), \w+\]", lowered)) == precision


def literal_nll(model, params, tokens, length, stride):
    """Each window alone, from the full logits: the definition. Zeros stand behind short ones."""
    inputs, found = [BOUNDARY, *tokens.tolist()], []
    # eager Flax takes a second a window
    logits = jax.jit(lambda window: model.apply({"params": params}, window))
    for start in range(0, len(tokens), stride):
        end = min(start + stride, len(tokens))
        window = inputs[max(0, start - (length - stride)) : end]
        padded = np.pad(np.asarray(window, np.int32), (0, length - len(window)))
        log_probabilities = np.asarray(jax.nn.log_softmax(logits(padded[None])[0]))
        places = np.arange(len(window) - (end - start), len(window))
        found.append(-log_probabilities[places, tokens[start:end]])
    return np.concatenate(found)


def test_the_decoder_equals_a_loop_over_single_windows():
    """By positions that tell where in its window a token stands."""
    model, params = tiny_model("sinusoidal")
    tokens = stream(53)
    expected = literal_nll(model, params, tokens, 9, 4)
    score = scorer(model_nll(model), batch_tokens=3 * 9).score(params, tokens, 9, 4)
    np.testing.assert_allclose(score.values, expected, rtol=2e-5, atol=2e-5)
    assert score.values.size == 53


@pytest.mark.parametrize(("axes", "rows"), [((("data", "fsdp"),), 24), (("data",), 12), ((), 3)])
def test_each_part_of_the_batch_has_the_budget_of_one_device(table, traced, axes, rows):
    nll, shapes = traced
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    many = scorer(nll, batch_tokens=24, sharding=NamedSharding(mesh, P(*axes)))
    found = many.score(jax.device_put(table, NamedSharding(mesh, P())), stream(201), 8, 3).values
    np.testing.assert_array_equal(found, scorer().score(table, stream(201), 8, 3).values)
    assert shapes[-1] == (rows, 8)  # after that of the first block


@pytest.mark.parametrize(
    ("batch_tokens", "texts", "lengths", "expected"),
    [
        # a last batch that is not full, a last block that is short
        (
            64,
            (200, 333, 200),
            (8, 16, 32, 64, 128),
            [(8, 8), (4, 16), (2, 32), (1, 64), (1, 128)],
        ),
        (1 << 20, (17,), (8,), [(3, 8)]),  # no rows that no window needs
    ],
)
def test_one_compilation_a_shape_and_a_batch_of_at_most_batch_tokens(
    table, traced, batch_tokens, texts, lengths, expected
):
    nll, shapes = traced
    one = scorer(nll, batch_tokens=batch_tokens)
    for num_tokens in texts:
        for length in lengths:
            one.score(table, stream(num_tokens), length)
    assert shapes == expected


def test_progress_counts_every_token(table):
    seen = []
    scorer(batch_tokens=2 * 8).score(table, stream(37), 8, 3, progress=seen.append)
    assert sum(seen) == 37
    assert seen == [6] * 6 + [1]  # the first block scores 6 tokens, then two windows at a time


def test_sums_are_taken_in_float64():
    """2^24 + 1 is no float32: a running float32 sum would stop growing."""

    def constant(params, inputs, targets, *_):
        return jnp.where(targets < 0, 0.0, 4096.1)

    score = scorer(constant, batch_tokens=4096).score({}, stream(50_000), 512)
    assert score.values.sum(dtype=np.float64) == pytest.approx(
        50_000 * float(np.float32(4096.1)), rel=1e-12
    )


def test_a_batch_budget_below_one_is_refused():
    assert_refused(r"eval\.batch_tokens=0", scorer, batch_tokens=0)
