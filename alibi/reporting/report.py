"""The report of a directory: results.jsonl -> report.md, extrapolation.png and a table for the terminal."""

import os
import pathlib
import re
from collections.abc import Mapping

from alibi.reporting import tables
from alibi.reporting.files import write_atomically
from alibi.reporting.rows import read_rows
from alibi.reporting.series import Panel, panels

ROWS_FILE = "results.jsonl"
REPORT_FILE = "report.md"
FIGURE_FILE = "extrapolation.png"


def write_report(
    directory: str | os.PathLike, title: str = "Extrapolation", failures: Mapping[str, str] | None = None
) -> str:
    """Writes report.md and one figure a panel beside the results.jsonl in `directory`; returns the text tables.

    The first panel's figure is extrapolation.png; those of further panels (other
    splits, strides, corpora) have a suffix. `failures`, reasons by run, are listed
    at the end. Without rows and failures nothing is written.
    """
    directory = pathlib.Path(directory)
    found = panels(read_rows(directory / ROWS_FILE))
    if not found and not failures:
        return f"no results in {directory / ROWS_FILE} yet\n"
    from alibi.reporting import plots  # matplotlib: two seconds that an evaluation without a report need not wait

    markdown, text = [f"# {title}\n"], []
    for index, panel in enumerate(found):
        figure = FIGURE_FILE if index == 0 else f"extrapolation-{_suffix(panel)}.png"
        plots.draw_extrapolation(panel, directory / figure)
        metrics = [tables.PERPLEXITY, tables.BITS_PER_BYTE] if _knows_bytes(panel) else [tables.PERPLEXITY]
        for metric in metrics:
            table = tables.build_table(panel, metric)
            markdown.append(tables.to_markdown(table))
            text.append(tables.to_text(table))
        markdown += [tables.explanation(panel) + "\n", f"![perplexity by evaluation length]({figure})\n"]
        text.append(f"figure: {directory / figure}\n")
    if failures:
        markdown.append(tables.failed_runs(failures))
    write_atomically(directory / REPORT_FILE, "\n".join(markdown))
    return "\n".join([*text, f"report: {directory / REPORT_FILE}\n"])


def _knows_bytes(panel: Panel) -> bool:
    return any(row["bits_per_byte"] is not None for row in panel.rows())


def _suffix(panel: Panel) -> str:
    stride = "" if panel.stride is None else f"-stride{panel.stride}"
    return re.sub(r"[^\w.-]+", "_", f"{panel.corpus}-{panel.split}{stride}")
