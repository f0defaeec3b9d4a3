"""Text formats of a `Table`: Markdown, plain text, HTML, CSV and LaTeX, a function for each."""

import csv
import html
import io
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence

from alibi.reporting.tables import TIMES, Content, Heading, Missing, Number, Table, write_ratio

WIDTH = 120  # characters of a terminal


def to_markdown(table: Table) -> str:
    """Returns GitHub-flavoured Markdown. The best in each column is bold, notes are numbered below."""

    def written(content: Content) -> str:
        text, ratio = _texts(table, content)
        if not (isinstance(content, Number) and content.best):
            return text + ratio
        # among several numbers in a cell, a bold ratio belongs to the bold number
        return f"**{text}{ratio}**" if table.parts else f"**{text}**{ratio}"

    header, *body = _lines(table, written)
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"**{table.caption}**", "", *map(_pipe_row, [header, rule, *body])]
    if table.notes:
        lines += ["", *(f"{mark} {reason}  " for reason, mark in table.notes.items())]
    return "\n".join(lines) + "\n"


def to_text(table: Table) -> str:
    """Returns plain text with aligned columns. The best in each column has an asterisk. Columns beyond
    `WIDTH` characters follow below, with the rows' names again.
    """

    def written(content: Content) -> str:
        star = "*" if isinstance(content, Number) and content.best else ""
        return "".join(_texts(table, content)) + star

    header, *body = _lines(table, written)
    rule = ["-" * max(map(len, column)) for column in zip(header, *body, strict=True)]
    notes = "".join(f"{mark} {reason}\n" for reason, mark in table.notes.items())
    parts = _narrow([header, rule, *body], len(table.label_header))
    return "\n".join([*textwrap.wrap(table.caption, 100), "", *map(aligned, parts)]) + notes


def _narrow(lines: list[list[str]], labels: int) -> list[list[list[str]]]:
    """Splits a table's columns into pieces of at most `WIDTH` characters.

    Each piece begins with the first `labels` columns and has at least one other column, however wide it
    is.
    """
    columns = list(zip(*lines, strict=True))
    first, parts = columns[:labels], [columns[: labels + 1]]
    for column in columns[labels + 1 :]:
        if sum(2 + max(map(len, texts)) for texts in [*parts[-1], column]) - 2 > WIDTH:
            parts.append([*first])
        parts[-1].append(column)
    return [[list(line) for line in zip(*piece, strict=True)] for piece in parts]


def to_html(table: Table) -> str:
    """Returns an HTML table with buttons as headings. Each cell has its value for sorting, or "" without a
    number.
    """

    def label(heading: Heading, start: str = "<td", end: str = "</td>") -> str:
        text = html.escape(heading_text(heading))
        value = heading if isinstance(heading, int) else text
        return f'{start} data-value="{value}">{text}{end}'

    def cell(parts: Sequence[Content]) -> str:
        texts = [map(html.escape, _texts(table, content)) for content in parts if content]
        shown = " / ".join(f"{text}<small>{ratio}</small>" for text, ratio in texts)
        number = next((content for content in parts if isinstance(content, Number)), None)
        best = ' class="best"' if number is not None and number.best else ""
        return f'<td{best} data-value="{"" if number is None else repr(number.mean)}">{shown}</td>'

    head = "".join(
        f'<th scope="col" data-type="{"text" if all(isinstance(content, str) for content in column) else "number"}">'
        f'<button type="button">{html.escape(heading_text(heading))}</button></th>'
        for heading, *column in zip(
            (*table.label_header, *table.header),
            *((*labels, *cells) for labels, cells in zip(table.labels, table.cells, strict=True)),
            strict=True,
        )
    )
    row_header = ('<th scope="row"', "</th>")
    body = "\n".join(
        f"<tr>{label(first, *row_header)}{''.join(map(label, others))}{''.join(map(cell, cells))}</tr>"
        for (first, *others), cells in zip(table.labels, table.cells, strict=True)
    )
    notes = "".join(
        f"<p>{html.escape(f'{mark} {reason}')}</p>" for reason, mark in table.notes.items()
    )
    start = f"<table><caption>{html.escape(table.caption)}</caption><thead><tr>{head}</tr></thead>"
    return f'<div class="table">{start}\n<tbody>\n{body}\n</tbody></table>{notes}</div>'


def to_csv(table: Table) -> str:
    """Returns CSV with a column for each content of a cell. Numbers have six digits."""
    parts = [f": {content}" for content in table.parts] or [""]
    columns = [heading_text(name) + content for name in table.header for content in parts]
    scale = {"Scale": table.scale} if table.scale else {}
    lines = [[*scale, *map(heading_text, table.label_header), *columns]]
    for labels, cells in zip(table.labels, table.cells, strict=True):
        values = (_plain(content) for cell in cells for content in cell)
        lines.append([*scale.values(), *map(heading_text, labels), *values])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()


def to_latex(table: Table) -> str:
    """Returns a LaTeX float as wide as the text, for booktabs and graphicx."""

    def written(content: Content) -> str:
        text = "".join(_texts(table, content)).translate(_LATEX)
        return rf"\textbf{{{text}}}" if isinstance(content, Number) and content.best else text

    def escaped(headings: Iterable[Heading]) -> list[str]:
        return [heading_text(heading).translate(_LATEX) for heading in headings]

    first, names = escaped(table.label_header), escaped(table.header)
    head = [[*first, *names]]
    if table.parts:
        parts = [
            "diff." if content.startswith("difference") else content for content in table.parts
        ]
        titles = [rf"\multicolumn{{{len(parts)}}}{{c}}{{{name}}}" for name in names]
        head = [[*[""] * len(first), *titles], [*first, *parts * len(names)]]
    body = [
        [*escaped(labels), *(written(content) for cell in cells for content in cell)]
        for labels, cells in zip(table.labels, table.cells, strict=True)
    ]
    notes = (f"{mark} {reason}." for reason, mark in table.notes.items())
    caption = " ".join([table.caption, *notes]).translate(_LATEX)
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{caption}}}",
            rf"\label{{tab:{table.name}}}",
            r"\resizebox{\textwidth}{!}{%",
            rf"\begin{{tabular}}{{{'l' * len(first)}{'r' * len(head[-1][len(first) :])}}}",
            r"\toprule",
            *(" & ".join(line) + r" \\" for line in head),
            r"\midrule",
            *(" & ".join(line) + r" \\" for line in body),
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def heading_text(heading: Heading) -> str:
    """Returns 1024 as "1,024", and a text as it is."""
    return f"{heading:,}" if isinstance(heading, int) else heading


def _lines(table: Table, written: Callable[[Content], str]) -> list[list[str]]:
    """Returns the header and the rows as texts, with slashes between the parts of a cell."""
    lines = [[*map(heading_text, table.label_header), *map(heading_text, table.header)]]
    for labels, cells in zip(table.labels, table.cells, strict=True):
        texts = (" / ".join(filter(None, map(written, cell))) for cell in cells)
        lines.append([*map(heading_text, labels), *texts])
    return lines


def _texts(table: Table, content: Content) -> tuple[str, str]:
    """Returns the text of a part, and its ratio in brackets or ""."""
    if isinstance(content, Number):
        ratio = content.ratio if table.ratios else None
        mark = content.interval and table.marks.get(content.interval.covers)
        return content.text + (mark or ""), "" if ratio is None else f" ({write_ratio(ratio)})"
    if isinstance(content, Missing) and content.is_reason:
        return f"no result {table.notes[content.text]}", ""
    return ("" if content is None else content.text), ""


def _plain(content: Content) -> str:
    """Returns a number for programs."""
    if isinstance(content, Number):
        return content.printed or content.kind.write_plain(content.mean)
    return "" if content is None else content.text


def _pipe_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def aligned(lines: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Returns lines in aligned columns: the `left` columns at the left, the others at the right."""
    columns = []
    for index, texts in enumerate(zip(*lines, strict=True)):
        width = max(map(len, texts))
        columns.append(
            [text.ljust(width) if index in left else text.rjust(width) for text in texts]
        )
    return "".join("  ".join(line).rstrip() + "\n" for line in zip(*columns, strict=True))


def format_duration(seconds: float | None) -> str:
    """Returns for example 0.2 s, 45 s, 12 min, 3.5 h, 1,200 h, or "unknown" for None."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.2g} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 360_000 else f"{seconds / 3600:,.0f} h"


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        TIMES: r"$\times$",
    }
    | {character: f"\\{character}" for character in "&%$#_{}"}
)
