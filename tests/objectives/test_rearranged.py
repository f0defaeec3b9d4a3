"""Objectives that reorder a row, show a part of it from both sides, or predict only answers in text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.attention.call import AttentionCall, AttentionOptions
from alibi.attention.dispatch import compute_call
from alibi.config import make_config
from alibi.data.batches import TrainBatches
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.scorer import model_nll, wrong_tokens
from alibi.generation import generate, stream
from alibi.model.decoder import build_model
from alibi.objectives import IsolatedDocuments, NextToken, Sequences, make_objective
from alibi.objectives.after_separator import AfterSeparator
from alibi.objectives.fill_in_the_middle import FillInTheMiddle
from alibi.objectives.prefix_lm import PrefixLM
from alibi.positions import make_position
from alibi.reporting.rows import read_rows
from alibi.training.loop import train
from tests.attention.calls import assert_near
from tests.evaluation.runs import options_of
from tests.training.runs import rows as rows_of_metrics

VOCAB = 50
TINY = "length=12,model.num_layers=2,model.width=16,model.num_heads=2,model.feed_forward=16"


def rows_of(count, length=20):
    tokens = np.random.default_rng(0).integers(1, VOCAB, (count, length + 1), np.int32)
    return Sequences(tokens, np.arange(count) * length)


def test_the_parts_of_a_row_are_the_row():
    """By reading each row's marks: 50 is the prefix, 51 the suffix, 52 the middle, 53 the end."""
    sequences, objective = rows_of(400), FillInTheMiddle(VOCAB, 0, 0.75)
    batch, plain = (objective.batch(sequences, 3, 4, training=on) for on in (True, False))
    expected = NextToken(VOCAB, 0).batch(sequences)
    moved = (batch.inputs == 50).any(axis=1)
    # four standard deviations of a share of 400
    assert moved.mean() == pytest.approx(0.75, abs=4 * (0.75 * 0.25 / 400) ** 0.5)
    for index in (0, 1):  # inputs and targets
        np.testing.assert_array_equal(plain[index], expected[index])
        np.testing.assert_array_equal(batch[index][~moved], expected[index][~moved])
    starts, middles = [], []
    for row in np.flatnonzero(moved):
        read, own = batch.inputs[row], sequences.tokens[row, 1:]
        np.testing.assert_array_equal(read[1:], batch.targets[row, :-1])
        assert (read[0], batch.targets[row, -1]) == (50, 53)
        suffix, middle = (int(np.flatnonzero(read == mark)[0]) for mark in (51, 52))
        parts = read[1:suffix], read[middle + 1 :], read[suffix + 1 : middle]
        np.testing.assert_array_equal(np.concatenate(parts), own[:-3])
        starts.append(suffix - 1)
        middles.append(len(read) - middle - 1)
    # a pair of two uniform places has its lower one at a third, and its distance is a third
    assert np.mean(starts) == pytest.approx(17 / 3, abs=1)
    assert np.mean(middles) == pytest.approx(17 / 3, abs=1)


def test_a_row_beside_the_text_stays_as_it_is():
    tokens = np.full((1, 9), -1, np.int32)
    tokens[0, :4] = 7
    sequences = Sequences(tokens, np.zeros(1, int))
    batch = FillInTheMiddle(VOCAB, 0, 1.0).batch(sequences, training=True)
    np.testing.assert_array_equal(batch.targets, tokens[:, 1:])


def test_a_prefix_is_seen_whole_and_what_it_shows_is_not_predicted():
    sequences, objective = rows_of(300), PrefixLM(VOCAB, 0, 1.0)
    batch = objective.batch(sequences, 3, 4, training=True)
    places = np.arange(20)
    for read, targets, reach in zip(batch.inputs, batch.targets, batch.reach, strict=True):
        visible = places[None] <= reach[:, None]
        assert visible[places, places].all()
        for i in np.flatnonzero(targets >= 0):
            assert not visible[i, i + 1 :].any(), "a predicted token is not among those seen"
        hidden = np.flatnonzero(targets < 0)  # inside of the prefix, all see it to its end
        assert (reach[hidden] == reach[0]).all()
        np.testing.assert_array_equal(read[1:][targets[:-1] >= 0], targets[:-1][targets[:-1] >= 0])
    lengths = batch.reach[:, 0] + 1
    assert lengths.mean() == pytest.approx(10, abs=1)  # uniform from 0, of which 0 and 1 are alike
    assert objective.batch(sequences).reach is None
    shares = [(PrefixLM(VOCAB, 0, rate).batch(sequences, 3, 4, training=True).reach[:, 0] > 0).mean()
              for rate in (0.0, 0.5)]  # fmt: skip
    assert shares == [0, pytest.approx(0.5 * 0.9, abs=0.12)]


def test_a_prefix_in_documents_is_counted_in_positions_of_the_document():
    """A token sees its own document up to the prefix's end, by a list of all pairs."""
    sequences = rows_of(50)
    sequences.tokens[:, [6, 13]] = 0  # documents end
    for restart in (True, False):
        wrapped = IsolatedDocuments(VOCAB, 0, PrefixLM(VOCAB, 0, 1.0), restart=restart)
        batch = wrapped.batch(sequences, training=True)
        bare = PrefixLM(VOCAB, 0, 1.0).batch(sequences, training=True)
        positions = np.tile(np.arange(20), (50, 1)) if batch.positions is None else batch.positions
        same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None]
        found = (positions[:, None] <= batch.reach[:, :, None]) & same
        np.testing.assert_array_equal(found, (np.arange(20) <= bare.reach[:, :, None]) & same)


def test_an_answer_is_the_text_from_a_separator_to_its_end():
    text = "Q: a=b; A: one\nA: two;Q\nA:"
    tokens = np.frombuffer(f"\n{text}".encode(), np.uint8).astype(np.int32)[None]
    objective = AfterSeparator(256, 10, separator="A: ", end="\n")
    targets = objective.batch(Sequences(tokens, np.zeros(1, int))).targets[0]
    assert bytes(targets[targets >= 0].astype(np.uint8)) == b"one\ntwo;Q\n"
    assert objective.batch(Sequences(tokens[:, :2], np.zeros(1, int))).targets.max() == -1


def seen(model, params, batch, row=0):
    """Whether the NLL at input i changes with input j, `[i, j]`: the least change is exact zero."""
    length, batch = batch.inputs.shape[1], jax.tree.map(jnp.asarray, batch)
    nll_of = jax.jit(lambda inputs: model_nll(model)(params, *batch._replace(inputs=inputs)))
    before = np.asarray(nll_of(batch.inputs))[row]
    changes = []
    for j in range(length):
        inputs = np.array(batch.inputs)
        inputs[:, j] = (inputs[:, j] + 1) % VOCAB
        changes.append(np.asarray(nll_of(inputs))[row] != before)
    return np.array(changes).T


@pytest.mark.parametrize(
    ("attention", "keys"),
    [("reference", ""), ("blocked", ",model.scan_layers=true,model.remat=true,position=t5")],
)
def test_no_token_sees_its_target(attention, keys):
    """And what a token sees is exactly the tokens up to its reach."""
    for name in ("next_token", "fill_in_the_middle", "prefix_lm"):
        options = "" if name == "next_token" else ",objective.options.rate=1.0"
        config = make_config(f"{TINY},objective={name}{options},model.attention={attention}{keys}")
        model, objective = build_model(config, VOCAB), make_objective(config, vocab_size=VOCAB)
        params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        batch = objective.batch(rows_of(2, 12), 1, 5, training=True)
        places = np.arange(12)
        reach = places if batch.reach is None else batch.reach[1]
        expected = (places <= reach[:, None]) & (batch.targets[1] >= 0)[:, None]
        assert (name == "prefix_lm") == (expected.sum() != 78)
        np.testing.assert_array_equal(seen(model, params, batch, row=1), expected)


def test_tiles_equal_the_dense_formula_with_a_reach():
    """With segments, a window, and keys that the bias puts out of reach."""
    query, key, value, out = np.random.default_rng(0).standard_normal((4, 2, 70, 2, 8), np.float32)
    reach = jnp.maximum(jnp.arange(70)[None], jnp.array([[40], [3]]))
    segments = jnp.arange(70)[None] // jnp.array([[25], [70]])
    sizes = {"num_heads": 2, "head_dim": 8, "width": 16, "train_length": 64, "causal": False}
    alibi = make_position("alibi", **sizes, options={"slopes": (30.0, 0.1)}).bias({})
    entmax = make_position("entmax", **sizes).bias({})  # which reads whole rows

    def loss(arrays, backend, window, epsilon, bias):
        options = AttentionOptions(window, epsilon, backend=backend, block=16)
        call = AttentionCall(
            *arrays, bias=bias, causal=True, query_positions=np.arange(70), key_positions=np.arange(70),
            query_segments=segments, key_segments=segments, query_reach=reach, options=options,
        )  # fmt: skip
        return (compute_call(call) * out).sum()

    for window, epsilon, bias in (
        (None, 0.0, alibi),
        (None, 1e-6, alibi),
        (20, 0.0, alibi),
        (20, 0.0, entmax),
    ):
        found, expected = (
            jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2, 3))(
                (query, key, value), backend, window, epsilon, bias
            )
            for backend in ("blocked", "reference")
        )
        assert_near(found, expected, 1e-5)


def test_added_tokens_are_never_written():
    """Their embeddings are made the likeliest by far."""
    one_layer = TINY.replace("num_layers=2", "num_layers=1")
    model = build_model(make_config(f"{one_layer},objective=fill_in_the_middle"), VOCAB)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    assert params["embedding"].shape == (VOCAB + 4, 16)
    prompt = jnp.arange(8)[None]
    of_last = functools.partial(model.apply, method="features")
    features = jax.jit(of_last)({"params": params}, prompt)[0, -1]
    params["embedding"] = params["embedding"].at[VOCAB:].set(features)
    logits = jax.jit(model.apply)({"params": params}, prompt)[0, -1]
    assert logits.argmax() >= VOCAB
    written = generate(model, params, prompt, 6)
    assert written.max() < VOCAB
    assert written[0, 0] == logits[:VOCAB].argmax()
    wrong = wrong_tokens(model)(params, prompt, written[:, :1])
    assert wrong.item() == 0, "an answer is right if the model writes it"


def test_a_prefix_lm_writes_as_it_is_scored():
    """Without a prefix it is causal: the NLL of each token written with the cache is the full pass's."""
    model = build_model(make_config(f"{TINY},objective=prefix_lm"), VOCAB)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    prompt = np.arange(1, 7)
    steps = [(tokens[0], nll[0]) for tokens, nll in stream(model, params, [prompt.tolist()], 5)]
    tokens, nll = map(np.concatenate, zip(*steps, strict=True))
    whole = np.concatenate([prompt, tokens])
    inputs, targets = jnp.asarray(whole)[None, :-1], jnp.asarray(whole)[None, 1:]
    expected = jax.jit(model_nll(model))(params, inputs, targets)[0, -5:]
    np.testing.assert_allclose(nll, expected, atol=2e-5)


def test_trained_and_evaluated(tiny_config, tmp_path):
    config = tiny_config(objective__name="prefix_lm", train__steps=20, optimizer__warmup_steps=4)
    train(config, str(tmp_path / "run"))
    losses = [row["train_nll"] for row in rows_of_metrics(tmp_path / "run") if "train_nll" in row]
    assert losses[-1] < losses[0] - 0.3
    assert evaluate_runs([tmp_path / "run"], options_of(tmp_path / "out", lengths=(16, 64))) == []
    rows = read_rows(tmp_path / "out" / "results.jsonl")
    assert [row.objective for row in rows] == [None, None]
    # every token of the text, as a run of next_token
    assert [row.results["tokens"] for row in rows] == [700, 700]


def test_no_prefix_sees_padding():
    """The last block, of 3 tokens, begins earlier: all its targets are of the text."""
    objective = PrefixLM(vocab_size=VOCAB, boundary_id=0, rate=0.0)
    made = TrainBatches(np.arange(43) % VOCAB, length=10, batch_size=5, seed=0, objective=objective)
    batch = made.rows(0, range(5))
    assert sorted(batch.targets[:, 0]) == [0, 10, 20, 30, 33]
    assert batch.targets.min() >= 0
