"""Intervals hold the truth of simulated seeds and texts, whose dependence is known, as often as they
say.
"""

import numpy as np
import pytest
from scipy.stats import binomtest, t, ttest_1samp

from alibi.reporting.intervals import (
    PARTS,
    SEEDS,
    TEXT,
    Sample,
    difference,
    interval,
    part_sizes,
    part_sums,
    share_interval,
)

ONES = np.ones(PARTS, int)
TIMES = 500  # simulations: a share of 0.95 is known to 0.019 (95%)


def texts(correlation, seed=0):
    """Mean 0 by part of TIMES texts: an autoregression of first order, [times, parts]."""
    noise = np.random.default_rng(seed).normal(size=(TIMES, PARTS + 50))
    for part in range(1, PARTS + 50):
        noise[:, part] += correlation * noise[:, part - 1]
    return noise[:, 50:]


def coverage(samples):
    """The share of intervals that hold 0, the truth; `samples` have a row for each seed."""
    return np.mean([one.low <= 0 <= one.high for one in [interval(sums, ONES) for sums in samples]])


@pytest.mark.parametrize(
    ("correlation", "least", "independent"),
    [(0.0, 0.93, 0.95), (0.3, 0.92, 0.85), (0.6, 0.88, 0.67)],
)
def test_the_interval_of_a_text_allows_for_dependent_neighbours(correlation, least, independent):
    """The variance of the mean is (1 + rho) / (1 - rho) times that of independent parts, so their
    interval holds the mean only as often as a normal number is within 1.96 sqrt((1 - rho) / (1 + rho)).
    """
    found = texts(correlation)
    as_if = np.abs(ttest_1samp(found, 0, axis=1).statistic) < t.ppf(0.975, PARTS - 1)
    assert np.mean(as_if) == pytest.approx(independent, abs=0.03)
    assert least <= coverage(found[:, None]) <= 0.98


@pytest.mark.parametrize(("seeds", "of_seeds"), [(2, 0.0), (3, 0.5)])
def test_the_interval_of_several_seeds_covers_them_and_the_text(seeds, of_seeds):
    """Parts vary by 1, so the mean of a text by 1/8; seeds by less, by as much, or by more."""
    random = np.random.default_rng(1)
    own = random.normal(0, of_seeds, (TIMES, seeds, 1))
    rest = random.normal(0, 0.3, (TIMES, seeds, PARTS))
    samples = texts(0.2)[:, None] + own + rest
    assert 0.92 <= coverage(samples) <= 0.995
    if of_seeds == 0.5:
        assert coverage(samples.mean(axis=1)[:, None]) < 0.75, "the text alone"
    if of_seeds == 0.0:
        assert np.mean(ttest_1samp(samples.mean(axis=2), 0, axis=1).pvalue > 0.05) < 0.8


def students(*values):
    """The ends of the interval of single numbers."""
    return ttest_1samp(values, 0).confidence_interval()


OF_BOTH = np.hypot(t.ppf(0.975, 1) * 1.0, t.ppf(0.975, 1) * 1.5)


@pytest.mark.parametrize(
    ("sums", "tokens", "bounds", "covers"),
    [
        ([[8], [9], [10]], [1], students(8, 9, 10), (SEEDS,)),
        ([[1, 4]], [1, 1], students(1, 4), (TEXT,)),  # two parts are two blocks
        # of several seeds and parts the squares of half-widths add
        ([[1, 4], [3, 6]], [1, 1], (3.5 - OF_BOTH, 3.5 + OF_BOTH), (SEEDS, TEXT)),
        ([[6, 2]], [3, 1], (2, 2), (TEXT,)),  # parts at equal cost have no spread
    ],
)
def test_of_independent_parts_it_is_students_interval(sums, tokens, bounds, covers):
    """Over the seeds, and over blocks of parts, which count by their tokens."""
    found = interval(np.array(sums, float), np.array(tokens))
    assert found.bounds == pytest.approx(bounds)
    assert found.covers == covers


def test_a_single_value_has_no_interval():
    """Drawn again and again it is always the same, which is no certainty."""
    assert interval(np.ones((1, 1)), np.ones(1, int)) is None
    assert interval(np.array([[5.0, 0.0]]), np.array([10, 0])) is None, "one part has tokens"


def test_many_parts_are_merged():
    """The interval of 50,000 windows is that of 64 parts, with Student's t of their 16 blocks."""
    sums = np.random.default_rng(4).normal(1.0, 2.0, 50_000)
    found = interval(sums[None], np.ones(50_000, int))
    assert found == interval(part_sums(sums)[None], part_sizes(50_000))
    error = 2.0 / np.sqrt(50_000)
    assert found.high - sums.mean() == pytest.approx(t.ppf(0.975, 15) * error, rel=0.4)


@pytest.mark.parametrize("count", [1, 5, 63, 64, 65, 1000])
def test_parts_hold_each_value_once_and_are_as_equal_as_can_be(count):
    values = np.arange(count, dtype=np.float32)
    sizes = part_sizes(count)
    assert sizes.sum() == count
    assert sizes.max() - sizes.min() <= 1
    assert sizes.size == min(count, PARTS)
    assert part_sums(values).sum() == values.sum(dtype=np.float64)
    assert part_sums(values)[-1] == values[count - sizes[-1] :].sum()


def sample(sums, seeds, text=("a text",)):
    sums = np.asarray(sums, float)
    return Sample(tuple(seeds), sums, np.ones(sums.shape[1], int), text)


def test_differences_are_paired_by_seed_and_by_part():
    """Hard parts and bad seeds are common to both, and cancel."""
    hard = np.random.default_rng(0).normal(5, 3, (1, PARTS)) + np.array([[0.0], [2.0], [4.0]])
    saved = np.random.default_rng(1).normal(0.1, 0.01, (3, PARTS))
    one, other = sample(hard, (0, 1, 2)), sample(hard + saved, (0, 1, 2))
    assert interval(one.sums, one.tokens).high > 6
    found = difference(one, other)
    assert -0.12 < found.low < -0.1 < found.high + 0.01 < -0.07
    assert found.covers == (SEEDS, TEXT)
    # The order of seeds does not matter, and seeds of one side alone are left out.
    again = sample(np.roll(hard + saved, 1, axis=0), (2, 0, 1))
    assert difference(one, again).bounds == pytest.approx(found.bounds)
    assert difference(sample(hard[:1], [1]), other).covers == (TEXT,)
    # Other tokens have other parts, so there only seeds are paired.
    apart = difference(one, sample(hard + saved, (0, 1, 2), ("another text",)))
    assert apart.bounds == pytest.approx(ttest_1samp(-saved.mean(axis=1), 0).confidence_interval())
    assert difference(one, sample(hard, (3, 4, 5))) is None
    assert difference(sample(hard[:1], [0], None), sample(hard[:1], [0], None)) is None


def test_an_n_gram_is_paired_with_every_seed_of_a_model():
    """It has no seed, so one seed of the model must not speak for all."""
    hard = np.random.default_rng(0).normal(5, 3, (1, PARTS))
    model = sample(hard + np.array([[-0.2], [0.1], [0.3]]), (0, 1, 2))
    found = difference(model, sample(hard, ()))
    means = np.array([-0.2, 0.1, 0.3])
    assert found.covers == (SEEDS, TEXT)
    assert found.bounds == pytest.approx(ttest_1samp(means, 0).confidence_interval())
    assert difference(sample(hard, ()), model).bounds == pytest.approx((-found.high, -found.low))
    assert difference(sample(hard, ()), sample(hard + 1, ())).covers == (TEXT,)


def test_a_share_has_wilsons_interval():
    for found in (0, 1, 30, 199, 200):
        low, high = binomtest(found, 200).proportion_ci(method="wilson")
        assert share_interval([found / 200], 200).bounds == pytest.approx((low, high), abs=1e-12)
    assert share_interval([1.0], 200, "the prompts").covers == ("the prompts",)


def test_seeds_of_equal_shares_are_no_certainty():
    """Each seed answers the same prompts, so the prompts' part stays however many seeds there are."""
    low, high = binomtest(200, 200).proportion_ci(method="wilson")
    assert share_interval([1.0] * 3, 200).bounds == pytest.approx((low, high))
    found = share_interval([0.4, 0.5, 0.6], 200, "the prompts")
    low, high = binomtest(100, 200).proportion_ci(method="wilson")
    over_seeds = t.ppf(0.975, 2) * 0.1 / 3**0.5
    assert found.bounds == pytest.approx(
        (0.5 - np.hypot(0.5 - low, over_seeds), 0.5 + np.hypot(high - 0.5, over_seeds))
    )
    assert found.covers == (SEEDS, "the prompts")
    assert share_interval([0.0, 1.0], 200).bounds == (0.0, 1.0)
