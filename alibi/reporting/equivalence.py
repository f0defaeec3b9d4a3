"""Runs beside a reference: equivalence within a margin, and shares of its gain.

Both are paired by seeds, with Student's t. Three seeds decide little: what they can't decide is
undecided.
"""

import dataclasses
from typing import Literal

import numpy as np
import scipy  # its functions are imported when first used, and a training uses none
from jaxtyping import Float

from alibi.reporting.intervals import SEEDS, Interval, Sample, difference
from alibi.reporting.panels import Panel
from alibi.reporting.tables import Content, Kind, Missing, Number, Table, perplexity

Verdict = Literal["equivalent", "lower", "higher", "undecided"]
OFFSET = Kind("Difference", "{:+.4f}".format, write_plain="{:+.6g}".format)
USE = Kind("Share of the reference's gain", "{:.0%}".format)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The run with which a report compares the others.

    Attributes:
      name: the run's name in tables.
      margin: largest difference that does not matter, in nats per token for perplexity, else in the
        unit of the table.
    """

    name: str
    margin: float


def equivalence(one: Sample, reference: Sample, margin: float) -> tuple[Interval, Verdict] | None:
    """Returns the 90% interval of the difference between two means, and the verdict of two one-sided
    tests at 5% each (Schuirmann 1987, doi 10.1007/BF01068419). None if no seeds are common.

    The means are equivalent if the interval lies within the margin. Else the first is lower or higher
    if the interval does not hold zero.

    Args:
      margin: largest difference that does not matter, in units of the means, above 0.

    Example:
      >>> seeds = (0, 1, 2)
      >>> one, other = (Sample(seeds, np.array([[a], [a + 0.01], [a]]), np.ones(1, int)) for a in (1, 1.001))
      >>> equivalence(one, other, margin=0.02)[1]
      'equivalent'
    """
    interval = difference(one, reference, outside=0.05)
    if interval is None:
        return None
    low, high = interval.bounds
    if -margin < low and high < margin:
        return interval, "equivalent"
    if low <= 0 <= high:
        return interval, "undecided"
    return interval, "lower" if high < 0 else "higher"


def share_of_use(
    gains: Float[np.ndarray, " seeds"], reference: Float[np.ndarray, " seeds"]
) -> tuple[float, tuple[float, float] | None]:
    """Returns the mean gain divided by the reference's, and the ratio's 95% interval (Fieller 1954, doi
    10.1111/j.2517-6161.1954.tb00159.x). There is no interval for a single seed, or if the reference
    may gain nothing.

    Args:
      gains, reference: a number for each common seed.
    """
    share, count = float(gains.mean() / reference.mean()), len(gains)
    if count < 2:
        return share, None
    covariance = np.cov(gains, reference) / count
    t = float(-scipy.special.stdtrit(count - 1, 0.025))
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


def comparison(panel: Panel, reference: Reference) -> Table | None:
    """Returns a table of each run's difference from the reference, with a verdict. None if the panel
    lacks the reference, or its numbers have no sample.
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
        f"within ±{reference.margin:g} by two one-sided tests at 5%, paired by seeds and text"
        + "; share of its gain ± Fieller's 95% interval over seeds." * is_gain
        + "." * (not is_gain),
        label_header=("run", *panel.measure.labels),
        labels=tuple(lines),
        header=tuple(panel.columns),
        cells=tuple(cells),
        parts=parts,
        ratios=False,
    )


def _compared(own: Content, other: Content, margin: float, is_gain: bool) -> tuple[Content, ...]:
    """Returns the difference and the verdict for a cell, and for a gain its share."""
    empty = (None,) * (3 if is_gain else 2)
    if not isinstance(own, Number) or not isinstance(other, Number):
        return empty
    if own.sample is None or other.sample is None:
        return empty
    tested = equivalence(own.sample, other.sample, margin)
    if tested is None:
        return (None, Missing("not paired"), None)[: len(empty)]
    interval, verdict = tested
    found = Number((sum(interval.bounds) / 2,), OFFSET, interval=interval), Missing(verdict)
    if not is_gain:
        return found
    by_seed = dict(zip(own.sample.seeds, own.values, strict=False))
    pairs = [
        (by_seed[seed], value)
        for seed, value in zip(other.sample.seeds, other.values, strict=False)
        if seed in by_seed
    ]
    if not pairs:  # n-grams have no seeds
        return *found, None
    share, bounds = share_of_use(*np.array(pairs).T)
    return *found, Number((share,), USE, interval=bounds and Interval(*bounds, (SEEDS,)))
