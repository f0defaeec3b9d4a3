"""Whether runs are as good as a reference: equivalence within a margin, shares of its gain, and the
agreement of two rankings.

Each is over seeds, paired by them, with Student's t: three seeds decide little, and what they can't
decide is called undecided.
"""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit
from scipy.stats import kendalltau

from alibi.reporting.intervals import Sample, difference

Verdict = Literal["equivalent", "lower", "higher", "undecided"]


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """The result of two one-sided tests at 5% each (Schuirmann 1987, doi 10.1007/BF01068419).

    Attributes:
      difference: the mean less the reference's.
      low, high: its 90% interval, over what is known: seeds, and parts of the text.
      verdict: equivalent if the interval lies within the margin; lower or higher if it lies beyond
        zero and not within the margin; else undecided.
    """

    difference: float
    low: float
    high: float
    verdict: Verdict


def equivalence(one: Sample, reference: Sample, margin: float) -> Equivalence | None:
    """Returns the two one-sided tests of `one` against `reference`; None if nothing is paired.

    Args:
      margin: largest difference that does not matter, in units of the means, above 0.

    Example:
      >>> seeds = (0, 1, 2)
      >>> one, other = (Sample(seeds, np.array([[a], [a + 0.01], [a]]), np.ones(1, int)) for a in (1, 1.001))
      >>> equivalence(one, other, margin=0.02).verdict
      'equivalent'
    """
    found = difference(one, reference, outside=0.05)
    if found is None:
        return None
    low, high = found.bounds
    verdict: Verdict = "undecided"
    if -margin < low and high < margin:
        verdict = "equivalent"
    elif high < 0 or low > 0:
        verdict = "lower" if high < 0 else "higher"
    return Equivalence((low + high) / 2, low, high, verdict)


def share_of_use(
    gains: Float[np.ndarray, " seeds"], reference: Float[np.ndarray, " seeds"]
) -> tuple[float, tuple[float, float] | None]:
    """Returns the mean gain over the reference's mean gain, and its 95% interval (Fieller 1954, doi
    10.1111/j.2517-6161.1954.tb00159.x); None in its place if the reference's gain may be zero, or of
    a single seed.

    Args:
      gains, reference: of the same seeds.
    """
    share, count = float(gains.mean() / reference.mean()), len(gains)
    if count < 2:
        return share, None
    covariance = np.cov(gains, reference) / count
    t = float(-stdtrit(count - 1, 0.025))
    (own, both), (_, other) = covariance
    g = t**2 * other / reference.mean() ** 2
    if g >= 1:
        return share, None
    # the roots of (mean gain - share x mean reference)^2 = t^2 var(gain - share x reference)
    a = reference.mean() ** 2 - t**2 * other
    b = gains.mean() * reference.mean() - t**2 * both
    c = gains.mean() ** 2 - t**2 * own
    root = float(np.sqrt(max(b**2 - a * c, 0.0)))
    return share, (float((b - root) / a), float((b + root) / a))


def agreement(
    one: Float[np.ndarray, "runs seeds"],
    other: Float[np.ndarray, "runs seeds"],
    permutations: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Returns Kendall's tau between the runs' means by two measures, and the share of permutations of
    the runs, drawn for each seed on its own, with a tau at least as far from zero.

    Args:
      one, other: the same runs and seeds by each measure.
    """
    random = np.random.default_rng(seed)

    def tau(values: Float[np.ndarray, "runs seeds"]) -> float:
        return float(kendalltau(values.mean(axis=1), other.mean(axis=1)).statistic)

    found = tau(one)
    drawn = [tau(random.permuted(one, axis=0)) for _ in range(permutations)]
    extreme = sum(abs(value) >= abs(found) - 1e-12 for value in drawn)
    return found, (1 + extreme) / (1 + permutations)
