"""The same tokens at each length, and the gain of their longer context where it is known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi.evaluation.context_use import CONTEXT_GAIN, ContextUse, gain_of
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.scorer import Scorer, run_objective
from alibi.evaluation.windows import Windows, read_sequences, same_token_windows
from alibi.objectives import NextToken, Sequences
from alibi.reporting.panels import build_table, caption
from alibi.reporting.writers import to_markdown
from alibi.runs.trained import TrainedRun
from tests.evaluation.runs import make_run, options_of, rows_of
from tests.refusals import assert_refused
from tests.reporting.rowmaker import make_gains, panels

BOUNDARY = 999


@settings(deadline=None, max_examples=200)
@given(
    num_tokens=st.integers(60, 500),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True),
    windows=st.integers(1, 30),
)
def test_all_lengths_score_the_same_tokens_with_all_their_context(num_tokens, lengths, windows):
    tokens, targets = np.arange(num_tokens), []
    parts = same_token_windows(num_tokens, lengths, windows)
    assert [part.length for part in parts] == sorted(lengths)
    for part in parts:
        assert part.num_tokens == len(part) * part.stride <= windows * part.stride
        # and one row that there is not
        sequences = read_sequences(tokens, part, np.arange(len(part) + 1))
        batch = NextToken(BOUNDARY, BOUNDARY).batch(sequences)
        batch = batch._replace(targets=batch.targets[:, -part.stride :])
        assert (batch.targets[-1] == -1).all()
        for inputs, scored in zip(batch.inputs[:-1], batch.targets[:-1], strict=True):
            # All inputs are the text's own, up to the one before the last target.
            first = inputs[0] + 1 if inputs[0] != BOUNDARY else 0
            assert [BOUNDARY, *tokens][first : first + part.length] == inputs.tolist()
            assert inputs[-1] == scored[-1] - 1 or (scored[-1] == 0 and inputs[-1] == BOUNDARY)
            assert scored.tolist() == list(range(scored[0], scored[0] + max(1, min(lengths) // 10)))
        targets.append(batch.targets[:-1].ravel().tolist())
    assert all(found == targets[0] for found in targets)
    assert len(set(targets[0])) == len(targets[0]), "a token is scored twice"


def test_windows_reach_from_the_texts_start_to_its_end():
    """The first target with the longest context, and the last token of the text."""
    assert same_token_windows(1000, (20, 80), 5) == [
        Windows(78, 1000, length, 2, 230) for length in (20, 80)
    ]
    assert same_token_windows(80, (20, 80), 5) == [
        Windows(78, 80, length, 2, 2) for length in (20, 80)
    ]
    assert_refused("79 tokens.* 80", same_token_windows, 79, (20, 80), 5)


def test_hard_windows_do_not_widen_the_interval():
    """The differences are resampled, not the costs, which vary much between windows."""
    random = np.random.default_rng(1)
    hard = random.normal(5, 3, (400, 1))
    saved = random.normal(0.02, 0.05, (400, 4))
    gain = gain_of((hard + saved).ravel(), np.broadcast_to(hard, (400, 4)).ravel(), np.full(400, 4))
    # Student's t of 15 degrees: 64 parts of the windows, in blocks of four
    half = 2.13 * saved.mean(axis=1).std() / np.sqrt(400)
    low, high = gain["interval"]
    assert (low + high) / 2 == pytest.approx(saved.mean())
    assert high - saved.mean() == pytest.approx(half, rel=0.4)
    assert len(gain["parts"]) == 64
    assert sum(gain["parts"]) == pytest.approx(saved.sum(), rel=1e-5)


def test_a_masked_model_predicts_the_same_masks_with_more_on_both_sides(tmp_path):
    """Each NLL is that of the window cut out by hand, and gains are means over the masks alone."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 8)
    masked = make_run(tmp_path, "alibi", "masked", keys="objective.name=masked")
    (row,) = rows_of([masked], options_of(tmp_path / "out", lengths=(20, 41), evaluator=ContextUse))

    run, text = TrainedRun(masked), np.frombuffer((tmp_path / "text.txt").read_bytes(), np.uint8)
    batch = run_objective(run).batch(
        Sequences(np.append(-1, text)[None].astype(np.int32), np.zeros(1, int))
    )
    apply = jax.jit(run.model.apply)
    # the two in the middle of each window of 41, every second place of which 19 are after them
    places = np.arange(20, text.size - 19 - 1)[: (text.size - 41) // 2 * 2 + 2]
    places = places[batch.targets[0, places] >= 0]
    nats = np.zeros((2, places.size))
    for index, length in enumerate((20, 41)):
        firsts = places - (places - 20) % 2 - (length - 2 - (length - 2) // 2)
        windows = batch.inputs[0, firsts[:, None] + np.arange(length)]
        logits = apply({"params": run.params}, windows)[np.arange(places.size), places - firsts]
        chosen = batch.targets[0, places][:, None]
        nats[index] = -jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, axis=-1)[:, 0]
    found = row.results
    assert (found["lengths"], found["tokens"]) == ((20, 41), places.size)
    np.testing.assert_allclose(found["nll_nats"], nats.sum(axis=1), rtol=1e-5)
    assert found["gain_nats"] == pytest.approx((0, (nats[0] - nats[1]).mean()), abs=1e-5)
    assert sum(found["tokens_of_parts"]) == places.size
    (panel,) = panels([row], CONTEXT_GAIN)
    (series,) = panel.series
    low, high = found["interval"][1]
    assert series.cells[41].interval.bounds == pytest.approx((low, high), abs=1e-6)
    assert f"{places.size} masked tokens in the middle of" in caption(panel)


def test_rows(alibi_run, tmp_path, capsys):
    options = options_of(tmp_path, multiples=(1, 2, 4), context_windows=20)
    (row,) = [row for row in rows_of([alibi_run], options) if row.evaluator == "context_use"]
    assert (row.cell, row.options) == ({"lengths": (16, 32, 64)}, {"context_windows": 20})
    found = row.results
    assert (found["lengths"], found["windows"], found["tokens"]) == ((16, 32, 64), 20, 20)
    nats, gains = np.array(found["nll_nats"]), np.array(found["gain_nats"])
    np.testing.assert_allclose(gains, (nats[0] - nats) / 20, rtol=1e-5, atol=1e-9)
    assert (found["interval"][0], found["parts"][0]) == (None, None)
    for (low, high), gain in zip(found["interval"][1:], gains[1:], strict=True):
        assert low <= gain <= high
    capsys.readouterr()
    assert evaluate_runs([alibi_run], options) == []
    assert "the same tokens: done before" in capsys.readouterr().err


def test_without_memory_for_the_longest_windows_the_others_are_compared(
    alibi_run, tmp_path, monkeypatch, capsys
):
    """With numbers as if only these lengths had been asked for."""
    whole = Scorer.score_windows

    def score(scorer, params, tokens, windows, **keywords):
        if windows.length > 32:
            raise MemoryError
        return whole(scorer, params, tokens, windows, **keywords)

    monkeypatch.setattr(Scorer, "score_windows", score)
    found = []
    for multiples in ((1, 2, 4), (1, 2)):
        options = options_of(tmp_path / str(multiples), multiples=multiples, context_windows=9)
        options = dataclasses.replace(options, report=False, evaluators=options.evaluators[1:])
        found += rows_of([alibi_run], options)
    assert found[0].results == found[1].results
    assert "out of memory at 64; try fewer batch_tokens" in capsys.readouterr().err


def test_one_length_tells_nothing(alibi_run, tmp_path, capsys):
    assert (
        evaluate_runs(
            [alibi_run], options_of(output_dir=tmp_path, lengths=(16, 9999), context_windows=20)
        )
        == []
    )
    assert "needs two lengths that can be measured, not [16]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "half"),
    [
        (None, 12.7062 * 0.1),
        ([[0.0, 0.2], [0.2, 0.4]], 12.7062 * np.hypot(0.1, 0.1)),
    ],
    ids=["seeds alone", "seeds and text"],
)
def test_of_several_seeds_the_interval_covers_them(parts, half):
    """Gains of 0.1 and 0.3, and of 0.1 and 0.3 in the halves of the text; the intervals of single
    runs are of an earlier version, and say nothing of another seed.
    """
    rows = []
    for seed, gain in enumerate((0.1, 0.3)):
        row = make_gains("alibi", {128: 0.0, 256: gain}, seed=seed)
        own = {"windows": 2, "tokens": 2, "parts": (None, parts and tuple(parts[seed]))}
        rows.append(dataclasses.replace(row, results=row.results | own))
    table = to_markdown(build_table(panels(rows, CONTEXT_GAIN)[0]))
    assert f"| 128 | +0.0000 | +0.2000 ± {half:.4f} |" in table
    assert "tokens of 2 windows, the same at each length, against what they cost at 128" in table
