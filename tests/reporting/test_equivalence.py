"""Two one-sided tests, Fieller's interval and a permutation test, beside their formulas."""

import numpy as np
import pytest
from scipy import stats

from alibi.reporting.equivalence import agreement, equivalence, share_of_use
from alibi.reporting.intervals import Sample


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
    found = equivalence(sample(*own), sample(*reference), margin)
    assert found.verdict == verdict
    paired = np.array(own) - reference
    above = stats.ttest_1samp(paired, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(paired, margin, alternative="less").pvalue
    assert (max(above, below) < 0.05) == (verdict == "equivalent")
    low, high = stats.t.interval(0.9, 2, paired.mean(), stats.sem(paired))
    assert (found.low, found.high) == pytest.approx((low, high))


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


def test_rankings_agree_or_do_so_by_chance():
    random = np.random.default_rng(0)
    one = np.arange(6.0)[:, None] + random.normal(0, 0.01, (6, 3))
    tau, p = agreement(one, 10 - one, permutations=500)
    assert tau == pytest.approx(-1)
    assert p < 0.02
    tau, p = agreement(random.normal(size=(6, 3)), one, permutations=500)
    assert p > 0.05
