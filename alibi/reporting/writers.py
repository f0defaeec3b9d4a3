"""Text formats of a `Table`: Markdown, plain text, HTML, CSV and LaTeX, a function for each."""

import csv
import html
import io
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence

from alibi.reporting.tables import (
    TIMES,
    Difference,
    Heading,
    Missing,
    Number,
    Part,
    Table,
    write_ratio,
)


def heading_text(heading: Heading) -> str:
    """Returns 1024 as "1,024"; a length of the paper has ours in brackets behind it, if they
    differ.
    """
    if isinstance(heading, int):
        return f"{heading:,}"
    if isinstance(heading, str):
        return heading
    return "".join(
        part
        if isinstance(part, str)
        else part.printed + (f" ({part.here})" if part.here != part.paper else "")
        for part in heading
    )


def to_markdown(table: Table) -> str:
    """Returns GitHub-flavoured Markdown; the best of each column is bold, notes are numbered below."""
    # among several numbers in a cell, a bold ratio belongs to the bold number
    whole = bool(table.parts)

    def written(part: Part) -> str:
        text, ratio = _texts(table, part)
        if not (isinstance(part, Number) and part.best):
            return text + ratio
        return f"**{text}{ratio}**" if whole else f"**{text}**{ratio}"

    header, body = _lines(table, written)
    lines = [
        f"**{table.caption}**",
        "",
        _pipe_row(header),
        _pipe_row(["---", *["---:"] * (len(header) - 1)]),
    ]
    lines += map(_pipe_row, body)
    if table.notes:
        lines += ["", *(f"[{number}] {note}  " for number, note in enumerate(table.notes, start=1))]
    return "\n".join(lines) + "\n"


def to_text(table: Table, width: int = 100) -> str:
    """Returns plain text with aligned columns; the best of each column has an asterisk."""

    def written(part: Part) -> str:
        return "".join(_texts(table, part)) + (
            "*" if isinstance(part, Number) and part.best else ""
        )

    header, body = _lines(table, written)
    rule = ["-" * max(map(len, column)) for column in zip(header, *body, strict=True)]
    caption, notes = textwrap.wrap(table.caption, width), enumerate(table.notes, start=1)
    lines = aligned([header, rule, *body]) + "".join(
        f"[{number}] {note}\n" for number, note in notes
    )
    return "\n".join([*caption, "", lines])


def to_html(table: Table) -> str:
    """Returns an HTML table with buttons as headings; each cell has its value for sorting, ""
    without a number.
    """

    def cell(parts: Sequence[Part]) -> str:
        texts = [_texts(table, part) for part in parts]
        shown = " / ".join(
            f"{html.escape(text)}<small>{html.escape(ratio)}</small>"
            for text, ratio in texts
            if text
        )
        number = next((part for part in parts if isinstance(part, Number)), None)
        best = ' class="best"' if number is not None and number.best else ""
        return f'<td{best} data-value="{"" if number is None else repr(number.mean)}">{shown}</td>'

    def label(heading: Heading, first: bool) -> str:
        text = html.escape(heading_text(heading))
        value = heading if isinstance(heading, int) else text
        return (
            f'<th scope="row" data-value="{value}">{text}</th>'
            if first
            else f'<td data-value="{value}">{text}</td>'
        )

    columns = [*zip(*table.labels, strict=True)] or [() for _ in table.label_header]
    kinds = [
        "number" if all(isinstance(one, int) for one in column) else "text" for column in columns
    ]
    headings = [
        *zip(table.label_header, kinds, strict=True),
        *((heading, "number") for heading in table.header),
    ]
    head = "".join(
        f'<th scope="col" data-type="{kind}"><button type="button">{html.escape(heading_text(heading))}</button></th>'
        for heading, kind in headings
    )
    body = "\n".join(
        f"<tr>{''.join(label(one, number == 0) for number, one in enumerate(labels))}{''.join(map(cell, cells))}</tr>"
        for labels, cells in zip(table.labels, table.cells, strict=True)
    )
    notes = "".join(
        f"<p>[{number}] {html.escape(note)}</p>" for number, note in enumerate(table.notes, start=1)
    )
    start = f"<table><caption>{html.escape(table.caption)}</caption><thead><tr>{head}</tr></thead>"
    return f'<div class="table">{start}\n<tbody>\n{body}\n</tbody></table>{notes}</div>'


def to_csv(table: Table) -> str:
    """Returns CSV with a column for each part of a cell; numbers have six digits."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    scale = ("Scale", table.scale) if table.scale else ()
    names = map(heading_text, table.header)
    columns = [
        f"{name}: {part}" if part else name for name in names for part in table.parts or ("",)
    ]
    writer.writerow([*scale[:1], *map(heading_text, table.label_header), *columns])
    for labels, cells in zip(table.labels, table.cells, strict=True):
        writer.writerow(
            [
                *scale[1:],
                *map(heading_text, labels),
                *(_plain(part) for cell in cells for part in cell),
            ]
        )
    return file.getvalue()


def to_latex(table: Table) -> str:
    """Returns a LaTeX float as wide as the text, for booktabs and graphicx."""

    def written(part: Part) -> str:
        text = _escape("".join(_texts(table, part)))
        return rf"\textbf{{{text}}}" if isinstance(part, Number) and part.best else text

    count = max(1, len(table.parts))
    first, names = (
        [_escape(heading_text(name)) for name in header]
        for header in (table.label_header, table.header)
    )
    lines = [" & ".join([*first, *names])]
    if table.parts:
        titles = " & ".join(rf"\multicolumn{{{count}}}{{c}}{{{name}}}" for name in names)
        parts = ["diff." if part.startswith("difference") else part for part in table.parts]
        lines = [
            " & " * (len(first) - 1) + f" & {titles}",
            " & ".join([*first, *parts * len(names)]),
        ]
    body = []
    for labels, cells in zip(table.labels, table.cells, strict=True):
        numbers = (written(part) for cell in cells for part in cell)
        body.append(" & ".join([*(_escape(heading_text(label)) for label in labels), *numbers]))
    caption = " ".join(
        [
            table.caption,
            *(f"[{number}] {note}." for number, note in enumerate(table.notes, start=1)),
        ]
    )
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escape(caption)}}}",
            rf"\label{{tab:{table.name}}}",
            r"\resizebox{\textwidth}{!}{%",
            rf"\begin{{tabular}}{{{'l' * len(first)}{'r' * count * len(names)}}}",
            r"\toprule",
            *(line + r" \\" for line in lines),
            r"\midrule",
            *(line + r" \\" for line in body),
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def _lines(table: Table, written: Callable[[Part], str]) -> tuple[list[str], list[list[str]]]:
    """Returns header and body as texts, the parts of a cell joined by slashes."""
    header = [*map(heading_text, table.label_header), *map(heading_text, table.header)]
    body = [
        [
            *map(heading_text, labels),
            *(" / ".join(filter(None, map(written, cell))) for cell in cells),
        ]
        for labels, cells in zip(table.labels, table.cells, strict=True)
    ]
    return header, body


def _texts(table: Table, part: Part) -> tuple[str, str]:
    """Returns the text of a part, and its ratio in brackets or ""."""
    if isinstance(part, Number):
        shown = table.ratios and part.ratio is not None
        return (
            part.text,
            f" ({write_ratio(part.ratio)})" if shown and part.ratio is not None else "",
        )
    if isinstance(part, Missing) and part.note:
        return f"no result [{table.notes.index(part.note) + 1}]", ""
    return ("" if part is None else part.text), ""


def _plain(part: Part) -> str:
    """Returns a number for programs."""
    if isinstance(part, Number):
        return part.printed or f"{part.mean:.6g}"
    if isinstance(part, Difference):
        return f"{part.value:+.4g}"
    return "" if part is None else part.text


def _pipe_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def aligned(lines: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Returns lines in aligned columns; the `left` columns are aligned at the left, the others at
    the right.
    """
    columns = []
    for number, texts in enumerate(zip(*lines, strict=True)):
        width = max(map(len, texts))
        columns.append(
            [text.ljust(width) if number in left else text.rjust(width) for text in texts]
        )
    return "".join("  ".join(line).rstrip() + "\n" for line in zip(*columns, strict=True))


def format_duration(seconds: float | None) -> str:
    """Returns for example 0.2 s, 45 s, 12 min, 3.5 h or 1,200 h; "unknown" for None."""
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


def _escape(text: str) -> str:
    return text.translate(_LATEX)
