"""Rows grouped for reading: a panel is one way to evaluate, a series in it one method over the lengths."""

import dataclasses
import re
import statistics
from collections.abc import Iterable, Sequence

from alibi.reporting.rows import Row, is_measured, latest


@dataclasses.dataclass(frozen=True)
class Cell:
    """One series at one length: the rows of its seeds."""

    rows: tuple[Row, ...]

    @property
    def error(self) -> str | None:
        """Why there is no number, if no seed gave one."""
        return None if self.measured() else (self.rows[0].get("error") or "no result")

    def measured(self) -> list[Row]:
        return [row for row in self.rows if is_measured(row)]

    def values(self, metric: str) -> list[float]:
        """`metric` of each seed that has it, such as "perplexity" or "bits_per_byte"."""
        return [row[metric] for row in self.measured() if row[metric] is not None]

    def mean(self, metric: str) -> float | None:
        values = self.values(metric)
        return statistics.fmean(values) if values else None

    def deviation(self, metric: str) -> float | None:
        """Sample standard deviation over the seeds; None for a single one."""
        values = self.values(metric)
        return statistics.stdev(values) if len(values) > 1 else None


@dataclasses.dataclass(frozen=True)
class Series:
    """Runs that differ only in their seed, by evaluation length in tokens."""

    label: str
    position: str
    train_length: int
    cells: dict[int, Cell]

    def mean(self, metric: str, eval_length: int) -> float | None:
        return self.cells[eval_length].mean(metric) if eval_length in self.cells else None

    def ratio(self, metric: str, eval_length: int) -> float | None:
        """The value at `eval_length` over the value at the series' own train length; None without both."""
        value, own = self.mean(metric, eval_length), self.mean(metric, self.train_length)
        return value / own if value is not None and own else None


@dataclasses.dataclass(frozen=True)
class Panel:
    """Results that may be compared: same corpus, split and mode, and for sliding windows the same stride."""

    corpus: str
    split: str
    mode: str
    stride: int | None  # None: the stride is the length (non-overlapping)
    series: tuple[Series, ...]

    @property
    def lengths(self) -> list[int]:
        return sorted({length for series in self.series for length in series.cells})

    def rows(self) -> list[Row]:
        return [row for series in self.series for cell in series.cells.values() for row in cell.rows]

    def best(self, metric: str, eval_length: int) -> float | None:
        """The lowest mean at `eval_length`; None where fewer than two series have one."""
        means = [mean for series in self.series if (mean := series.mean(metric, eval_length)) is not None]
        return min(means) if len(means) > 1 else None


def panels(rows: Iterable[Row]) -> list[Panel]:
    """Groups `rows` into panels, each in order of first appearance; a later row replaces an earlier one of its cell."""
    groups: dict[tuple, list[Row]] = {}
    for row in latest(rows):
        stride = None if row["mode"] == "nonoverlapping" else row["stride"]
        groups.setdefault((row["corpus"], row["split"], row["mode"], stride), []).append(row)
    return [
        Panel(corpus, split, mode, stride, tuple(_series(group)))
        for (corpus, split, mode, stride), group in groups.items()
    ]


def seedless(run: str) -> str:
    """The run's name without its seed: alibi-L128-seed0 becomes alibi-L128."""
    return re.sub(r"(^|[-_.])seed=?\d+", "", run).strip("-_.") or run


def _series(rows: Sequence[Row]) -> list[Series]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((seedless(row["run"]), row["position"], row["train_length"]), []).append(row)
    return [
        Series(label, position, train_length, _cells(group))
        for (label, position, train_length), group in groups.items()
    ]


def _cells(rows: Sequence[Row]) -> dict[int, Cell]:
    cells: dict[int, list[Row]] = {}
    for row in rows:
        cells.setdefault(row["eval_length"], []).append(row)
    return {length: Cell(tuple(cells[length])) for length in sorted(cells)}
