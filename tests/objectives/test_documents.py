"""Packed documents that don't see each other: as each document alone, in training and in scoring."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alibi.config import make_config, replaced
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.scorer import Scorer, model_nll, wrong_tokens
from alibi.evaluation.windows import mean_context, windows_of
from alibi.model.decoder import build_model
from alibi.objectives import IsolatedDocuments, Masked, NextToken, Sequences
from alibi.reporting.panels import caption, panel_groups
from alibi.reporting.rows import Row, read_rows
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import TrainState
from alibi.training.loop import train
from alibi.training.step import make_train_step
from tests.evaluation.runs import make_run, options_of
from tests.refusals import assert_refused

VOCAB, END = 11, 10
# three documents, of which the second has an end alone, and a beginning of a fourth
TEXT = np.array([1, 2, 3, END, END, 4, 5, 6, 7, END, 8, 9])
NEXT = NextToken(VOCAB, END)
MASKED = Masked(VOCAB, END, 0.5, 0.1, 0.1, -1)


def isolated(objective, *, restart=True):
    return IsolatedDocuments(VOCAB, END, objective, restart=restart)


def whole_text():
    return Sequences(np.concatenate([[-1], TEXT]).astype(np.int32)[None], np.array([0]))


def test_segments_end_with_the_documents():
    """A token after an end is predicted from the end; an end belongs to the document it ends."""
    batch = isolated(NEXT).batch(whole_text())
    assert batch.inputs[0].tolist() == [END, 1, 2, 3, END, END, 4, 5, 6, 7, END, 8]
    assert batch.segment_ids[0].tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0, 1]
    assert isolated(NEXT, restart=False).batch(whole_text()).positions is None
    assert isolated(NEXT).context(whole_text())[0].tolist() == [1, 2, 3, 4, 1, 1, 2, 3, 4, 5, 1, 2]
    both = isolated(MASKED)
    assert not both.causal
    np.testing.assert_array_equal(
        both.batch(whole_text()).inputs, MASKED.batch(whole_text()).inputs
    )
    assert both.context(whole_text())[0].tolist() == [4] * 4 + [1] + [5] * 5 + [2] * 2


@pytest.mark.parametrize(("objective", "position"), [(NEXT, "learned"), (MASKED, "alibi")])
def test_packed_documents_have_the_scores_of_single_ones(objective, position):
    """With positions that restart, even a learned table gives what it gives each document alone."""
    name = "masked" if objective is MASKED else "next_token"
    keys = "length=12,model.num_layers=1,model.width=16,model.num_heads=2"
    model = build_model(make_config(f"{keys},objective={name}", position=position), VOCAB)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    scorer = Scorer(model_nll(model), objective=isolated(objective), batch_tokens=64)
    found = scorer.score(params, TEXT, 12).values
    batch, expected, nll_of = objective.batch(whole_text()), [], jax.jit(model_nll(model))
    for start, stop in ((0, 4), (4, 5), (5, 10), (10, 12)):
        nll = np.asarray(nll_of(params, *(x[:, start:stop] for x in batch[:2])))[0]
        expected += nll[batch.targets[0, start:stop] >= 0].tolist()
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    tokens, last = batch.inputs[:, 5:10], np.arange(5) == 4
    one, other = (nll_of(params, np.where(last, token, tokens), tokens)[0, 0] for token in (1, 2))
    assert (one != other) == (objective is MASKED), "the first token sees the last if masked"


def test_the_likeliest_token_is_that_of_its_document():
    """With the likeliest tokens of documents alone as targets none is wrong, but if documents see each
    other.
    """
    model = build_model(
        make_config("length=12,model.num_layers=1,model.width=16,model.num_heads=2"), VOCAB
    )
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    params = jax.tree.map(lambda x: 4 * x, params)  # so that contexts decide
    batch = isolated(NEXT).batch(whole_text())
    logits = jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    likeliest = [
        logits(batch.inputs[:, start:stop]).argmax(axis=-1)
        for start, stop in ((0, 4), (4, 5), (5, 10), (10, 12))
    ]
    batch = batch._replace(targets=np.concatenate(likeliest, axis=1))
    wrong = jax.jit(wrong_tokens(model))
    assert not wrong(params, *batch).any()
    assert wrong(params, *batch[:2]).any()


def test_training_sees_the_segments():
    """An update has the loss that the documents have alone, here in two micro-batches."""
    config = make_config("length=12,model.num_layers=1,model.width=16,model.num_heads=2")
    model = build_model(config, VOCAB)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    batch = isolated(NEXT).batch(whole_text())
    arrays = (x if x is None else np.broadcast_to(x[0], (2, 1, 12)).copy() for x in batch)
    state = TrainState(jnp.zeros((), jnp.int32), params, optax.sgd(0.1).init(params))
    state = jax.tree.map(jnp.array, state)
    _, metrics = make_train_step(model, optax.sgd(0.1), 0)(state, *arrays)
    nll = jax.jit(model_nll(model))(params, *batch[:2])
    scorer = Scorer(model_nll(model), objective=isolated(NEXT), batch_tokens=64)
    alone = 2 * scorer.score(params, TEXT, 12).values.sum(dtype=np.float64)
    assert float(metrics["nll_nats"]) == pytest.approx(alone, rel=1e-5)
    assert abs(2 * float(np.sum(nll)) - alone) > 1e-2


def test_the_mean_context_is_at_most_a_document():
    """In windows of 6 the third document is cut: 1 to 4, 1, 1 | 1 to 4, 1, 2 inputs."""
    windows = windows_of(TEXT.size, 6)
    expected = (1 + 2 + 3 + 4 + 1 + 1 + 1 + 2 + 3 + 4 + 1 + 2) / 12
    assert mean_context(isolated(NEXT), TEXT, windows) == pytest.approx(expected)


def test_rows_tell_the_documents(tiny_text, tmp_path):
    lines = tiny_text["valid"].read_text().splitlines()
    (tmp_path / "text.txt").write_text("\n\n".join(lines) + "\n")
    keys = "data.tokenizer=bpe,data.bpe_vocab_size=280,data.document_end=blank_line"
    run = make_run(tmp_path, "alibi", "run", keys=f"{keys},data.isolate_documents=restart")
    assert evaluate_runs([run], options_of(tmp_path / "out", lengths=(16, 64))) == []
    short, long = read_rows(tmp_path / "out" / "results.jsonl")
    assert short.documents == long.documents == "restart"
    assert 1 < short.results["mean_context"] < long.results["mean_context"] < 64
    assert Row.from_json(long.to_json()) == long
    plain = dataclasses.replace(long, run="other", documents=None)
    isolated_panel, _ = (kinds[0] for kinds in panel_groups([short, long, plain]))
    assert "documents that don't see each other, positions restart" in caption(isolated_panel)
    [failure] = evaluate_runs([run], options_of(tmp_path / "no", (16,), dump_nll=True))
    assert "documents are isolated, and --dump_nll" in failure
    one = replaced(RunDirectory(run).config(), {"data.document_end": "file"})
    assert_refused("several documents", train, one, str(tmp_path / "one"))


def test_a_scale_by_positions_is_refused():
    keys = "data.tokenizer=bpe,data.isolate_documents=through,model.logit_scale=log_n"
    assert_refused(
        "counts visible tokens by their positions", build_model, make_config(keys), VOCAB
    )
