"""The report of a directory: its rows -> results.jsonl, report.md, report.html, figures and tables for the terminal."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from alibi.reporting import tables
from alibi.reporting.curves import RunSource
from alibi.reporting.recorded import ROWS_FILE, merge_rows
from alibi.reporting.rows import ContextUse, Row, latest
from alibi.reporting.tables import PERPLEXITY, Absence, Kind, Missing, Number, Part, Table, related
from alibi.reporting.writers import to_markdown, to_text
from alibi.storage.store import Store, open_store

Key = TypeVar("Key")

REPORT_FILE = "report.md"
FIGURE_FILE = "extrapolation.png"
CONTEXT_FIGURE_FILE = "context_use.png"
PASSKEY_FIGURE_FILE = "passkey.png"
PAGE_FILE = "report.html"

_KEYS = re.compile(r"-(?=L\d+(?:-|$)|[A-Za-z_]\w*=)")  # before each key of a run's name

# What a row holds of the numbers that tables show.
VALUES: Mapping[Kind, Callable[[Row], float | None]] = {
    PERPLEXITY: lambda row: row.perplexity,
    tables.BITS_PER_BYTE: lambda row: row.bits_per_byte,
    tables.EVALUATION_SPEED: lambda row: row.speed_of_device,
    tables.WORDS_PER_SECOND: lambda row: row.speed_of_device,
    tables.ACCURACY: lambda row: None if row.passkey is None else row.passkey.accuracy,
    tables.CONTEXT_GAIN: lambda row: None if row.context_use is None else row.context_use.gain_nats,
}


@dataclasses.dataclass(frozen=True)
class Series:
    """One method over the lengths: runs that differ only in their seed; cells by evaluation length in tokens."""

    label: str
    position: str
    train_length: int
    cells: Mapping[int, Part]


@dataclasses.dataclass(frozen=True)
class Panel:
    """Results that may be compared: of the same corpus, split and windows."""

    corpus: str
    split: str
    stride: int | None  # of sliding windows; None: they don't overlap, the stride is the length
    kind: Kind
    series: tuple[Series, ...]
    rows: tuple[Row, ...]  # of all series, each by length
    use: ContextUse | None = None  # of gains of context: how many windows, and from which length; without values

    @property
    def lengths(self) -> list[int]:
        return sorted({length for series in self.series for length in series.cells})

    @property
    def numbers(self) -> Iterator[Number]:
        cells = (cell for series in self.series for cell in series.cells.values())
        return (cell for cell in cells if isinstance(cell, Number))

    @property
    def has_seeds(self) -> bool:
        """Whether there is a number of several seeds."""
        return any(number.deviation is not None for number in self.numbers)


def panels(rows: Iterable[Row], kind: Kind = PERPLEXITY) -> list[Panel]:
    """Groups `rows` into panels, each in order of first appearance; a later row replaces an earlier one of its cell.

    Each number has its ratio to the one of its series at the train length, and is marked where it is the lowest.
    """
    found = []
    rows = latest(rows)
    names = series_names(rows)  # of all rows, so that a run has one name in all panels
    rows = [row for row in rows if (row.context_use is not None) == (kind is tables.CONTEXT_GAIN)]
    rows = [row for row in rows if row.passkey is None]
    for (corpus, split, stride, use), group in _grouped(rows, _panel_key).items():
        by_series = _grouped(group, lambda row: (names[row.series], row.position, row.train_length))
        in_order = (row for runs in by_series.values() for row in sorted(runs, key=lambda row: row.eval_length))
        found.append(Panel(corpus, split, stride, kind, _make_series(by_series, kind), tuple(in_order), use))
    return found


def series_names(rows: Iterable[Row]) -> dict[str, str]:
    """What tables and figures call each `Row.series`: its run's name without the keys that all runs share.

    Of names as sweeps make them, METHOD-L128-KEY=VALUE, the train length is left out where there is one, and keys where
    all have the same value; names of other forms stay, as do all where the short ones would not be distinct.
    """
    rows = list(rows)
    names = {row.series: _KEYS.split(row.series.partition(" ")[0]) for row in rows}
    shared = set.intersection(*map(set, names.values())) if len(names) > 1 else set()
    if len({row.train_length for row in rows}) == 1:
        shared.add(f"L{rows[0].train_length}")
    short = {}
    for series, (method, *keys) in names.items():
        _, space, override = series.partition(" ")
        short[series] = "-".join([method, *(key for key in keys if key not in shared)]) + space + override
    return short if len({*short.values()}) == len(short) else {series: series for series in short}


def _make_series(by_series: Mapping[tuple[str, str, int], Sequence[Row]], kind: Kind) -> tuple[Series, ...]:
    """The series of a panel, whose numbers are related: to their own at the train length, and in each column."""
    by_length = [_grouped(rows, lambda row: row.eval_length) for rows in by_series.values()]
    lengths = sorted(set().union(*by_length))
    grid = [[make_cell(seeds[length], kind) if length in seeds else None for length in lengths] for seeds in by_length]
    own = {i: lengths.index(length) for i, (_, _, length) in enumerate(by_series) if length in lengths}
    references = {(i, j): (i, own[i]) for i in own for j in range(len(lengths))}
    named = zip(by_series, related(grid, references), strict=True)
    return tuple(Series(*name, dict(zip(lengths, cells, strict=True))) for name, cells in named)


def _panel_key(row: Row) -> tuple[str, str, int | None, ContextUse | None]:
    use = row.context_use and row.context_use.tokens
    return row.corpus, row.split, None if row.mode == "nonoverlapping" else row.stride, use


def _grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def make_cell(rows: Sequence[Row], kind: Kind) -> Number | Missing:
    """The number of those of `rows`, one a seed, that have one, else why there is none."""
    measured = [row for row in rows if row.is_measured]
    values = tuple(value for row in measured if (value := VALUES[kind](row)) is not None)
    if values:
        use = measured[0].context_use
        return Number(values, kind, interval=use.interval if use is not None and len(values) == 1 else None)
    if measured:
        why = "too large to write" if kind is PERPLEXITY else "is not known"
        return Missing(Absence.FAILED, f"{kind.title.lower()} {why}")
    return Missing(Absence.LIMIT if rows[0].limit else Absence.FAILED, rows[0].error or "no result")


def build_table(panel: Panel) -> Table:
    """One line a series, one column a length."""
    return Table(
        caption=caption(panel),
        label_header=("run", "trained at L"),
        labels=tuple((series.label, series.train_length) for series in panel.series),
        header=tuple(panel.lengths),
        cells=tuple(tuple((series.cells.get(length),) for length in panel.lengths) for series in panel.series),
        ratios=panel.use is None,
    )


def passkey_tables(rows: Iterable[Row]) -> list[Table]:
    """One line a series and length of windows, one column a distance of the key; no table where none was measured."""
    rows = latest(rows)
    names = series_names(rows)
    found = [row for row in rows if row.passkey is not None]
    if not found:
        return []
    lines = _grouped(found, lambda row: (names[row.series], row.eval_length))
    order = [*dict.fromkeys(name for name, _ in lines)]
    sorted_lines = sorted(lines.items(), key=lambda line: (order.index(line[0][0]), line[0][1]))
    by_distance = {line: _grouped(group, _distance) for line, group in sorted_lines}
    columns = sorted(set().union(*by_distance.values()))
    facts = [
        fact("{} prompts in each cell", (row.passkey.prompts for row in found if row.passkey), " or "),
        fact("trained at {}", (row.train_length for row in found)),
        fact("seed {}", (row.seed for row in found)),
        fact("step {}", (f"{row.step:,}" for row in found)),
    ]
    return [
        Table(
            caption="; ".join([f"{tables.ACCURACY.title}, by tokens from the key to its answer", *facts]) + ".",
            label_header=("run", "window"),
            labels=tuple(by_distance),
            header=tuple(columns),
            cells=tuple(
                tuple((make_cell(cells[column], tables.ACCURACY) if column in cells else None,) for column in columns)
                for cells in by_distance.values()
            ),
            ratios=False,
        )
    ]


def _distance(row: Row) -> int:
    return row.passkey.distance if row.passkey is not None else 0


def caption(panel: Panel) -> str:
    """What the numbers are: kind, corpus, split, windows, tokens scored, seeds, steps, commit and device."""
    sliding = panel.stride is not None
    windows = f"sliding windows, stride {panel.stride:,}" if sliding else "non-overlapping windows (stride = length)"
    if panel.use is not None:
        windows = (
            f"the last {panel.stride:,} tokens of {panel.use.windows:,} windows, the same at each length, against what "
            f"they cost at {panel.use.from_length:,}"
        )
        if panel.use.longest:
            windows += f", at ends of windows of {panel.use.longest:,}"
    rows = [row for row in panel.rows if row.is_measured]
    facts = [
        fact("{} tokens scored in each cell", (f"{row.tokens:,}" for row in rows), " or "),
        fact("seed {}", (row.seed for row in rows)),
        fact("step {}", (f"{row.step:,}" for row in rows)),
        fact("commit {}", (row.short_commit for row in rows if row.commit)),
        fact("on {}", (row.device.text for row in rows if row.device)),
    ]
    text = f"{panel.kind.title} by evaluation length: {panel.corpus}, split {panel.split}, {windows}"
    return "; ".join([text, *filter(None, facts)]) + "."


def fact(template: str, values: Iterable, separator: str = ", ") -> str:
    """`template` with the distinct `values`; "" without any."""
    distinct = list(dict.fromkeys(values))
    return template.format(separator.join(map(str, distinct))) if distinct else ""


def explanation(panel: Panel) -> str:
    """How to read the cells."""
    if panel.use is not None:
        text = (
            "Nats a token that the same tokens save by the longer windows: above zero where the model uses the longer "
            "context, zero where it only survives it."
        )
        if any(number.interval for number in panel.numbers):
            text += " In brackets: the 95% interval of a single run, by resampling windows."
    else:
        text = "In brackets: the value divided by the run's own at its train length. The best of each column is marked."
    return text + (f" ±: {tables.SPREAD}." if panel.has_seeds else "")


def failed_runs(failures: Mapping[str, str]) -> str:
    """A Markdown list of why runs failed, by their names; each reason on one line."""
    lines = (f"- {name}: {' '.join(reason.split())}\n" for name, reason in failures.items())
    return "Runs that failed:\n\n" + "".join(lines)


def write_report(
    directory: str | os.PathLike | Store,
    title: str = "Extrapolation",
    failures: Mapping[str, str] | None = None,
    runs: Sequence[RunSource] = (),
) -> str:
    """Writes results.jsonl of the rows in `directory`, report.md, report.html and figures; returns the text tables.

    There is one figure a panel: the first panel's is extrapolation.png; those of further
    panels (other splits, strides, corpora) have a suffix. `failures`, reasons by run, are listed
    at the end. `runs` are those whose commands, configs and training curves the page has.
    Without rows and failures nothing is written.
    """
    store = open_store(directory)
    rows = merge_rows(store)
    if not rows and not failures:
        return f"no results in {store}/{ROWS_FILE} yet\n"
    from alibi.reporting import page, plots  # matplotlib: two seconds that an evaluation without a report need not wait

    markdown, text = [f"# {title}\n"], []
    measured, gains, passkeys = measured_panels(rows), panels(rows, tables.CONTEXT_GAIN), passkey_tables(rows)
    for index, kinds in enumerate(measured):
        figure = FIGURE_FILE if index == 0 else f"extrapolation-{_suffix(kinds[0])}.png"
        with store.made(figure) as file:
            plots.draw_extrapolation(kinds[0], file)
        for table in map(build_table, kinds):
            markdown.append(to_markdown(table))
            text.append(to_text(table))
        markdown += [explanation(kinds[0]) + "\n", f"![perplexity by evaluation length]({figure})\n"]
        text.append(f"figure: {store}/{figure}\n")
    for index, panel in enumerate(gains):
        figure = CONTEXT_FIGURE_FILE if index == 0 else f"context_use-{index + 1}.png"
        with store.made(figure) as file:
            plots.draw_context_use(panel, file)
        table = build_table(panel)
        markdown += [to_markdown(table), explanation(panel) + "\n", f"![nats gained by context]({figure})\n"]
        text += [to_text(table), f"figure: {store}/{figure}\n"]
    for table in passkeys:
        with store.made(PASSKEY_FIGURE_FILE) as file:
            plots.draw_passkeys(table, file)
        markdown += [to_markdown(table), f"![keys found again, by distance]({PASSKEY_FIGURE_FILE})\n"]
        text += [to_text(table), f"figure: {store}/{PASSKEY_FIGURE_FILE}\n"]
    if failures:
        markdown.append(failed_runs(failures))
    store.write(REPORT_FILE, "\n".join(markdown))
    store.write(PAGE_FILE, page.make_page(title, measured, gains, passkeys, rows, failures or {}, runs))
    return "\n".join([*text, f"report: {store}/{REPORT_FILE}, {store}/{PAGE_FILE}\n"])


def measured_panels(rows: Sequence[Row]) -> list[tuple[Panel, ...]]:
    """Of each corpus, split and windows the perplexities, and bits per byte where the text's bytes are known."""
    pairs = zip(panels(rows), panels(rows, tables.BITS_PER_BYTE), strict=True)
    return [pair if any(row.bits_per_byte is not None for row in pair[0].rows) else pair[:1] for pair in pairs]


def _suffix(panel: Panel) -> str:
    stride = "" if panel.stride is None else f"-stride{panel.stride}"
    return re.sub(r"[^\w.-]+", "_", f"{panel.corpus}-{panel.split}{stride}")
