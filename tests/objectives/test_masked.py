"""Masked tokens: their shares, their independence of windows and hosts, and a model that learns from them."""

import dataclasses
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import make_config
from alibi.data.batches import TrainBatches
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.scorer import Scorer, model_nll
from alibi.evaluation.windows import predicted, read_sequences, spread_windows, windows_of
from alibi.generation import generate
from alibi.model.decoder import build_model
from alibi.objectives import Masked, Sequences
from alibi.positions import METHODS
from alibi.reporting.panels import caption, panel_groups
from alibi.reporting.rows import Row, read_rows
from alibi.runs import evaluation_hash
from alibi.runs.trained import TrainedRun
from alibi.training.loop import train
from tests.evaluation.runs import options_of
from tests.refusals import assert_refused

VOCAB = 50
MASKED = Masked(VOCAB, 0, 0.15, 0.1, 0.1, -1)


def sequences(tokens, first=0):
    return Sequences(np.concatenate([[-1], tokens]).astype(np.int32)[None], np.array([first]))


def test_the_shares_are_those_of_the_config():
    """The tolerance is four standard deviations for a share among 200,000 tokens."""
    batch = MASKED.batch(sequences(np.full(200_000, 7)), seed=1, step=2)
    inputs, targets = batch.inputs[0], batch.targets[0]
    chosen = targets >= 0
    assert chosen.mean() == pytest.approx(0.15, abs=4 * (0.15 * 0.85 / 2e5) ** 0.5)
    assert (targets[chosen] == 7).all()
    assert (inputs[~chosen] == 7).all()
    of_chosen = inputs[chosen]
    near = 4 * (0.1 * 0.9 / chosen.sum()) ** 0.5
    assert (of_chosen == VOCAB).mean() == pytest.approx(0.8, abs=2 * near)
    assert (of_chosen == 7).mean() == pytest.approx(0.1 + 0.1 / VOCAB, abs=near)
    # every token of the vocabulary is drawn as a replacement, and the mask token never
    drawn = np.bincount(of_chosen[(of_chosen != 7) & (of_chosen != VOCAB)], minlength=VOCAB)
    assert (np.delete(drawn, 7) > 0).all()


def test_the_masks_are_the_same_numbers_in_later_versions():
    """Made by NumPy 2: a change would mask other tokens in a resumed run, and in rows to compare."""
    batch = MASKED.batch(sequences(np.arange(24)), seed=3, step=4)
    found = [(int(i), int(batch.inputs[0, i])) for i in np.flatnonzero(batch.targets[0] >= 0)]
    assert found == [(9, 41), (15, 50)]


def test_a_token_is_masked_alike_in_windows_of_every_length():
    tokens = np.random.default_rng(0).integers(0, VOCAB, 103)
    found = {}
    for length in (8, 32, 103):
        inputs, targets = [], []
        for part in windows_of(tokens.size, length, causal=False).groups:
            batch = MASKED.batch(read_sequences(tokens, part, np.arange(len(part))))
            inputs += batch.inputs.ravel().tolist()
            targets += batch.targets.ravel().tolist()
        found[length] = inputs, targets
    assert found[8] == found[32] == found[103]
    places = np.flatnonzero(np.array(found[8][1]) >= 0)
    later = windows_of(tokens.size, 103, causal=False)
    later = dataclasses.replace(later, start=40, length=63, stride=63)
    (selected,) = predicted(MASKED, tokens, later)
    np.testing.assert_array_equal(places[places >= 40] - 40, np.flatnonzero(selected))


def test_training_masks_anew_at_each_step_and_pads_nothing():
    tokens = np.arange(103) % VOCAB
    made = TrainBatches(tokens, length=10, batch_size=11, seed=0, objective=MASKED)
    epochs = []
    for step in range(2):
        batch = made.rows(step, range(11))
        halves = [made.rows(step, rows) for rows in (range(5), range(5, 11))]
        np.testing.assert_array_equal(
            batch.inputs, np.concatenate([half.inputs for half in halves])
        )
        starts = np.array([min(10 * made.block(step, row), 93) for row in range(11)])
        own = tokens[starts[:, None] + np.arange(10)]
        hidden = batch.targets >= 0
        np.testing.assert_array_equal(batch.targets[hidden], own[hidden])
        np.testing.assert_array_equal(batch.inputs[~hidden], own[~hidden])
        epochs.append(hidden[np.argsort(starts)])
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize(("most", "firsts"), [(-1, (0, 16, 32)), (32, (2, 23))])
def test_a_score_is_that_of_each_window_alone(most, firsts):
    """The NLL of the masked tokens alone, from the logits of a window and of the shorter last one;
    or of windows spread over the text.
    """
    config = make_config(
        "objective=masked,length=8,model.num_layers=1,model.width=16,model.num_heads=2"
    )
    model = build_model(config, VOCAB)
    assert model.vocab_size == VOCAB + 1
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    tokens = np.random.default_rng(0).integers(0, VOCAB, 43)
    windows = spread_windows(43, 16, most, causal=False)
    scorer = Scorer(model_nll(model), objective=MASKED, batch_tokens=24)
    score = scorer.score_windows(params, tokens, windows)
    whole, expected = MASKED.batch(sequences(tokens)), []
    apply = jax.jit(model.apply)
    for start in firsts:
        window = slice(start, start + 16)
        logits = apply({"params": params}, jnp.asarray(whole.inputs[:, window]))[0]
        log_probabilities = np.asarray(jax.nn.log_softmax(logits))
        targets = whole.targets[0, window]
        expected += [-log_probabilities[i, targets[i]] for i in np.flatnonzero(targets >= 0)]
    np.testing.assert_allclose(score.values, expected, rtol=2e-5)
    assert score.values.size == len(expected) > 0


def test_every_method_has_a_form_for_both_sides_or_refuses():
    refuse = ("fox", "cope", "stick_breaking", "xpos", "selective_rope")
    for name in METHODS:
        kind = METHODS[name].rpartition(":")[2]
        needed = rf"{kind} needs causal=True \(objective=next_token\)"
        with pytest.raises(ValueError, match=needed) if name in refuse else nullcontext():
            build_model(make_config("objective=masked", position=name), 256)


def test_trained_evaluated_and_refused(tiny_config, tmp_path):
    config = tiny_config(objective__name="masked", seed=3)
    train(config, str(tmp_path / "run"))
    assert evaluate_runs([tmp_path / "run"], options_of(tmp_path / "out", lengths=(16, 64))) == []
    rows = read_rows(tmp_path / "out" / "results.jsonl")
    every = Sequences(np.zeros((1, 701), np.int32), np.zeros(1, int))
    count = (Masked(256, 10, 0.15, 0.1, 0.1, -1).batch(every).targets >= 0).sum()
    found = [(row.evaluator, row.length, row.results["tokens"]) for row in rows]
    assert found == [("perplexity", 16, count), ("perplexity", 64, count)]
    assert not {"words", "bytes", "bits_per_byte"} & {*rows[0].results, *rows[1].results}
    # Speed counts the whole text, as other rows' does: a masked token costs no more than its share.
    assert [row.results["tokens_per_second"] * row.seconds for row in rows] == pytest.approx(
        [700, 700]
    )
    own, of_all_seeds = map(evaluation_hash, (config, dataclasses.replace(config, seed=0)))
    assert {(row.config_hash, row.seedless_hash) for row in rows} == {(own, of_all_seeds)}
    assert own != of_all_seeds
    masks = {"name": "masked", "mask_rate": 0.15, "mask_random": 0.1, "mask_kept": 0.1}
    assert [row.objective for row in rows] == [masks, masks]
    assert [Row.from_json(row.to_json()) for row in rows] == rows
    [[panel]] = panel_groups(rows)
    assert caption(panel).startswith("Pseudo-perplexity of masked tokens by evaluation length")
    for options, words in (
        ({"stride": 8}, "stride=8 is for models that see the tokens before each"),
        ({"dump_nll": True}, "objective=masked with --dump_nll"),
    ):
        [failure] = evaluate_runs([tmp_path / "run"], options_of(tmp_path / "no", (16,), **options))
        assert words in failure
    run = TrainedRun(tmp_path / "run")
    assert_refused(
        "decode=True.* causal=True",
        generate,
        run.model,
        run.params,
        jnp.zeros((1, 4), jnp.int32),
        2,
    )
    assert_refused(
        r"objective\.name: 'masked' there, 'next_token' now",
        train,
        tiny_config(),
        str(tmp_path / "run"),
        listed=True,
    )
    other = dataclasses.replace(tiny_config(), init_from=str(tmp_path / "run"))
    assert_refused("objective=masked", train, other, str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("objective.mask_random=0.6,objective.mask_kept=0.5", "their sum must be at most 1"),
        ("objective.mask_rate=0", "objective.mask_rate=0 must be above 0"),
        (
            "objective=masked,model.embedding=adaptive,model.cutoffs=50",
            "no room for the added tokens of objective=masked",
        ),
        ("objective=masked,model.logit_scale=log_n", "counts the tokens before each"),
    ],
)
def test_bad_configs_are_refused(keys, words):
    assert_refused(words, lambda: build_model(make_config(keys), 256))


def normed(x, norm):
    x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6)
    return x * norm["scale"] + norm["bias"]


def masked_nll(params, bias, tokens, targets):
    """The model's formula in float64, for one sequence: every token sees every other."""
    layer, width = params["layers_0"], params["embedding"].shape[1]
    x = params["embedding"][tokens] * np.sqrt(width)
    y, own = normed(x, layer["attention_norm"]), layer["attention"]
    q, k, v = (
        np.einsum("tw,whd->htd", y, own[name]["kernel"]) + own[name]["bias"][:, None]
        for name in ("query", "key", "value")
    )
    weights = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + bias)
    attended = weights / weights.sum(axis=-1, keepdims=True) @ v
    x = x + np.einsum("htd,hdw->tw", attended, own["out"]["kernel"]) + own["out"]["bias"]
    y = normed(x, layer["feed_forward_norm"])
    y = np.maximum(y @ layer["up"]["kernel"] + layer["up"]["bias"], 0)
    x = normed(x + y @ layer["down"]["kernel"] + layer["down"]["bias"], params["final_norm"])
    logits = x @ params["embedding"].T
    nll = np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(tokens.size), targets]
    return np.where(targets < 0, 0.0, nll)


@pytest.mark.parametrize("slopes_after", ["", "0.03125:0.25"])
def test_the_nll_is_that_of_the_formula_in_float64(slopes_after):
    """-m |i - j| with ALiBi's slopes 1/16 and 1/256, or with other slopes n for later keys."""
    keys = "objective=masked,length=16,model.num_layers=1,model.width=16,model.num_heads=2"
    keys += f",position_options.slopes_after={slopes_after}" if slopes_after else ""
    model = build_model(make_config(keys), VOCAB)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    inputs, targets, *_ = dataclasses.replace(MASKED, mask_rate=0.5).batch(sequences(np.arange(40)))
    found = jax.jit(model_nll(model))(params, inputs, targets)[0]
    m = np.array([2.0**-4, 2.0**-8])[:, None, None]
    after = np.array([2.0**-5, 2.0**-2])[:, None, None] if slopes_after else m
    distance = np.arange(40)[:, None] - np.arange(40)[None]
    bias = np.where(distance > 0, -m * distance, after * distance)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    expected = masked_nll(exact, bias, inputs[0], targets[0])
    assert (targets >= 0).sum() > 10
    np.testing.assert_allclose(found, expected, atol=1e-5)
