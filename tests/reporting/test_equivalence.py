"""Two one-sided tests and Fieller's interval, beside their formulas."""

import pathlib

import numpy as np
import pytest
from scipy import stats

from alibi.reporting.equivalence import (
    Reference,
    comparison,
    equivalence,
    share_of_use,
)
from alibi.reporting.intervals import Sample
from alibi.reporting.panels import panel_groups
from alibi.reporting.rows import read_rows

METHODS = pathlib.Path(__file__).parents[2] / "results" / "methods" / "results.jsonl"


def sample(*means):
    """Of the seeds 0, 1, ..., one number each."""
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
        p = stats.ttest_1samp(gains - border * reference, 0.0).pvalue
        assert p == pytest.approx(0.05)
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
