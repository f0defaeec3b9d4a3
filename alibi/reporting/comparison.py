"""A table of the paper beside our results, in the paper's own layout: paper / ours / difference."""

import csv
import dataclasses
import functools
import io
from collections.abc import Callable, Sequence

from alibi.reporting.measures import PERPLEXITY, Measure, format_signed, parse_printed
from alibi.reporting.tables import Table, format_ratio

NOT_RUN_HERE = "not run here"  # a system that this project doesn't have
NOT_RUN_YET = "not run yet"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One cell.

    Attributes:
      printed: the paper's text.
      measure: what it is.
      ours: our value; None without one.
      note: why there is none.
      reference: (row, column) of the cell that this one is divided by where ratios are compared.
    """

    printed: str
    measure: Measure
    ours: float | None
    note: str = ""
    reference: tuple[int, int] | None = None

    @property
    def paper(self) -> float | None:
        return parse_printed(self.printed)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A whole table.

    Attributes:
      number: the paper's.
      scale: "paper" or "small".
      caption: what the numbers are.
      label_header, labels: the first columns, which name the rows.
      header: the other columns.
      entries: by row and column; None where the paper's cell is empty.
      ratios: the values themselves can't be compared (another corpus, another model):
        differences are those of each value's ratio to its reference.
      stride: of all windows, in tokens; None: they don't overlap, or not all have one stride.
    """

    number: int
    scale: str
    caption: str
    label_header: tuple[str, ...]
    labels: tuple[tuple[str, ...], ...]
    header: tuple[str, ...]
    entries: tuple[tuple[Entry | None, ...], ...]
    ratios: bool
    stride: int | None = None

    def value(self, side: str, row: int, column: int) -> float | None:
        """The number of a cell; `side` is "paper" or "ours"."""
        entry = self.entries[row][column]
        return None if entry is None else getattr(entry, side)

    def ratio(self, side: str, row: int, column: int) -> float | None:
        """The number of a cell divided by its reference's; None without both."""
        entry = self.entries[row][column]
        if entry is None or entry.reference is None:
            return None
        value, reference = self.value(side, row, column), self.value(side, *entry.reference)
        return value / reference if value is not None and reference else None

    def difference(self, row: int, column: int) -> float | None:
        """Ours against the paper's: of the values, or of their ratios where `ratios`."""
        entry = self.entries[row][column]
        if entry is None:
            return None
        measure = self.value if not self.ratios else self.ratio
        paper, ours = measure("paper", row, column), measure("ours", row, column)
        if paper is None or ours is None or (self.ratios and entry.reference == (row, column)):
            return None
        return ours - paper if self.ratios else entry.measure.difference(paper, ours)

    @functools.cached_property
    def best(self) -> frozenset[tuple[str, int, int]]:
        """(side, row, column) of the lowest perplexity of each column that has two."""
        found = set()
        for side in ("paper", "ours"):
            for column in range(len(self.header)):
                values = {
                    row: value
                    for row, entries in enumerate(self.entries)
                    if (entry := entries[column]) and entry.measure is PERPLEXITY
                    if (value := self.value(side, row, column)) is not None
                }
                found |= {
                    (side, row, column) for row in values if len(values) > 1 and values[row] == min(values.values())
                }
        return frozenset(found)


Emphasis = Callable[[str], str]


def to_table(comparison: Comparison, emphasis: Emphasis) -> Table:
    """Text cells "paper / ours / difference"; the best of each column goes through `emphasis`. Reasons become notes."""
    notes: list[str] = []
    body = []
    for row, labels in enumerate(comparison.labels):
        cells = [_parts(comparison, row, column, emphasis, notes) for column in range(len(comparison.header))]
        body.append((*labels, *(" / ".join(filter(None, parts)) for parts in cells)))
    header = (*comparison.label_header, *comparison.header)
    return Table(comparison.caption, header, tuple(body), frozenset(), tuple(notes))


def to_csv(comparison: Comparison) -> str:
    """Three columns for each of the paper's; numbers with six digits. The first column keeps the scales apart."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    difference = "difference of ratios" if comparison.ratios else "difference"
    parts = [f"{name}: {part}" for name in comparison.header for part in ("paper", "ours", difference)]
    writer.writerow(["Scale", *comparison.label_header, *parts])
    for row, labels in enumerate(comparison.labels):
        cells: list[str] = []
        for column, entry in enumerate(comparison.entries[row]):
            apart = comparison.difference(row, column)
            ours = "" if entry is None else entry.note if entry.ours is None else f"{entry.ours:.6g}"
            cells += ["" if entry is None else entry.printed, ours, "" if apart is None else f"{apart:+.4g}"]
        writer.writerow([comparison.scale, *labels, *cells])
    return file.getvalue()


def to_latex(comparison: Comparison) -> str:
    """A float for booktabs and graphicx, as wide as the text."""
    titles = " & ".join(rf"\multicolumn{{3}}{{c}}{{{_escape(name)}}}" for name in comparison.header)
    parts = " & ".join(["paper & ours & diff."] * len(comparison.header))
    first = [_escape(name) for name in comparison.label_header]
    notes: list[str] = []
    lines = []
    for row, labels in enumerate(comparison.labels):
        cells = [_escape(label) for label in labels]
        for column in range(len(comparison.header)):
            cells += _parts(comparison, row, column, r"\textbf{{{}}}".format, notes, _escape)
        lines.append(" & ".join(cells) + r" \\")
    caption = " ".join([comparison.caption, *(f"[{number}] {note}." for number, note in enumerate(notes, start=1))])
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escape(caption)}}}",
            rf"\label{{tab:{comparison.scale}-{comparison.number:02d}}}",
            r"\resizebox{\textwidth}{!}{%",
            rf"\begin{{tabular}}{{{'l' * len(first)}{'rrr' * len(comparison.header)}}}",
            r"\toprule",
            " & " * (len(first) - 1) + f" & {titles}" + r" \\",
            " & ".join([*first, parts]) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def _parts(
    comparison: Comparison, row: int, column: int, emphasis: Emphasis, notes: list[str], escape: Emphasis = str
) -> Sequence[str]:
    """Paper, ours and difference of a cell as text, each "" where there is nothing to say."""
    entry = comparison.entries[row][column]
    if entry is None:
        return "", "", ""
    texts = []
    for side in ("paper", "ours"):
        text = entry.printed if side == "paper" else _ours(entry, notes)
        ratio = comparison.ratio(side, row, column) if comparison.ratios else None
        text = escape(text + (f" ({format_ratio(ratio)})" if ratio is not None else ""))
        texts.append(emphasis(text) if (side, row, column) in comparison.best else text)
    apart = comparison.difference(row, column)
    if apart is None:
        return *texts, ""
    return *texts, escape(format_signed(apart) if comparison.ratios else entry.measure.format_difference(apart))


def _ours(entry: Entry, notes: list[str]) -> str:
    if entry.ours is not None:
        return entry.measure.format(entry.ours)
    if entry.note in (NOT_RUN_HERE, NOT_RUN_YET):
        return entry.note
    if entry.note not in notes:
        notes.append(entry.note)
    return f"no result [{notes.index(entry.note) + 1}]"


LATEX = {"\\": r"\textbackslash{}", "\N{MULTIPLICATION SIGN}": r"$\times$", "~": r"\textasciitilde{}",
         "^": r"\textasciicircum{}"} | {character: f"\\{character}" for character in "&%$#_{}"}  # fmt: skip


def _escape(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)
