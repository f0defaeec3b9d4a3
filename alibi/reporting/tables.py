"""A table as typed data: a cell holds numbers, each with its kind, or says why it has none; lengths are numbers.

`alibi.reporting.writers` makes text of it.
"""

import dataclasses
import enum
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence

TIMES = "\N{MULTIPLICATION SIGN}"
# What stands after ± in tables, and what bands and bars of several seeds show.
SPREAD = "mean and standard deviation over seeds"


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a number is and how it is written; of a loss the lowest is best, and it differs by a number, not a share."""

    title: str
    write: Callable[[float], str]
    is_loss: bool = False


def write_perplexity(value: float) -> str:
    """Two decimals as in the paper; none from a thousand on, powers of ten from a million on."""
    if value < 999.995:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 999_999.5 else f"{value:.1e}"


def write_thousands(value: float) -> str:
    """28.5k from a thousand on, as the paper prints words per second, updates and hours; else three digits."""
    return f"{value / 1e3:,.1f}k" if value >= 1e3 else f"{value:.3g}"


def write_millions(value: float) -> str:
    """247M; a decimal below ten."""
    return f"{value / 1e6:.0f}M" if value >= 1e7 else f"{value / 1e6:.1f}M"


def write_ratio(value: float) -> str:
    """Two decimals, none from a hundred on: ×1.02, ×143."""
    return TIMES + (f"{value:.2f}" if value < 99.995 else f"{value:,.0f}")


PERPLEXITY = Kind("Perplexity", write_perplexity, is_loss=True)
BITS_PER_BYTE = Kind("Bits per byte", "{:.3f}".format, is_loss=True)
CONTEXT_GAIN = Kind("Nats gained by context", "{:+.4f}".format)
ACCURACY = Kind("Keys found again", "{:.0%}".format)
# Of the paper's tables besides; speeds are tokens per second and device.
EVALUATION_SPEED = Kind("Evaluation speed", write_thousands)
WORDS_PER_SECOND = Kind("Words per second of the evaluation", "{:.0f}".format)
TRAINING_SPEED = Kind("Training speed", write_thousands)
MEMORY = Kind("Memory of a device, the most in training", lambda value: f"{value / 1e9:.1f} GB")
PARAMETERS = Kind("Parameters", write_millions)
UPDATES = Kind("Updates", write_thousands)
DEVICE_HOURS = Kind("Device-hours of training", write_thousands)


@dataclasses.dataclass(frozen=True)
class Number:
    """One number of a cell."""

    values: tuple[float, ...]  # one for each seed
    kind: Kind
    ratio: float | None = None  # to the number that the table compares this one with; None where there is none
    best: bool = False  # whether it is the best number of its column
    printed: str = ""  # its text as published, of a number of the paper
    interval: tuple[float, float] | None = None  # that holds a single value with a probability of 95%

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over the seeds; None for a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def span(self) -> tuple[float, float]:
        """What a figure's bar covers: the interval, or the mean with its deviation on both sides."""
        deviation = self.deviation or 0.0
        return self.interval or (self.mean - deviation, self.mean + deviation)

    @property
    def text(self) -> str:
        """The number without its ratio, with its deviation or interval."""
        spread = "" if self.deviation is None else f" ± {self.kind.write(self.deviation).removeprefix('+')}"
        if self.interval is not None:
            spread = " [{}, {}]".format(*map(self.kind.write, self.interval))
        return (self.printed or self.kind.write(self.mean)) + spread


class Absence(enum.Enum):
    """Why a cell has no number."""

    NOT_RUN_HERE = "not run here"  # a system that this project doesn't have
    NOT_RUN_YET = "not run yet"
    PUBLISHED = "published"  # the paper has a word in place of a number, such as OOM
    LIMIT = "limit"  # the method or the text has no such length
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Missing:
    """A cell without a number; `why` is the paper's word, or what a note below the table says."""

    absence: Absence
    why: str = ""

    @property
    def note(self) -> str:
        """What a note says; "" where the cell says it all."""
        return self.why if self.absence in (Absence.LIMIT, Absence.FAILED) else ""

    @property
    def text(self) -> str:
        return self.why or self.absence.value


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a number is from another; `share`: as a share of that one."""

    value: float
    share: bool

    @property
    def text(self) -> str:
        """The difference with its sign: +3% of a share, else two decimals and none from a hundred on: +0.07, -1,234."""
        if self.share:
            return f"{100 * self.value:+,.0f}%"
        return f"{self.value:+.2f}" if abs(self.value) < 99.995 else f"{self.value:+,.0f}"


@dataclasses.dataclass(frozen=True)
class Length:
    """A length of the paper, in tokens as it prints them, and the one that stands for it here."""

    printed: str
    paper: int
    here: int


# Words and lengths of the paper, such as "ALiBi, L = 512 (32)".
Label = tuple[str | Length, ...]
# Of a row or column: a text, a length in tokens, or a label.
Heading = str | int | Label
Part = Number | Missing | Difference | None
# One part, or several side by side; None where one has nothing to say.
Cell = tuple[Part, ...]
Grid = Sequence[Sequence[Part]]  # one part of each cell, by row and column


def related(grid: Grid, references: Mapping[tuple[int, int], tuple[int, int]]) -> list[list[Part]]:
    """The same, each number with its ratio to that of its reference (row, column), and the best of a column marked.

    Best is the lowest loss where a column has several.
    """
    columns = [[part for part in column if isinstance(part, Number)] for column in zip(*grid, strict=True)]
    losses = [[number.mean for number in column if number.kind.is_loss] for column in columns]

    def with_relations(part: Part, row: int, column: int) -> Part:
        if not isinstance(part, Number):
            return part
        at = references.get((row, column))
        reference = grid[at[0]][at[1]] if at else None
        ratio = part.mean / reference.mean if isinstance(reference, Number) and reference.mean else None
        several = part.kind.is_loss and len(losses[column]) > 1
        return dataclasses.replace(part, ratio=ratio, best=several and part.mean == min(losses[column]))

    return [[with_relations(part, i, j) for j, part in enumerate(row)] for i, row in enumerate(grid)]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table: columns of labels, which name the rows, and columns of cells."""

    caption: str  # what the numbers are
    label_header: tuple[Heading, ...]
    labels: tuple[tuple[Heading, ...], ...]  # by row
    header: tuple[Heading, ...]  # above the columns of cells
    cells: tuple[tuple[Cell, ...], ...]  # by row and column
    parts: tuple[str, ...] = ()  # what stands side by side in each cell; () where it is a single number
    ratios: bool = True  # whether numbers are written with their ratios
    scale: str = ""  # of the paper's experiments; "" where they are not the paper's
    name: str = "extrapolation"  # by which LaTeX refers to the table

    @functools.cached_property
    def notes(self) -> list[str]:
        """What is written below the table: why numbers are missing, each reason once, in reading order."""
        parts = (part for row in self.cells for cell in row for part in cell)
        return list(dict.fromkeys(part.note for part in parts if isinstance(part, Missing) and part.note))
