"""Two one-sided tests, Fieller's interval and rankings, beside their formulas."""

import dataclasses
import pathlib

import numpy as np
import pytest
from scipy import stats

from alibi.reporting import report
from alibi.reporting.equivalence import (
    Reference,
    agreement,
    comparison,
    equivalence,
    rankings,
    share_of_use,
)
from alibi.reporting.intervals import Sample
from alibi.reporting.panels import panel_groups
from alibi.reporting.report import write_report
from alibi.reporting.rows import read_rows
from alibi.reporting.tables import Missing
from tests.reporting.rowmaker import append_rows, make_key, make_row

METHODS = pathlib.Path(__file__).parents[2] / "results" / "methods" / "results.jsonl"


def sample(*means):
    """Returns the sample of the seeds 0, 1, ..., one number each."""
    return Sample(tuple(range(len(means))), np.array(means, float)[:, None], np.ones(1, int))


@pytest.mark.parametrize(
    ("own", "margin", "verdict"),
    [
        ((1.000, 1.101, 1.199), 0.02, "equivalent"),
        ((1.003, 1.103, 1.2035), 0.02, "equivalent"),  # surely higher, and by less than matters
        ((1.100, 1.201, 1.299), 0.02, "higher"),
        ((0.900, 1.001, 1.099), 0.02, "lower"),
        ((1.00, 1.15, 1.22), 0.02, "undecided"),
    ],
)
def test_two_one_sided_tests_are_those_of_scipy(own, margin, verdict):
    reference = (1.0, 1.1, 1.2)
    interval, found = equivalence(sample(*own), sample(*reference), margin)
    assert found == verdict
    paired = np.array(own) - reference
    above = stats.ttest_1samp(paired, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(paired, margin, alternative="less").pvalue
    assert (max(above, below) < 0.05) == (verdict == "equivalent")
    low, high = stats.t.interval(0.9, 2, paired.mean(), stats.sem(paired))
    assert interval.bounds == pytest.approx((low, high))


def test_a_single_seed_without_parts_decides_nothing():
    assert equivalence(sample(1.0), sample(1.0), 0.02) is None


def test_a_share_has_the_interval_in_which_no_value_is_rejected():
    """Fieller's: a share s lies within if a t test does not reject gain - s reference = 0."""
    gains, reference = np.array([0.011, 0.013, 0.012]), np.array([0.030, 0.034, 0.033])
    share, (low, high) = share_of_use(gains, reference)
    assert share == pytest.approx(gains.mean() / reference.mean())
    assert low < share < high
    for border in (low, high):
        assert stats.ttest_1samp(gains - border * reference, 0.0).pvalue == pytest.approx(0.05)
    assert share_of_use(gains, np.array([0.01, -0.01, 0.03]))[1] is None, (
        "the reference may gain nothing"
    )
    assert share_of_use(gains[:1], reference[:1])[1] is None


def test_a_report_compares_its_runs_with_one_of_them():
    """A share of use is of the seeds' own gains; a verdict is that of the interval beside it."""
    rows = [row for row in read_rows(METHODS) if row.position in ("alibi", "t5", "kerple_log")]
    (panel, *_), *_ = (
        group for group in panel_groups(rows) if group[0].kind.title == "Nats gained by context"
    )
    table = comparison(panel, Reference("t5", 0.005))
    assert "Against t5: Nats gained by context" in table.caption
    gains, compared = {one.label: one.cells for one in panel.series}, []
    for (label, *_), cells in zip(table.labels, table.cells, strict=True):
        for column, (offset, verdict, share) in zip(table.header[1:], cells[1:], strict=True):
            if offset is None:
                continue
            own, other = (np.array(gains[name][column].values) for name in (label, "t5"))
            if len(own) != len(other):
                continue
            compared.append(label)
            assert offset.mean == pytest.approx(np.mean(own - other), abs=1e-6)
            assert share.mean == pytest.approx(own.mean() / other.mean())
            low, high = offset.interval.bounds
            within = low > -0.005 and high < 0.005
            assert (verdict.text == "equivalent") == within
            assert within or (verdict.text == "undecided") == (low <= 0 <= high)
    assert {"alibi", "alibi-ssmax"} <= {*compared}
    assert comparison(panel, Reference("nobody", 0.005)) is None, "there is no such run"


@pytest.mark.parametrize("runs", [5, 9])
def test_a_seeds_agreement_is_that_of_scipy(runs):
    """With 9 runs, 10,000 permutations are drawn, so p varies by 0.005."""
    random = np.random.default_rng(runs)
    one = random.normal(size=(runs, 1))
    other = 0.5 * one + random.normal(size=(runs, 1))
    taus, p = agreement(one, other)
    expected = stats.kendalltau(one[:, 0], other[:, 0], method="exact")
    assert taus == pytest.approx([expected.statistic])
    assert p == pytest.approx(expected.pvalue, abs=0.015 if runs > 7 else 1e-12)


def test_seeds_of_a_run_are_permuted_together():
    """Three seeds alike decide no more than one: 2 of 24 permutations have a tau of 1 or -1."""
    one = np.arange(4.0)[:, None] + np.zeros(3)
    taus, p = agreement(one, 10 - one)
    assert (taus.tolist(), p) == ([-1, -1, -1], 2 / 24)
    taus, p = agreement(one, np.ones_like(one))
    assert (taus.tolist(), p) == ([0, 0, 0], 1), "equal numbers have no order"


def test_ties_and_seeds_are_those_of_scipy():
    one = np.array([[1, 1], [2, 3], [2, 2], [4, 4]])
    other = np.array([[3, 1], [1, 1], [2, 5], [0, 7]])
    taus, _ = agreement(one, other)
    expected = [
        stats.kendalltau(*of_seed).statistic for of_seed in zip(one.T, other.T, strict=True)
    ]
    assert taus == pytest.approx(expected)


def test_a_score_that_is_better_when_lower_ranks_as_perplexity_does():
    """A receptive field says where a model looks, which is no merit."""
    measured = {"alibi": (3.0, -0.6, 90), "t5": (3.5, -0.4, 80), "rotary": (4.0, -0.2, 70)}
    rows = []
    for name, (loss, score, field) in measured.items():
        rows.append(make_row(name, 256, loss))
        for evaluator, results in (
            ("in_context", {"score_nats": score, "tokens": 9}),
            ("receptive_field", {"field": field, "tokens": 9}),
        ):
            rows.append(make_row(name, 256, None, evaluator=evaluator, results=results))
    table = rankings([panel for panel, *_ in panel_groups(rows)])
    ((measure, *_),) = table.labels
    (((tau,), *_),) = table.cells
    assert (measure, tau.values) == ("In-context score", (1.0,))


def test_a_report_tells_whether_keys_rank_runs_as_perplexity_does(tmp_path, monkeypatch):
    """Lower perplexity at the longest length beside more keys found at the largest distance of each
    window: in seed 0 the same order, in seed 1 one pair of three the other way. A run without keys, an
    n-gram and a third seed are left out.
    """
    farthest = {128: 50, 256: 100}
    shares = {"alibi": (0.9, 0.8), "t5": (0.5, 0.6), "rotary": (0.1, 0.7)}
    losses = {"alibi": (4.0, 4.1), "t5": (5.0, 5.1), "rotary": (6.0, 6.1), "none": (3.0, 3.1)}
    rows = [
        make_row(name, length, loss * 128 / length if length == 128 else loss, seed=seed)
        for name, both in losses.items()
        for seed, loss in enumerate(both)
        for length in (128, 256)
    ]
    rows += [
        make_key(name, length, distance, share if distance == farthest[length] else 0.5, seed=seed)
        for name, both in shares.items()
        for seed, share in enumerate(both)
        for length in (128, 256)
        for distance in (10, 50, 100)[: length // 128 + 1]
    ]
    rows.append(make_row("ngram-witten-bell", 256, 9.0, run="ngram-6", train_length=0, step=0))
    rows.append(make_row("alibi", 256, 1.0, seed=2))
    table = rankings([panel for panel, *_ in panel_groups(rows)])
    assert [label[2:] for label in table.labels] == [
        (f"window {length}, tokens from the key to its answer {distance}", "256 of books, valid")
        for length, distance in farthest.items()
    ]
    for (tau,), (p,), (runs,), (seeds,) in table.cells:
        assert tau.values == pytest.approx((1, 1 / 3))
        assert tau.seeds == (0, 1)
        # a mean tau of 2/3 has also the order with the last two exchanged, and -2/3 their reverses
        assert p.mean == pytest.approx(4 / 6)
        assert (runs.mean, seeds.mean) == (3, 2)

    monkeypatch.setattr(report, "png", lambda spec: b"")
    append_rows(tmp_path / "results.jsonl", rows)
    write_report(tmp_path, reference=Reference("alibi-L128", 0.1))
    line = "| +0.67 ± 4.24 | 0.667 | 3 | 2 |"
    assert line in (tmp_path / "report.md").read_text()
    assert "<h2>Rankings</h2>" in (tmp_path / "report.html").read_text()
    assert rankings([panel for panel, *_ in panel_groups(rows[:16])]) is None, "one measure"

    # of another split the perplexity is another one, and of other tokens none can be compared
    reverse = [
        make_row(name, 256, 10 - loss, seed=seed, split="test")
        for name, both in losses.items()
        for seed, loss in enumerate(both)
    ]
    both = rankings([panel for panel, *_ in panel_groups([*reverse, *rows])])
    assert both.cells[0] == table.cells[0], "the keys are of the valid text"
    other = [
        dataclasses.replace(row, tokens_sha256="b" * 64)
        if row.position == "t5" and row.evaluator == "perplexity"
        else row
        for row in rows
    ]
    panels = [panel for panel, *_ in panel_groups(other)]
    assert rankings(panels) is None
    compared = comparison(panels[0], Reference("alibi", 0.1))
    verdicts = dict(zip(compared.labels, compared.cells, strict=True))
    assert verdicts[("t5",)][0][1] == Missing("tokens may differ")
