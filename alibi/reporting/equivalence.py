"""Runs beside a reference: equivalence within a margin, shares of its gain, and whether two measures
rank the runs alike.

All are paired by seeds. Three seeds decide little: what they can't decide is undecided.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import scipy  # its functions are imported when first used, and a training uses none
from jaxtyping import Float

from alibi.reporting.intervals import SEEDS, Interval, Sample, difference, interval
from alibi.reporting.panels import Panel
from alibi.reporting.tables import (
    BITS_PER_BYTE,
    PERPLEXITY,
    Content,
    Kind,
    Missing,
    Number,
    Table,
    perplexity,
    spread_marks,
    spread_note,
)

Verdict = Literal["equivalent", "lower", "higher", "undecided"]
OFFSET = Kind("Difference", "{:+.4f}".format, write_plain="{:+.6g}".format)
USE = Kind("Share of the reference's gain", "{:.0%}".format)
TAU = Kind("Kendall's tau", "{:+.2f}".format)
CHANCE = Kind("p", "{:.3f}".format)
COUNT = Kind("Count", "{:,.0f}".format)
MOST_ENUMERATED = 7  # runs whose permutations are all tried: 5,040
DRAWN = 10_000  # permutations of more runs


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
    offset = difference(one, reference, outside=0.05)
    if offset is None:
        return None
    low, high = offset.bounds
    if -margin < low and high < margin:
        return offset, "equivalent"
    if low <= 0 <= high:
        return offset, "undecided"
    return offset, "lower" if high < 0 else "higher"


def share_of_use(
    gains: Float[np.ndarray, " seeds"], reference: Float[np.ndarray, " seeds"]
) -> tuple[float, tuple[float, float] | None]:
    """Returns the ratio of the mean gain to the reference's, and its 95% interval (Fieller 1954, doi
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
    (of_gains, both), (_, of_reference) = covariance
    g = t**2 * of_reference / reference.mean() ** 2
    if g >= 1:
        return share, None
    # the roots of (mean gain - share x mean reference)^2 = t^2 var(gain - share x reference)
    a = reference.mean() ** 2 - t**2 * of_reference
    b = gains.mean() * reference.mean() - t**2 * both
    c = gains.mean() ** 2 - t**2 * of_gains
    root = float(np.sqrt(max(b**2 - a * c, 0.0)))
    return share, (float((b - root) / a), float((b + root) / a))


def agreement(
    one: Float[np.ndarray, "runs seeds"], other: Float[np.ndarray, "runs seeds"]
) -> tuple[Float[np.ndarray, " seeds"], float]:
    """Returns Kendall's tau-b between the runs' numbers under two measures, for each seed, and p.

    p is the share of the runs' permutations in which the mean tau is at least as far from zero. The
    seeds of a run move together, since they are no independent runs. All permutations of up to 7 runs
    are tried, else 10,000 are drawn.

    Args:
      one, other: numbers of the same runs and seeds, under each measure.

    Example:
      >>> echoes, tasks = np.array([[0.1], [0.2], [0.4]]), np.array([[0.5], [0.7], [0.9]])
      >>> agreement(echoes, tasks)
      (array([1.]), 0.333...)
    """
    # which run of each pair is higher
    above, above_other = (np.sign(values[:, None] - values) for values in (one, other))
    untied = np.sum(above**2, axis=(0, 1)) * np.sum(above_other**2, axis=(0, 1))

    def taus(order: Sequence[int]) -> Float[np.ndarray, " seeds"]:
        agreeing = np.sum(above[np.ix_(order, order)] * above_other, axis=(0, 1))
        return agreeing / np.sqrt(np.maximum(untied, 1))

    runs = range(len(one))
    orders: Iterable[Sequence[int]] = itertools.permutations(runs)
    if len(runs) > MOST_ENUMERATED:
        random = np.random.default_rng(0)
        orders = [runs, *(random.permutation(len(runs)).tolist() for _ in range(DRAWN - 1))]
    observed = taus(runs)
    far = [abs(taus(order).mean()) > abs(observed.mean()) - 1e-9 for order in orders]
    return observed, float(np.mean(far))


def rankings(panels: Sequence[Panel]) -> Table | None:
    """Returns a table of how far each other measure ranks the runs as perplexity at the longest length
    does. None if no measure has three runs and a seed in common with perplexity.

    The perplexity is that of the measure's own text, or else of the first text.
    """
    texts = [panel for panel in panels if panel.kind is PERPLEXITY and panel.has_best]
    labels, cells = [], []
    for panel in panels if texts else []:
        # the same in other units, or of no merit, such as where a head looks
        if (
            panel.kind in (PERPLEXITY, BITS_PER_BYTE)
            or panel.measure.is_map
            or not panel.kind.merit
        ):
            continue
        own = (panel.corpus, panel.split)
        (text, *_) = [one for one in texts if (one.corpus, one.split) == own] or texts
        longest = text.columns[-1]
        perplexities = {one.label: _by_seed(one.cells.get(longest)) for one in text.series}
        for line in dict.fromkeys(one.labels for one in panel.series):
            alike = [one for one in panel.series if one.labels == line]
            columns = [
                column
                for one in alike
                for column, cell in one.cells.items()
                if isinstance(cell, Number)
            ]
            column = max(columns, default=None)
            pairs = [
                (perplexities.get(one.label, {}), _by_seed(one.cells.get(column))) for one in alike
            ]
            pairs = [pair for pair in pairs if all(pair)]
            seeds = sorted(set.intersection(*map(set, itertools.chain(*pairs)))) if pairs else []
            if len(pairs) < 3 or not seeds:
                continue
            numbers = np.array(
                [[[each[seed] for seed in seeds] for each in pair] for pair in pairs]
            )
            # the signs make higher better
            taus, p = agreement(-numbers[:, 0], panel.kind.merit * numbers[:, 1])
            spread = interval(taus[:, None], np.ones(1, int))
            cells.append(
                (
                    (Number(tuple(taus), TAU, interval=spread, seeds=tuple(seeds)),),
                    (Number((p,), CHANCE),),
                    (Number((len(pairs),), COUNT),),
                    (Number((len(seeds),), COUNT),),
                )
            )
            at = ", ".join(
                f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
                for name, value in zip(
                    (*panel.measure.labels, panel.measure.across), (*line, column), strict=False
                )
            )
            labels.append(
                (panel.kind.title, panel.corpus, at, f"{longest:,} of {text.corpus}, {text.split}")
            )
    if not cells:
        return None
    marks = spread_marks(cell[0][0] for cell in cells)
    return Table(
        caption="Do measures rank the runs as perplexity at the longest length does? Kendall's tau-b, 1 if the "
        "better is always the same, its mean over seeds; p: the share of the runs' permutations, all seeds of a run "
        f"together, with a mean as far from zero. {spread_note(marks)}".rstrip(),
        label_header=("measure", "text", "at", "perplexity at"),
        labels=tuple(labels),
        header=("Kendall's tau", "p", "runs", "seeds"),
        cells=tuple(cells),
        ratios=False,
        marks=marks,
    )


def _by_seed(content: Content) -> dict[int, float]:
    """Returns each seed's value in a cell, none for n-grams, which have no seeds."""
    if not isinstance(content, Number) or not content.seeds:
        return {}
    return dict(zip(content.seeds, content.values, strict=True))


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
        cells.append(tuple(_compared(*pair, reference.margin, panel) for pair in pairs))
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


def _compared(one: Content, other: Content, margin: float, panel: Panel) -> tuple[Content, ...]:
    """Returns the difference and the verdict for a cell, and for a gain its share."""
    is_gain = panel.kind.is_gain
    empty = (None,) * (3 if is_gain else 2)
    if not isinstance(one, Number) or not isinstance(other, Number):
        return empty
    if one.sample is None or other.sample is None:
        return empty
    # in a panel of several tokenizers
    if not panel.has_best and (one.sample.text is None or one.sample.text != other.sample.text):
        return (None, Missing("tokens may differ"), None)[: len(empty)]
    tested = equivalence(one.sample, other.sample, margin)
    if tested is None:
        return (None, Missing("not paired"), None)[: len(empty)]
    offset, verdict = tested
    compared = Number((sum(offset.bounds) / 2,), OFFSET, interval=offset), Missing(verdict)
    if not is_gain:
        return compared
    by_seed, by_seed_other = _by_seed(one), _by_seed(other)
    pairs = [(by_seed[seed], by_seed_other[seed]) for seed in by_seed if seed in by_seed_other]
    if not pairs:  # n-grams have no seeds
        return *compared, None
    share, bounds = share_of_use(*np.array(pairs).T)
    return *compared, Number((share,), USE, interval=bounds and Interval(*bounds, (SEEDS,)))
