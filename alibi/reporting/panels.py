"""Panels of comparable results, grouped from rows, and their tables."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from alibi.reporting import tables
from alibi.reporting.intervals import Sample, part_sizes, share_interval
from alibi.reporting.measure import EVALUATORS, Measure, measure_of
from alibi.reporting.names import grouped, series_names
from alibi.reporting.rows import Entry, Heading, Row, frozen, latest, warn_once
from alibi.reporting.tables import Content, Kind, Missing, Number, Table, fact, related


@dataclasses.dataclass(frozen=True)
class Series:
    """Runs that differ in their seed only: a line of a table, with a cell for each column."""

    label: str
    position: str
    train_length: int
    cells: Mapping[Any, Content]
    labels: tuple[Heading, ...] = ()  # from the evaluator, besides the run's name


@dataclasses.dataclass(frozen=True)
class Panel:
    """Results that may be compared: from one evaluator with the same options, on the same text."""

    measure: Measure
    corpus: str
    split: str
    kind: Kind
    series: tuple[Series, ...]
    rows: tuple[Row, ...]  # in all series, in the order of their cells
    has_best: bool = True  # the lowest number of a column is the best: see `_are_comparable`

    @property
    def reading(self) -> str:
        """How the text is read unless each token sees the tokens before it: documents that don't
        see each other, masks.
        """
        facts = fact(
            "documents that don't see each other, positions {}",
            (row.documents for row in self.rows if row.documents),
        )
        masks = fact(
            "{}",
            (_described(row.objective) for row in self.rows if row.objective),
        )
        return "; ".join(filter(None, [facts, masks]))

    @property
    def columns(self) -> list[Any]:
        return sorted({column for series in self.series for column in series.cells})

    @property
    def marks(self) -> dict[tuple[str, ...], str]:
        return tables.spread_marks(self.numbers)

    @property
    def numbers(self) -> Iterator[Number]:
        cells = (cell for series in self.series for cell in series.cells.values())
        return (cell for cell in cells if isinstance(cell, Number))


def _described(objective: Mapping[str, Any]) -> str:
    """Returns a row's objective in words: its name, unless the kind of number has it, and its options."""
    options = [
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in objective.items()
        if key != "name"
    ]
    named = objective["name"] != "masked" or not options
    return ", ".join([f"{objective['name']} alone"] * named + options)


def panel_groups(rows: Iterable[Row]) -> list[tuple[Panel, ...]]:
    """Groups rows into panels, and panels from the same rows together: perplexities with bits per byte. A
    later row of a cell replaces earlier rows.

    The groups have the evaluators' order in the registry, then that of their first rows. Each loss has
    its ratio to its series's number at the train length. The best in a column is marked
    (`alibi.reporting.tables.is_best`), unless numbers per token are from several tokenizers. Rows that
    their evaluator can't show are left out with a warning.
    """
    rows = latest(rows)
    names = series_names(rows)  # from all rows, so that a run has one name in all panels
    order = {name: index for index, name in enumerate(EVALUATORS)}
    by_panel = grouped(filter(_is_shown, rows), _panel_key)
    groups = []
    for group in sorted(
        by_panel.values(), key=lambda group: order.get(group[0].evaluator, len(order))
    ):
        measure = measure_of(group[0])
        entries: dict[tuple, Entry] = {}
        for entry in itertools.chain.from_iterable(map(measure.entries, group)):
            # if two rows have the same place, such as two sets of lengths, the last number counts
            cell = entry.row.tested, entry.labels, entry.column
            if entry.results or cell not in entries:
                entries[cell] = entry
        panels = [
            _panel(measure, [*entries.values()], kind, names) for kind in measure.kinds_of(group[0])
        ]
        groups.append(tuple(one for one in panels if one is panels[0] or any(one.numbers)))
    return groups


def _is_shown(row: Row) -> bool:
    """Returns whether the row's evaluator can show it: one from outside may be absent, or changed."""
    try:
        measure_of(row).entries(row)
    except Exception as error:  # its code may raise anything
        warn_once(
            f"the report leaves out rows of {row.evaluator}: "
            f"{error if isinstance(error, ValueError) else repr(error)}"
        )
        return False
    return True


def _panel_key(row: Row) -> tuple:
    measured = row.evaluator, frozen(row.options), row.evaluator_code, measure_of(row).alike(row)
    objective = row.objective and frozen(row.objective)
    return row.corpus, row.split, *measured, row.documents, objective


def _panel(
    measure: Measure, entries: Sequence[Entry], kind: Kind, names: Mapping[tuple, str]
) -> Panel:
    """Returns a panel, with the relations of its numbers."""
    label_order = {names[entry.row.tested]: None for entry in entries}
    numbers = {label: index for index, label in enumerate(label_order)}
    by_line = grouped(
        entries,
        lambda entry: (
            *(names[entry.row.tested], entry.row.position, entry.row.train_length),
            entry.labels,
        ),
    )
    lines = sorted(by_line, key=lambda line: (numbers[line[0]], line[-1]))
    by_column = [grouped(by_line[line], lambda entry: entry.column) for line in lines]
    columns = sorted(set().union(*by_column))
    grid = [
        [make_cell(seeds[column], kind) if column in seeds else None for column in columns]
        for seeds in by_column
    ]
    is_relative = kind.is_loss and measure.is_by_length
    references = {
        (i, j): (i, columns.index(length))
        for i, (_, _, length, _) in enumerate(lines)
        if is_relative and length in columns
        for j in range(len(columns))
    }
    comparable = _are_comparable(entries, kind)
    cells = related(grid, references, mark=comparable)
    series = tuple(
        Series(*line[:3], dict(zip(columns, row_cells, strict=True)), line[3])
        for line, row_cells in zip(lines, cells, strict=True)
    )
    in_order = {
        id(entry.row): entry.row
        for line in lines
        for entry in sorted(by_line[line], key=lambda entry: entry.column)
    }
    row, rows = entries[0].row, tuple(in_order.values())
    return Panel(measure, row.corpus, row.split, kind, series, rows, comparable)


def make_cell(entries: Sequence[Entry], kind: Kind) -> Number | Missing:
    """Returns the number of `entries`, with a value for each seed, or the reason for its absence."""
    assert kind.value is not None, kind
    measured = [entry for entry in entries if entry.row.is_measured]
    pairs = [(entry, value) for entry in measured if (value := kind.value(entry)) is not None]
    if pairs:
        with_value, values = zip(*pairs, strict=True)
        interval = sample = None
        seeds = tuple(entry.row.seed for entry in with_value if entry.row.is_trained)
        if kind.trials:
            trials = min(entry.results[kind.trials] for entry in with_value)
            interval = share_interval(values, trials, f"the {kind.trials}")
        elif kind.mean and None not in (means := [kind.mean(entry) for entry in with_value]):
            sample = _sample(with_value, means, kind, seeds)
            interval = sample.interval
        bounds = interval and interval.of(kind.of_mean)
        return Number(values, kind, interval=bounds, sample=sample, seeds=seeds)
    if measured:
        return Missing(f"{kind.title.lower()} {kind.missing}", is_reason=True)
    return Missing(entries[0].row.error or "no result", is_reason=True)


def _sample(
    entries: Sequence[Entry],
    means: Sequence[float | None],
    kind: Kind,
    seeds: tuple[int, ...],
) -> Sample:
    """Returns the means for each seed, and for each part if all entries have the same parts of a text."""
    parts = [entry.results.get("parts") or () for entry in entries]
    texts = {
        (entry.row.tokens_sha256, entry.results["tokens"], len(of_seed))
        for entry, of_seed in zip(entries, parts, strict=True)
        if of_seed
    }
    if not all(parts) or len(texts) > 1:
        return Sample(seeds, np.array(means)[:, None], np.ones(1, int))
    first, sums = entries[0].results, np.array(parts)
    # parts of a gain are of whole windows
    size = first.get("tokens_of_window", 1)
    sizes = np.array(
        first.get("tokens_of_parts") or size * part_sizes(first["tokens"] // size, sums.shape[1])
    )
    if kind.mean_of_parts:
        summed = np.array([kind.mean_of_parts(entry) for entry in entries], float)
        sums *= (np.array(means, float) / summed)[:, None]
    return Sample(seeds, sums, sizes, texts.pop())


def _are_comparable(entries: Sequence[Entry], kind: Kind) -> bool:
    """Returns whether the lowest number is the best: per byte, or per token of one tokenizer."""
    texts = {
        entry.row.tokens_sha256 or entry.results.get("tokens")
        for entry in entries
        if entry.row.is_measured
    }
    return not kind.is_per_token or len(texts) < 2


def build_table(panel: Panel) -> Table:
    """Returns a table with a line per series and a column per length, or with the evaluator's own
    labels and columns.
    """
    labels = panel.measure.labels
    return Table(
        caption=caption(panel),
        label_header=("run", *(labels or ("trained at L",))),
        labels=tuple(
            (one.label, *(one.labels if labels else (one.train_length or "",)))
            for one in panel.series
        ),
        header=tuple(panel.columns),
        cells=tuple(
            tuple((one.cells.get(column),) for column in panel.columns) for one in panel.series
        ),
        ratios=panel.kind.is_loss and panel.measure.is_by_length,
        marks=panel.marks,
    )


def caption(panel: Panel) -> str:
    """Returns the facts about the numbers: the evaluator's, seeds, steps, `origin`, and what ± is."""
    rows = [row for row in panel.rows if row.is_measured]
    trained = [row for row in rows if row.is_trained]
    dirty = sum("-dirty" in (row.commit or "") for row in rows)
    facts = [
        *panel.measure.facts(panel),
        fact("seed {}", (row.seed for row in trained)),
        fact("step {}", (f"{row.step:,}" for row in trained)),
        *origin(rows),
        fact("{} of its rows from uncommitted code", [str(dirty)] * bool(dirty)),
    ]
    return f"{'; '.join(filter(None, facts))}. {tables.spread_note(panel.marks)}".rstrip()


def origin(rows: Sequence[Row]) -> list[str]:
    """Returns the facts where and when rows were made, as far as they are known: commit, devices
    with the host's processor, version of JAX, days.
    """
    devices = (
        f"{row.device.kind} x{row.device.count}" + (f" ({row.processor})" if row.processor else "")
        for row in rows
        if row.device
    )
    days = sorted({row.date.partition("T")[0] for row in rows if row.date})
    return [
        fact("commit {}", (row.short_commit for row in rows if row.commit)),
        fact("on {}", devices),
        fact("jax {}", (row.jax for row in rows if row.jax)),
        fact("{}", [days[0], days[-1]] if days else [], " to "),
    ]
