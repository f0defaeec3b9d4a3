"""A table as typed data: a cell holds numbers, each with its kind, or the reason for a missing
number.

`alibi.reporting.writers` makes text of it.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from alibi.reporting.intervals import Interval, Sample, difference
from alibi.reporting.rows import Entry, Heading

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of a number."""

    title: str
    write: Callable[[float], str]
    is_gain: bool = False  # the share of another run's number has a meaning
    is_loss: bool = False  # the lowest is best, and differences are numbers, not shares
    merit: int = 1  # whether a higher number is better (1), worse (-1) or neither (0)
    write_plain: Callable[[float], str] = "{:.6g}".format  # for programs
    # makes the number from a mean over tokens, such as perplexity from nats
    of_mean: Callable[[float], float] = float
    # an entry's number, or None if no evaluator measures this kind
    value: Callable[[Entry], float | None] | None = None
    # the number in units of which means are taken, for an interval over the text
    mean: Callable[[Entry], float | None] | None = None
    # the number of which a result's `parts` are sums; defaults to `mean`
    mean_of_parts: Callable[[Entry], float | None] | None = None
    trials: str = ""  # the result that counts the trials of a share, for an interval over them
    missing: str = "is not known"  # why a result lacks this number
    is_per_token: bool = True  # not comparable between tokenizers
    axis: str = ""  # what stands after the title at the axis of a chart
    # the axis of a chart, as Vega-Lite's `scale`
    scale: Mapping[str, object] = dataclasses.field(default_factory=dict, compare=False)


def write_perplexity(value: float) -> str:
    """Returns two decimals as in the paper, none from a thousand on, powers of ten from a million on."""
    if value < 999.995:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 999_999.5 else f"{value:.1e}"


def write_thousands(value: float) -> str:
    """Returns 28.5k from a thousand on, as the paper prints words per second, updates and hours, else
    three digits.
    """
    return f"{value / 1e3:,.1f}k" if value >= 1e3 else f"{value:.3g}"


def write_millions(value: float) -> str:
    """Returns 247M, with a decimal below ten."""
    return f"{value / 1e6:.0f}M" if value >= 1e7 else f"{value / 1e6:.1f}M"


def write_ratio(value: float) -> str:
    """Returns two decimals, none from a hundred on: ×1.02, ×143."""
    return TIMES + (f"{value:.2f}" if value < 99.995 else f"{value:,.0f}")


def write_difference(value: float) -> str:
    """Returns the sign and two decimals, none from a hundred on: +0.07, -1,234."""
    return f"{value:+.2f}" if abs(value) < 99.995 else f"{value:+,.0f}"


def perplexity(nats: float) -> float:
    """Returns exp(nats), within float64."""
    return math.exp(min(nats, 709.0))


def result(name: str) -> Callable[[Entry], float | None]:
    """Returns a function that takes the result `name` of an entry."""
    return lambda entry: entry.results.get(name)


def mean_kind(title: str, write: Callable[[float], str], name: str, **others: Any) -> Kind:
    """Returns the kind of a mean over a text, which is the result `name` of `mean_results`."""
    return Kind(title, write, value=result(name), mean=result(name), **others)


def nats_per_token(entry: Entry) -> float | None:
    """Returns the mean NLL of the scored tokens."""
    nats, tokens = entry.results.get("nll_nats"), entry.results.get("tokens")
    return None if nats is None or not tokens else nats / tokens


def speed_of_device(entry: Entry) -> float | None:
    """Returns the tokens per second of a single device."""
    rate, device = entry.results.get("tokens_per_second"), entry.row.device
    return rate and rate / (device.count if device else 1)


PERPLEXITY = Kind(
    "Perplexity",
    write_perplexity,
    is_loss=True,
    merit=-1,
    of_mean=perplexity,
    value=result("perplexity"),
    mean=nats_per_token,
    missing="too large to write",
    axis=" (log scale)",
    scale={"type": "log"},
)
PSEUDO_PERPLEXITY = dataclasses.replace(PERPLEXITY, title="Pseudo-perplexity of masked tokens")
BITS_PER_BYTE = Kind(
    "Bits per byte",
    "{:.3f}".format,
    is_loss=True,
    merit=-1,
    value=result("bits_per_byte"),
    mean=result("bits_per_byte"),
    mean_of_parts=nats_per_token,
    is_per_token=False,
    axis=" (log scale)",
    scale={"type": "log"},
)
# Those of the paper's tables; speeds are tokens per second and device.
EVALUATION_SPEED = Kind("Evaluation speed", write_thousands, value=speed_of_device)
WORDS_PER_SECOND = Kind(
    "Words per second of the evaluation", "{:.0f}".format, value=speed_of_device
)
TRAINING_SPEED = Kind("Training speed", write_thousands)
MEMORY = Kind("Memory of a device, the most in training", lambda value: f"{value / 1e9:.1f} GB")
PARAMETERS = Kind("Parameters", write_millions)
UPDATES = Kind("Updates", write_thousands)
DEVICE_HOURS = Kind("Device-hours of training", write_thousands)
# Differences of a number from another; a share is relative to the other.
DIFFERENCE = Kind("Difference", write_difference, write_plain="{:+.4g}".format)
SHARE = Kind("Relative difference", "{:+,.0%}".format, write_plain="{:+.4g}".format)


@dataclasses.dataclass(frozen=True)
class Number:
    """A number of a cell."""

    values: tuple[float, ...]  # a value for each seed
    kind: Kind
    ratio: float | None = None  # to the reference number, if there is one
    best: bool = False  # whether it is the best number of its column
    printed: str = ""  # the published text of a number of the paper
    interval: Interval | None = None  # the mean's
    # what `interval` follows from, in units in which means are taken; pairs with other numbers
    sample: Sample | None = dataclasses.field(default=None, compare=False, repr=False)
    # the seeds of `values`, empty if they have none
    seeds: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def text(self) -> str:
        """The number without its ratio, ± the larger side of its interval."""
        text = self.printed or self.kind.write(self.mean)
        if self.interval is None:
            return text
        half = max(self.interval.high - self.mean, self.mean - self.interval.low)
        return f"{text} ± {self.kind.write(half).removeprefix('+')}"


def fact(template: str, values: Iterable, separator: str = ", ") -> str:
    """Returns `template` with the distinct `values`, or "" if there are none."""
    distinct = list(dict.fromkeys(values))
    return template.format(separator.join(map(str, distinct))) if distinct else ""


def spread_of(numbers: Iterable[Number]) -> str:
    """Returns in words which intervals `numbers` have, or "" if they have none."""
    covered = dict.fromkeys(number.interval.covers for number in numbers if number.interval)
    return "95% interval " + " or ".join(map(_over, covered)) if covered else ""


def _over(sources: tuple[str, ...]) -> str:
    return "over " + " and ".join(sources) + " alone" * (len(sources) == 1)


def spread_marks(numbers: Iterable[Number]) -> dict[tuple[str, ...], str]:
    """Returns a mark for each set of sources that an interval covers: none for the largest, then †, ††."""
    kinds = {number.interval.covers for number in numbers if number.interval}
    in_order = sorted(kinds, key=lambda covers: (-len(covers), covers))
    return {covers: "†" * rank for rank, covers in enumerate(in_order)}


def spread_note(marks: Mapping[tuple[str, ...], str]) -> str:
    """Returns a sentence that says what ± covers in a table, or "" if it stands nowhere."""
    spread = ", ".join(f"{mark} {_over(covers)}".strip() for covers, mark in marks.items())
    note = (
        f"±: the larger side of the 95% interval {spread}; another book or corpus is not covered."
    )
    return note if marks else ""


@dataclasses.dataclass(frozen=True)
class Missing:
    """A cell without a number."""

    text: str  # a word, such as the paper's OOM, or the reason
    is_reason: bool = False  # it stands below the table, and its number in the cell


Content = Number | Missing | None
Cell = tuple[Content, ...]  # one, or several side by side, some of them None
Grid = Sequence[Sequence[Content]]  # a part of each cell, by row and column


def related(
    grid: Grid, references: Mapping[tuple[int, int], tuple[int, int]], *, mark: bool = True
) -> list[list[Content]]:
    """Returns the grid, each number with its ratio to its reference (row, column), and with `mark`
    the best of a column marked, see `is_best`.
    """
    columns = [
        [content for content in column if isinstance(content, Number) and content.kind.is_loss]
        for column in zip(*grid, strict=True)
    ]

    def with_relations(content: Content, row: int, column: int) -> Content:
        if not isinstance(content, Number):
            return content
        at = references.get((row, column))
        reference = grid[at[0]][at[1]] if at else None
        ratio = (
            content.mean / reference.mean
            if isinstance(reference, Number) and reference.mean
            else None
        )
        best = mark and content.kind.is_loss and is_best(content, columns[column])
        return dataclasses.replace(content, ratio=ratio, best=best)

    return [
        [with_relations(content, i, j) for j, content in enumerate(row)]
        for i, row in enumerate(grid)
    ]


def is_best(number: Number, column: Sequence[Number]) -> bool:
    """Returns whether a loss is the lowest in its column, beyond chance unless the paper printed it: the
    95% interval for its difference from each other lies below zero.

    Equal numbers, such as a result that a table shows twice, are the best together.
    """
    others = [other for other in column if other.values != number.values]
    if not others or number.mean > min(other.mean for other in others):
        return False
    return bool(number.printed) or all(_is_surely_lower(number, other) for other in others)


def _is_surely_lower(one: Number, other: Number) -> bool:
    if one.sample is None or other.sample is None:
        return False
    between = difference(one.sample, other.sample)
    return between is not None and between.high < 0


@dataclasses.dataclass(frozen=True)
class Table:
    """A table: columns with labels, which name the rows, and columns with cells."""

    caption: str  # the facts about the numbers
    label_header: tuple[Heading, ...]
    labels: tuple[tuple[Heading, ...], ...]  # by row
    header: tuple[Heading, ...]  # above the columns of cells
    cells: tuple[tuple[Cell, ...], ...]  # by row and column
    parts: tuple[str, ...] = ()  # names of the parts of each cell; () for a single number
    ratios: bool = True  # whether numbers are written with their ratios
    # from `spread_marks`, for the numbers of `cells`
    marks: Mapping[tuple[str, ...], str] = dataclasses.field(default_factory=dict)
    scale: str = ""  # the experiments', in a table of the paper
    name: str = "extrapolation"  # the label in LaTeX

    @functools.cached_property
    def notes(self) -> dict[str, str]:
        """The reasons for missing numbers, each with its mark, such as [1], in reading order."""
        parts = [content for row in self.cells for cell in row for content in cell]
        missing = [
            content for content in parts if isinstance(content, Missing) and content.is_reason
        ]
        reasons = dict.fromkeys(content.text for content in missing)
        return {reason: f"[{index}]" for index, reason in enumerate(reasons, start=1)}


def compare(
    grid: Sequence[Sequence[tuple[Content, Content]]],
    references: Mapping[tuple[int, int], tuple[int, int]],
    *,
    ratios: bool,
) -> tuple[tuple[Cell, ...], ...]:
    """Returns cells (paper, ours, difference), empty where the paper's table has an empty cell.

    With `ratios`, values can't be compared (another corpus, another model): a difference is between
    the two values' ratios to their references.
    """
    paper, ours = (
        related([[cell[side] for cell in row] for row in grid], references) for side in (0, 1)
    )
    return tuple(
        tuple(
            (theirs, mine, _difference(theirs, mine, ratios, references.get((i, j)) == (i, j)))
            for j, (theirs, mine) in enumerate(zip(*rows, strict=True))
        )
        for i, rows in enumerate(zip(paper, ours, strict=True))
    )


def _difference(paper: Content, ours: Content, ratios: bool, is_reference: bool) -> Number | None:
    """Returns the difference between the values, or between their ratios, None for a reference itself."""
    if not isinstance(paper, Number) or not isinstance(ours, Number):
        return None
    if not ratios and not ours.kind.is_loss:
        return Number((ours.mean / paper.mean - 1,), SHARE)
    if not ratios:
        return Number((ours.mean - paper.mean,), DIFFERENCE)
    if paper.ratio is None or ours.ratio is None or is_reference:
        return None
    return Number((ours.ratio - paper.ratio,), DIFFERENCE)
