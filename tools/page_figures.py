"""The figures that the expressions of a results page can name (in check_pages.py)."""

import csv
import dataclasses
import functools
import itertools
import json
import operator
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy

from alibi.evaluation.task import THRESHOLD
from alibi.paper.definitions import TABLES, load_table, parse_printed, table_quantities
from alibi.reporting.equivalence import agreement, equivalence, share_of_use
from alibi.reporting.intervals import (
    PARTS,
    Sample,
    difference,
    interval,
    part_sizes,
    share_interval,
)
from alibi.reporting.measure import measure_of
from alibi.reporting.panels import make_cell
from alibi.reporting.rows import Row, latest, read_rows
from alibi.reporting.tables import Number

BUILTINS = (abs, all, len, max, min, str, sum)
PAPER = "paper"  # among the files of a page: its lengths are facts, too


class PerSeed:
    """A figure for each seed. Arithmetic and comparisons pair the seeds.

    The page prints the mean, and after "±" the half-width of its 95% t interval. So a difference between
    two figures has the interval of the paired differences. A comparison holds if it does in every seed.
    """

    def __init__(self, seeds: Mapping[int, float]):
        self.seeds = dict(seeds)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seeds.values())

    @property
    def half(self) -> float:
        if len(self.seeds) < 2:
            raise LookupError("one seed has no interval; print it without ±")
        spread = interval(np.array([[*self.seeds.values()]]).T, np.ones(1, int))
        return (spread.high - spread.low) / 2

    def _paired(self, other: "PerSeed | float", of: Callable) -> dict[int, Any]:
        if not isinstance(other, PerSeed):
            return {seed: of(value, other) for seed, value in self.seeds.items()}
        if self.seeds.keys() != other.seeds.keys():
            raise LookupError(f"seeds {sorted(self.seeds)} and {sorted(other.seeds)} are no pairs")
        return {seed: of(value, other.seeds[seed]) for seed, value in self.seeds.items()}

    def __add__(self, other: "PerSeed | float") -> "PerSeed":
        return PerSeed(self._paired(other, operator.add))

    def __sub__(self, other: "PerSeed | float") -> "PerSeed":
        return PerSeed(self._paired(other, operator.sub))

    def __rsub__(self, other: float) -> "PerSeed":
        return self * -1 + other

    def __mul__(self, other: "PerSeed | float") -> "PerSeed":
        return PerSeed(self._paired(other, operator.mul))

    def __truediv__(self, other: "PerSeed | float") -> "PerSeed":
        return PerSeed(self._paired(other, operator.truediv))

    def __lt__(self, other: "PerSeed | float") -> bool:
        return all(self._paired(other, operator.lt).values())

    def __gt__(self, other: "PerSeed | float") -> bool:
        return all(self._paired(other, operator.gt).values())


class Figures:
    """Figures from the rows in a page's folder. `files[0]` holds those that name no `file`.

    Every figure raises LookupError if its row is missing. `series` is `Row.series`. `where` maps row fields
    to values: file, seed, split, step, stride.
    """

    def __init__(self, folder: pathlib.Path, files: Sequence[str]):
        self.folder, self.files = folder, files
        self.facts = facts_of(folder, tuple(files))

    def namespace(self) -> dict[str, Any]:
        """Returns what an expression can name."""
        of_rows = (self.rows, self.series, self.ppl, self.nats, self.bits, self.ratio)
        of_use = (
            self.gain,
            self.gain_interval,
            self.gain_intervals,
            self.margin,
            self.found,
            self.wilson,
            self.right,
            self.effective,
            self.curse,
        )
        of_claims = (self.saved, self.bounds, self.beside, holm, fieller, tau)
        named = (*BUILTINS, *of_rows, *of_use, *of_claims, self.paper, self.paper_ratio, self.ours)
        return {"__builtins__": {}} | {one.__name__: one for one in named}

    def rows(
        self, series: str | None = None, length: int | None = None, file: str = "", **where: Any
    ) -> list[Row]:
        """Returns the rows with these values. `length` is the window's."""
        where |= {"series": series} if series is not None else {}
        where |= {"length": length} if length is not None else {}
        file = file or self.files[0]
        matching = [
            row
            for row in _read(self.folder / file)
            if all(_value(row, key) == value for key, value in where.items())
        ]
        if not matching:
            at = f" at {length}" if length is not None else ""
            raise LookupError(f"no row of {series or 'any series'}{at} in {file}")
        return matching

    def series(self, **where: Any) -> list[str]:
        """Returns the names of all model series that have such rows with results."""
        measured = [row for row in self.rows(**where) if row.is_measured and row.is_trained]
        return [*dict.fromkeys(row.series for row in measured)]

    def _text(
        self, value: Callable[[Row], float], series: str, length: int, **where: Any
    ) -> PerSeed:
        """Returns a figure for the whole text. Windows don't overlap if `where` has no stride."""
        where = {"split": "valid", "stride": length, "evaluator": "perplexity"} | where
        measured = [row for row in self.rows(series, length, **where) if row.is_measured]
        if not measured:
            raise LookupError(f"no result of {series} at {length}")
        return _per_seed(measured, value)

    def ppl(self, series: str, length: int, **where: Any) -> PerSeed:
        """Returns the perplexity of the text."""
        return self._text(lambda row: row.results["perplexity"], series, length, **where)

    def nats(self, series: str, length: int, **where: Any) -> PerSeed:
        """Returns the NLL in nats a token."""
        return self._text(
            lambda row: row.results["nll_nats"] / row.results["tokens"], series, length, **where
        )

    def bits(self, series: str, length: int, **where: Any) -> PerSeed:
        """Returns the bits per byte."""
        return self._text(lambda row: row.results["bits_per_byte"], series, length, **where)

    def ratio(self, series: str, length: int, **where: Any) -> PerSeed:
        """Returns the perplexity over the same run's at its training length."""
        of_file = {"file": where["file"]} if "file" in where else {}
        train_length = self.rows(series, **of_file)[0].train_length
        return self.ppl(series, length, **where) / self.ppl(series, train_length, **where)

    def gain(self, series: str, length: int, **where: Any) -> PerSeed:
        """Returns the gain that windows with `length` tokens have over the shortest ones on the same
        tokens, in nats a token.
        """
        return _per_seed(*self._gains("gain_nats", series, length, where))

    def gain_interval(self, series: str, length: int, **where: Any) -> tuple[float, float]:
        """Returns the 95% interval of one run's gain, over the text's windows."""
        (row,), of = self._gains("interval", series, length, where)
        return of(row)

    def gain_intervals(self, length: int, **where: Any) -> list[tuple[float, float]]:
        """Returns the 95% interval of each run's gain at a length."""
        rows, of = self._gains("interval", None, length, where)
        return [of(row) for row in rows]

    def margin(
        self, series: str, other: str, length: int, start: int = 0, stop: int = PARTS
    ) -> tuple[float, float, float]:
        """Returns the NLL of `series` less that of `other`, one run each, and its 95% interval over the
        text, in nats a token, between these parts of the text.
        """
        where = {"evaluator": "perplexity", "stride": length, "split": "valid"}
        (one,), (two,) = (self.rows(each, length, **where) for each in (series, other))
        sums = np.subtract(one.results["parts"], two.results["parts"])[start:stop]
        tokens = part_sizes(one.results["tokens"])[start:stop]
        offset = interval(sums[None], tokens)
        return sums.sum() / tokens.sum(), *offset.bounds

    def _gains(
        self, name: str, series: str | None, length: int, where: Mapping
    ) -> tuple[list[Row], Callable[[Row], Any]]:
        """Returns the rows with gains at a length, and the function that gives their result `name`."""
        rows = self.rows(series, evaluator="context_use", **where)
        with_gain = [row for row in rows if length in row.results.get("lengths", ())]
        if not with_gain:
            raise LookupError(f"no gain of {series} at {length}")
        return with_gain, lambda row: row.results[name][row.results["lengths"].index(length)]

    def found(self, series: str, length: int, distance: int, **where: Any) -> PerSeed:
        """Returns the share of passkeys found `distance` tokens back, in windows with `length` tokens."""
        where |= {"evaluator": "passkey", "distance": distance}
        return _per_seed(self.rows(series, length, **where), lambda row: row.results["accuracy"])

    def wilson(self, series: str, length: int, distance: int, **where: Any) -> tuple[float, float]:
        """Returns the 95% Wilson interval for one run's share of passkeys."""
        where |= {"evaluator": "passkey", "distance": distance}
        (row,) = self.rows(series, length, **where)
        return share_interval([row.results["accuracy"]], row.results["prompts"]).bounds

    def right(self, series: str, length: int, result: str = "exact", **where: Any) -> PerSeed:
        """Returns the share of a task's examples that are all right, or of `answers` that are right."""
        rows = self.rows(series, length, evaluator="task", **where)
        return _per_seed(rows, lambda row: row.results[result])

    def effective(self, series: str, threshold: float = THRESHOLD, **where: Any) -> int:
        """Returns the length up to which the seeds' mean share of right examples is `threshold` or
        more, 0 if it is less at the shortest.
        """
        lengths = sorted({row.length for row in self.rows(series, evaluator="task", **where)})
        good = itertools.takewhile(
            lambda length: self.right(series, length, **where).mean >= threshold, lengths
        )
        return max(good, default=0)

    def saved(self, series: str, length: int, gap: int, **where: Any) -> PerSeed:
        """Returns the nats a token that an echo `gap` tokens back saves in windows with `length` tokens."""
        rows = self.rows(series, length, evaluator="echo", gap=gap, **where)
        return _per_seed(rows, lambda row: row.results["saved_nats"])

    def bounds(self, series: str, length: int, **where: Any) -> tuple[float, float]:
        """Returns the 95% interval over seeds and text of what the rows measure, perplexity in nats."""
        of_rows = self._sample(series, length, where).interval
        if of_rows is None:
            raise LookupError(f"one number of {series} at {length} has no interval")
        return of_rows.bounds

    def beside(
        self, series: str, other: str, length: int, margin: float = 0, **where: Any
    ) -> tuple[float, float, str]:
        """Returns the interval of one mean less the other over seeds and text, perplexity in nats a
        token, and the verdict: of 90%, with the verdict of two one-sided tests. Without a margin of 95%,
        and which is lower.
        """
        one, two = (self._sample(each, length, where) for each in (series, other))
        if margin:
            tested = equivalence(one, two, margin)
            assert tested is not None, (series, other)
            return *tested[0].bounds, tested[1]
        offset = difference(one, two)
        assert offset is not None, (series, other)
        verdict = "lower" if offset.high < 0 else "higher" if offset.low > 0 else "undecided"
        return *offset.bounds, verdict

    def _sample(self, series: str, length: int, where: Mapping) -> Sample:
        where = {"evaluator": "perplexity"} | where
        if where["evaluator"] == "perplexity":
            where = {"split": "valid", "stride": length} | where
        rows = self.rows(series, length, **where)
        _per_seed(rows, lambda row: 0.0)  # one row a seed
        measure = measure_of(rows[0])
        cell = make_cell(
            [entry for row in rows for entry in measure.entries(row)], measure.kinds[0]
        )
        if not isinstance(cell, Number) or cell.sample is None:
            raise LookupError(f"no result of {series} at {length}")
        return cell.sample

    def curse(self, length: int, longer: int) -> dict[str, Any]:
        """Returns the analysis of the gain from `length`-token to `longer`-token blocks."""
        for line in (self.folder / "early-token-curse/by_context.jsonl").open():
            one = json.loads(line)
            if (one["eval_length"], one.get("longer_length")) == (length, longer):
                return one
        raise LookupError(f"no line of early_token_curse from {length} to {longer}")

    def paper(self, number: int, *cell: str | int) -> float:
        """Returns a number of the paper's table: the row's labels, then the column."""
        table = load_table(number)
        printed = _cell(table.columns, table.rows, cell)
        value = parse_printed(printed)
        if value is None:
            raise LookupError(
                f"the paper prints {printed or 'nothing'} in {', '.join(map(str, cell))}"
            )
        return value

    def paper_ratio(self, number: int, *cell: str | int) -> float:
        """Returns a number in the paper's table over the first in its column."""
        labels = load_table(number).rows[0][: len(cell) - 1]
        return self.paper(number, *cell) / self.paper(number, *labels, cell[-1])

    def ours(self, number: int, *cell: str | int) -> float:
        """Returns our number in the committed table, named as in `paper`."""
        with (self.folder / f"table{number:02d}.csv").open() as file:
            columns, *rows = csv.reader(file)
        columns = [column.removesuffix(": ours") for column in columns[1:]]
        rows = [[cell.partition(" (")[0] for cell in row[1:]] for row in rows]
        return float(_cell(columns, rows, cell))


def holm(**differences: PerSeed) -> dict[str, float]:
    """Returns the p of each mean difference over seeds, two-sided Student's t, adjusted for all of them
    (Holm 1979, doi 10.2307/4615733).

    Example:
      >>> holm(one=PerSeed({0: -1.0, 1: -1.1, 2: -0.9}), two=PerSeed({0: 0.1, 1: -0.2, 2: 0.2}))
      {'one': 0.0066..., 'two': 0.8075...}
    """
    adjusted, least = {}, 0.0
    p = {
        name: float(scipy.stats.ttest_1samp([*one.seeds.values()], 0).pvalue)
        for name, one in differences.items()
    }
    for rank, name in enumerate(sorted(p, key=p.__getitem__)):
        least = max(least, min(1.0, (len(p) - rank) * p[name]))
        adjusted[name] = least
    return adjusted


def fieller(gain: PerSeed, reference: PerSeed) -> tuple[float, float, float]:
    """Returns the share that the mean gain is of the reference's, and its 95% interval over seeds."""
    pairs = [(value, reference.seeds[seed]) for seed, value in gain.seeds.items()]
    share, bounds = share_of_use(*np.array(pairs).T)
    if bounds is None:
        raise LookupError("the share has no interval: one seed, or the reference may gain nothing")
    return share, *bounds


def tau(one: Sequence[PerSeed], other: Sequence[PerSeed]) -> tuple[float, float]:
    """Returns Kendall's tau-b between the means of the same series by two measures, and p over all of
    their orders.
    """
    taus, p = agreement(*(np.array([[each.mean] for each in many]) for many in (one, other)))
    return float(taus.mean()), p


def _value(row: Row, key: str) -> Any:
    """Returns a field's value in a row, its cell or its options. The stride defaults to the length."""
    keys = {"stride": row.length} | row.options | row.cell
    return keys[key] if key in keys else getattr(row, key)


def _per_seed(rows: list[Row], value: Callable[[Row], float]) -> PerSeed:
    seeds = {row.seed: value(row) for row in rows}
    if len(seeds) < len(rows):
        raise LookupError(
            f"{len(rows)} rows of {len(seeds)} seeds; name more, such as split or step"
        )
    return PerSeed(seeds)


def _cell(columns: Sequence[str], rows: Sequence[Sequence[str]], cell: Sequence[str | int]) -> str:
    *labels, column = map(str, cell)
    for row in rows:
        if [*row[: len(labels)]] == labels and column in columns:
            return row[columns.index(column)]
    raise LookupError(f"no cell {', '.join(map(str, cell))}")


@functools.cache
def _read(path: pathlib.Path) -> list[Row]:
    return latest(read_rows(path))


@dataclasses.dataclass(frozen=True)
class Facts:
    """Numbers that describe the measurements, and need no expression."""

    integers: frozenset[int]  # lengths, sizes of texts, parameters, updates, prompts, distances
    multiples: frozenset[float]  # of the training length
    parameters: frozenset[int]
    seeds: frozenset[int]
    strides: frozenset[int]


@functools.cache
def facts_of(folder: pathlib.Path, files: tuple[str, ...]) -> Facts:
    """Returns the facts in the rows of these files. With `PAPER` among them: the lengths in the paper's tables."""
    rows = [row for file in files if file != PAPER for row in _read(folder / file)]
    integers = _paper_lengths() if PAPER in files else set()
    for row in rows:
        integers |= {row.train_length, row.step, row.parameters}
        for content in (row.cell, row.options, row.results):
            whole = (value if isinstance(value, tuple) else (value,) for value in content.values())
            integers |= {one for several in whole for one in several if type(one) is int}
    return Facts(
        frozenset(integers - {None}),
        frozenset(row.length / row.train_length for row in rows if row.is_trained and row.length),
        frozenset(row.parameters for row in rows),
        frozenset(row.seed for row in rows),
        frozenset(row.options.get("stride", row.length) for row in rows),
    )


def _paper_lengths() -> set[int]:
    every = [one for number in TABLES for one in table_quantities(number).values()]
    return {
        length for one in every for length in (one.model.train_length, one.eval_length, one.stride)
    }
