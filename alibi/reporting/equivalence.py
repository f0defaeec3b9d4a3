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

from alibi.reporting.intervals import SEEDS, TEXT, Interval, Sample, difference
from alibi.reporting.panels import Panel
from alibi.reporting.tables import Content, Kind, Missing, Number, Table, perplexity

Verdict = Literal["equivalent", "lower", "higher", "undecided"]


# of differences in units of which means are taken, and of a share of another run's gain
OFFSET = Kind("Difference", "{:+.4f}".format, write_plain="{:+.6g}".format)
USE = Kind("Share of the reference's gain", "{:.0%}".format)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The run with which a report compares the others.

    Attributes:
      name: of the run in tables, without its seed.
      margin: largest difference that does not matter, in nats per token, or in the units of a table
        that is not of perplexity.
    """

    name: str
    margin: float


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


def comparison(panel: Panel, reference: Reference) -> Table | None:
    """Returns a table of the differences between a panel's runs and the reference, with a verdict for
    each; None if the panel has no such run, or no numbers with a sample.
    """
    by_line = {(one.label, one.labels): one.cells for one in panel.series}
    is_gain = panel.kind.is_gain
    lines, cells = [], []
    for one in panel.series:
        others = by_line.get((reference.name, one.labels), {})
        if one.label == reference.name or not others:
            continue
        lines.append((one.label, *one.labels))
        pairs = [(one.cells.get(column), others.get(column)) for column in panel.columns]
        cells.append(tuple(_compared(*pair, reference.margin, is_gain) for pair in pairs))
    if not any(part for line in cells for cell in line for part in cell):
        return None
    unit = "nats per token" if panel.kind.of_mean is perplexity else panel.kind.title.lower()
    parts = ("difference", "verdict", "share of its gain") if is_gain else ("difference", "verdict")
    return Table(
        caption=f"Against {reference.name}: {panel.kind.title}, difference in {unit} ± its 90% interval; equivalent "
        f"within ±{reference.margin:g} by two one-sided tests at 5%, paired by seeds and text.",
        label_header=("run", *panel.measure.labels),
        labels=tuple(lines),
        header=tuple(panel.columns),
        cells=tuple(cells),
        parts=parts,
        ratios=False,
    )


def _compared(own: Content, other: Content, margin: float, is_gain: bool) -> tuple[Content, ...]:
    """Returns the contents of a cell: the difference, the verdict, and of a gain its share."""
    empty = (None,) * (3 if is_gain else 2)
    if not isinstance(own, Number) or not isinstance(other, Number):
        return empty
    if own.sample is None or other.sample is None:
        return empty
    samples = own.sample, other.sample
    tested = equivalence(own.sample, other.sample, margin)
    if tested is None:
        return (None, Missing("not paired"), None)[: len(empty)]
    bounds = Interval(tested.low, tested.high, (SEEDS, TEXT))
    found = Number((tested.difference,), OFFSET, interval=bounds), Missing(tested.verdict)
    if not is_gain:
        return found
    of_own, of_other = (
        dict(zip(sample.seeds, each.values, strict=True))
        for sample, each in zip(samples, (own, other), strict=True)
    )
    seeds = [seed for seed in of_own if seed in of_other]
    share, limits = share_of_use(
        *(np.array([values[seed] for seed in seeds]) for values in (of_own, of_other))
    )
    return *found, Number((share,), USE, interval=limits and Interval(*limits, (SEEDS,)))
