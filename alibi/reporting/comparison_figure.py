"""The figures that the paper draws of its tables: the paper's numbers on the left, ours on the right."""

import io
import math
import os
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from alibi.reporting.comparison import Comparison
from alibi.reporting.files import write_atomically
from alibi.reporting.measures import PERPLEXITY
from alibi.reporting.plots import COLOURS, DOTS_PER_INCH, FONT_SIZE, draw_axes
from alibi.reporting.series import Cell, Panel, Series

SIDES = {"paper": "paper", "ours": "this project"}


def draw_comparison(comparison: Comparison, lines: str, path: str | os.PathLike[str]) -> bool:
    """Writes the PNG file `path`, unless there is no number of ours; returns whether it did.

    Args:
      lines: "columns" or "rows" of perplexities become lines over the length, which the
        other of the two has; "bars": each column's ratios to its references.
    """
    if not any(entry and entry.ours is not None for row in comparison.entries for entry in row):
        return False
    with matplotlib.rc_context({"font.size": FONT_SIZE}):
        figure = Figure(figsize=(20, 7), facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        for side, axes in zip(SIDES, figure.subplots(1, 2), strict=True):
            if lines == "bars":
                _draw_bars(axes, comparison, side)
            else:
                draw_axes(axes, _panel(comparison, lines, side))
            axes.set_title(f"{SIDES[side]}, {comparison.scale} scale" if side == "ours" else SIDES[side], pad=28)
        image = io.BytesIO()
        figure.savefig(image, dpi=DOTS_PER_INCH // 2, format="png")
    write_atomically(path, image.getvalue())
    return True


def _panel(comparison: Comparison, lines: str, side: str) -> Panel:
    """The perplexities of one side as series over the lengths of their scale."""
    kept = [column for column in range(len(comparison.header)) if _is_perplexity(comparison, column)]
    rows = range(len(comparison.labels))
    if lines == "columns":
        names = [comparison.header[column].removesuffix(" PPL") for column in kept]
        cells = [[(comparison.labels[row][0], (row, column)) for row in rows] for column in kept]
    else:
        names = [comparison.labels[row][0] for row in rows]
        cells = [[(comparison.header[column], (row, column)) for column in kept] for row in rows]
    series = [_series(comparison, side, *line) for line in zip(names, cells, strict=True)]
    mode = "nonoverlapping" if comparison.stride is None else "sliding"
    return Panel(f"table {comparison.number}", "valid", mode, comparison.stride, tuple(filter(None, series)))


def _series(
    comparison: Comparison, side: str, name: str, cells: Sequence[tuple[str, tuple[int, int]]]
) -> Series | None:
    found = {
        _length(label, side): Cell(({"perplexity": value, "nll_nats": value},))
        for label, cell in cells
        if (value := comparison.value(side, *cell)) is not None
    }
    return Series(name, name.lower().replace("t5 bias", "t5"), min(found), found) if found else None


def _length(label: str, side: str) -> int:
    """The length that a label such as "512" or, at another scale, "512 (32)" means on `side`."""
    paper, _, ours = label.rstrip(")").partition(" (")
    return int(ours or paper) if side == "ours" else int(paper)


def _is_perplexity(comparison: Comparison, column: int) -> bool:
    entries = (row[column] for row in comparison.entries)
    return any(entry is not None and entry.measure is PERPLEXITY for entry in entries)


def _draw_bars(axes: Axes, comparison: Comparison, side: str) -> None:
    """For each row a group of bars, one a column: its value in percent of its reference."""
    width = 0.8 / len(comparison.header)
    rows = range(len(comparison.labels))
    for column, name in enumerate(comparison.header):
        ratios = [comparison.ratio(side, row, column) for row in rows]
        heights = [math.nan if ratio is None else 100 * ratio for ratio in ratios]
        axes.bar(np.arange(len(rows)) + width * column, heights, width, label=name, color=COLOURS[column])
    axes.set_xticks(
        np.arange(len(rows)) + 0.4 - width / 2,
        [" ".join(labels) for labels in comparison.labels],
        rotation=60,
        ha="right",
    )
    axes.axhline(100, color="#555555", linestyle=":")
    axes.set_ylabel("percent of sinusoidal at the same length")
    axes.spines[["top", "right"]].set_visible(False)
    # Above the bars, which may reach any height.
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 0.97), ncols=len(comparison.header))
