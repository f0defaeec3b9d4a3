"""Tables of perplexity by evaluation length, as Markdown and as plain text for a terminal."""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from alibi.reporting.rows import short_commit
from alibi.reporting.series import Panel, Series


@dataclasses.dataclass(frozen=True)
class Metric:
    """What a table shows of each cell: the row key, its name and how a value is printed."""

    key: str
    title: str
    format: Callable[[float], str]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table as text cells, with a caption above it and notes (errors) below; `best` holds (row, column)."""

    caption: str
    header: tuple[str, ...]
    body: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]]
    notes: tuple[str, ...]


def format_perplexity(value: float) -> str:
    """Two decimals as in the paper; none from a thousand on, powers of ten from a million on."""
    if value < 999.995:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 999_999.5 else f"{value:.1e}"


def format_ratio(value: float) -> str:
    """Two decimals, none from a hundred on: ×1.02, ×143."""
    return "\N{MULTIPLICATION SIGN}" + (f"{value:.2f}" if value < 99.995 else f"{value:,.0f}")


PERPLEXITY = Metric("perplexity", "Perplexity", format_perplexity)
BITS_PER_BYTE = Metric("bits_per_byte", "Bits per byte", "{:.3f}".format)


def build_table(panel: Panel, metric: Metric = PERPLEXITY) -> Table:
    """One line a series, one column a length; each value also as a ratio to the series' value at its train length."""
    lengths = panel.lengths
    notes: list[str] = []
    body, best = [], set()
    for line, series in enumerate(panel.series):
        cells = [series.label, f"{series.train_length:,}"]
        for length in lengths:
            if series.mean(metric.key, length) == panel.best(metric.key, length) is not None:
                best.add((line, len(cells)))
            cells.append(_cell_text(series, length, metric, notes))
        body.append(tuple(cells))
    header = ("run", "trained at L", *(f"{length:,}" for length in lengths))
    return Table(caption(panel, metric), header, tuple(body), frozenset(best), tuple(notes))


def _cell_text(series: Series, length: int, metric: Metric, notes: list[str]) -> str:
    cell = series.cells.get(length)
    if cell is None:
        return ""
    mean = cell.mean(metric.key)
    if mean is None:
        note = cell.error or f"{metric.title.lower()} is not known"
        if note not in notes:
            notes.append(note)
        return f"no result [{notes.index(note) + 1}]"
    deviation, ratio = cell.deviation(metric.key), series.ratio(metric.key, length)
    text = metric.format(mean)
    text += f" ± {metric.format(deviation)}" if deviation is not None else ""
    return text + (f" ({format_ratio(ratio)})" if ratio is not None else "")


def caption(panel: Panel, metric: Metric) -> str:
    """What the numbers are: metric, corpus, split, windows, tokens scored, seeds, steps, commit and device."""
    windows = "non-overlapping windows (stride = length)"
    if panel.stride is not None:
        windows = f"{panel.mode} windows, stride {panel.stride:,}"
    measured = [row for series in panel.series for cell in series.cells.values() for row in cell.measured()]
    facts = [
        fact("{} tokens scored in each cell", (f"{row['tokens']:,}" for row in measured), " or "),
        fact("seed {}", (row["seed"] for row in measured)),
        fact("step {}", (f"{row['step']:,}" for row in measured)),
        fact("commit {}", (short_commit(row) for row in measured if row["commit"])),
        fact("on {}", (row["device"] for row in measured if row["device"])),
    ]
    text = f"{metric.title} by evaluation length: {panel.corpus}, split {panel.split}, {windows}"
    return "; ".join([text, *filter(None, facts)]) + "."


def fact(template: str, values: Iterable, separator: str = ", ") -> str:
    distinct = list(dict.fromkeys(values))
    return template.format(separator.join(map(str, distinct))) if distinct else ""


def explanation(panel: Panel) -> str:
    """How to read the cells."""
    text = "In brackets: the value divided by the run's own at its train length. The best of each column is marked."
    seeds = {len(cell.rows) for series in panel.series for cell in series.cells.values()}
    return text + (" ±: the standard deviation over seeds." if max(seeds) > 1 else "")


def to_markdown(table: Table) -> str:
    """GitHub-flavoured Markdown; the best of each column is bold, notes are numbered below."""
    lines = [f"**{table.caption}**", "", _pipe_row(table.header)]
    lines.append(_pipe_row(["---", *["---:"] * (len(table.header) - 1)]))
    for line, cells in enumerate(table.body):
        lines.append(
            _pipe_row(_bold(text) if (line, column) in table.best else text for column, text in enumerate(cells))
        )
    if table.notes:
        lines += ["", *(f"[{number}] {note}  " for number, note in enumerate(table.notes, start=1))]
    return "\n".join(lines) + "\n"


def _bold(text: str) -> str:
    value, separator, ratio = text.partition(" (")
    return f"**{value}**{separator}{ratio}"


def _pipe_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def failed_runs(failures: Mapping[str, str]) -> str:
    """A Markdown list of why runs failed, by their names; each reason on one line."""
    lines = [f"- {name}: {' '.join(reason.split())}" for name, reason in failures.items()]
    return "\n".join(["Runs that failed:", "", *lines, ""])


def to_text(table: Table, width: int = 100) -> str:
    """Plain text with aligned columns; the best of each column has an asterisk."""
    body = []
    for line, cells in enumerate(table.body):
        body.append([text + ("*" if (line, column) in table.best else "") for column, text in enumerate(cells)])
    widths = [max(map(len, column)) for column in zip(table.header, *body, strict=True)]
    rule = ["-" * width for width in widths]
    lines = [*textwrap.wrap(table.caption, width), "", _aligned(table.header, widths), _aligned(rule, widths)]
    lines += [_aligned(row, widths) for row in body]
    lines += [f"[{number}] {note}" for number, note in enumerate(table.notes, start=1)]
    return "\n".join(lines) + "\n"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()
