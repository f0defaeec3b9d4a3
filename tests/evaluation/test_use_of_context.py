"""Measures of what a context is used for, each beside its definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import load_config
from alibi.evaluation.echo import Echo
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.in_context import InContext
from alibi.evaluation.longppl import LongPPL
from alibi.evaluation.receptive_field import ReceptiveField, fields
from alibi.runs.trained import TrainedRun
from tests.evaluation.runs import make_run, nll_alone, options_of, rows_of
from tests.refusals import assert_refused

TEXT = bytes(np.random.default_rng(0).integers(97, 123, 150).astype(np.uint8)).decode()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("use")
    (folder / "text.txt").write_text(TEXT)
    return [
        make_run(folder, "alibi", "own", keys="model.embedding=untied"),
        make_run(folder, "rotary", "other", keys="model.window=3"),
    ]


def nll_of(run, length, stride=None):
    """Each token's NLL, from its own row."""
    tokens, stride = np.frombuffer(b"\n" + TEXT.encode(), np.uint8).astype(int), stride or length
    places = np.arange(tokens.size - 1)
    starts = np.maximum(0, (places // stride + 1) * stride - length)
    rows = [tokens[start : start + length + 1] for start in starts]
    return nll_alone(run, rows, length)[places, places - starts]


def measured(evaluator, runs, lengths, out):
    return rows_of(runs, dataclasses.replace(options_of(out, lengths), evaluators=(evaluator,)))


def test_the_in_context_score_is_a_difference_of_two_places(runs, tmp_path):
    rows = measured(InContext(early=2, late=9), runs[:1], (4, 16), tmp_path / "out")
    by_length = {row.length: row for row in rows}
    assert by_length[4].error.startswith("windows of 4 have no token 9; give a smaller --late=N")
    nll = nll_of(TrainedRun(runs[0]), 16)[: 150 // 16 * 16].reshape(-1, 16)
    expected = (nll[:, 8] - nll[:, 1]).mean()
    assert by_length[16].results["score_nats"] == pytest.approx(expected, abs=1e-5)
    assert by_length[16].results["tokens"] == 9


def test_the_receptive_field_is_that_of_the_gradients(runs, tmp_path):
    """If tokens differ, a row of the embedding's gradient is one input's; a window of 3 in one
    layer sees 3 tokens.
    """
    rows = measured(ReceptiveField(field_windows=9), runs, (16,), tmp_path / "out")
    own, other = (row.results for row in rows)
    assert other["field"] <= 3
    run, tokens = TrainedRun(runs[0]), np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    fields, trained = [], run.params

    @jax.jit
    @jax.grad
    def gradient(change, inputs, target):
        table = jnp.zeros((256, 16)).at[240:].set(trained["embedding"][inputs] + change)
        params = trained | {"embedding": table}
        logits = run.model.apply({"params": params}, jnp.arange(240, 256)[None])[0, -1]
        return -jax.nn.log_softmax(logits)[target]

    for number in range(9):
        end = 15 + number * (150 // 9)
        inputs = np.append(10, tokens)[end - 15 : end + 1]
        power = np.sum(gradient(jnp.zeros((16, 16)), inputs, tokens[end]) ** 2, axis=1)[::-1]
        fields.append(np.argmax(np.cumsum(power) / power.sum() > 0.99) + 1)
    assert own["field"] == pytest.approx(np.mean(fields))


@pytest.mark.parametrize("number", [0.0, np.nan])
def test_a_window_without_influence_has_no_receptive_field(runs, number):
    """Nor has an overflow a field of one token."""
    run = TrainedRun(runs[0])
    params = jax.tree.map(lambda x: x * number, run.params)
    found = jax.jit(fields(run.model))(params, jnp.ones((1, 8), int), jnp.ones((1, 1), int))
    np.testing.assert_array_equal(found, [[number]])


def test_a_receptive_field_is_of_plain_text():
    """In an example of a task only answers have a loss."""
    assert_refused(
        "objective=answers with receptive_field",
        lambda: ReceptiveField().check(load_config("configs/task.py:data.task=copy"), (64,)),
    )


def test_an_echo_saves_what_its_copy_saves(runs, tmp_path):
    rows = measured(Echo(echoes=3), runs[:1], (64,), tmp_path / "out")
    assert [row.cell["gap"] for row in rows] == [32]
    alone = measured(Echo(echoes=3, echo_gap=48), runs[:1], (64,), tmp_path / "one")
    assert [row.cell["gap"] for row in alone] == [48]
    assert_refused(
        "echo_gap=49 .* 64 .* 65",
        lambda: Echo(echo_gap=49).check(TrainedRun(runs[0]).config, (64,)),
    )
    run, random = TrainedRun(runs[0]), np.random.default_rng([64, 32])
    tokens, saved = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32), []
    apply = jax.jit(run.model.apply)
    for start in (0, (150 - 65) // 2, 150 - 65):
        source = (start + random.integers(65, 150 - 32)) % (150 - 16)
        passage = tokens[source : source + 16]
        assert source >= start + 65 or source + 16 <= start + 16, "from elsewhere"
        nats = []
        for first in (tokens[start + 17 : start + 33], passage):
            window = tokens[start : start + 65].copy()
            window[17:33], window[-16:] = first, passage
            logits = apply({"params": run.params}, window[None, :-1])[0]
            nats.append(-jax.nn.log_softmax(logits[-16:])[np.arange(16), passage].mean())
        saved.append(nats[0] - nats[1])
    assert rows[0].results["saved_nats"] == pytest.approx(np.mean(saved), abs=1e-5)
    assert rows[0].results["tokens"] == 3


def test_longppl_is_of_the_tokens_that_another_run_needs_a_long_context_for(runs, tmp_path):
    evaluator = LongPPL(
        key_run=str(runs[1]), key_length=8, key_short=2, key_gain=0.001, key_loss=9.0
    )
    (row,) = measured(evaluator, runs[:1], (16,), tmp_path / "out")
    key = TrainedRun(runs[1])
    long, short = nll_of(key, 8, 2), nll_of(key, 2, 1)
    chosen = (short - long > 0.001) & (long < 9)
    assert 10 < chosen.sum() < 140
    nll = nll_of(TrainedRun(runs[0]), 16)[chosen]
    assert row.results["tokens"] == nll.size
    assert row.results["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-5)
    own = dataclasses.replace(evaluator, key_run=str(runs[0]))
    (of_own,) = measured(own, runs[:1], (16,), tmp_path / "own")
    assert row.tokens_sha256 != of_own.tokens_sha256, "key tokens of another run are another text"
    (failure,) = evaluate_runs(
        runs[:1], dataclasses.replace(options_of(tmp_path / "no", (16,)), evaluators=(LongPPL(),))
    )
    assert "give --key_run=WORKDIR" in failure
