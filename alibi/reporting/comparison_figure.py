"""The figures that the paper draws of its tables: the paper's numbers on the left, ours on the right."""

import math
import os
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from alibi.reporting.comparison import Comparison
from alibi.reporting.plots import COLOURS, DOTS_PER_INCH, draw_axes, png
from alibi.reporting.report import Panel, Series
from alibi.reporting.tables import PERPLEXITY, Cell, Heading, Length, Number
from alibi.reporting.writers import heading_text

SIDES = ("paper", "this project")  # in the order of a cell's parts


def draw_comparison(comparison: Comparison, lines: str, path: str | os.PathLike[str]) -> bool:
    """Writes the PNG file `path`, unless there is no number of ours; returns whether it did.

    Args:
      lines: "columns" or "rows" of perplexities become lines over the length, which the
        other of the two has; "bars": each column's ratios to its references.
    """
    if not comparison.has_ours:
        return False
    with png(path, (20, 7), DOTS_PER_INCH // 2) as figure:
        for side, axes in enumerate(figure.subplots(1, 2)):
            if lines == "bars":
                _draw_bars(axes, comparison, side)
            else:
                draw_axes(axes, _panel(comparison, lines, side))
            axes.set_title(f"{SIDES[side]}, {comparison.scale} scale" if side else SIDES[side], pad=28)
    return True


def _panel(comparison: Comparison, lines: str, side: int) -> Panel:
    """The perplexities of one side as series over the lengths of their scale."""
    first = [labels[0] for labels in comparison.labels]
    if lines == "rows":
        named = zip(first, comparison.cells, strict=True)
        series = [_series(name, side, comparison.header, cells) for name, cells in named]
    else:
        named = zip(comparison.header, zip(*comparison.cells, strict=True), strict=True)
        series = [_series(name, side, first, cells) for name, cells in named]
    mode = "nonoverlapping" if comparison.stride is None else "sliding"
    known = tuple(one for one in series if one.cells)
    return Panel(f"table {comparison.number}", "valid", mode, comparison.stride, PERPLEXITY, known, ())


def _series(heading: Heading, side: int, lengths: Sequence[Heading], cells: Sequence[Cell]) -> Series:
    parts = [cell[side] if cell else None for cell in cells]
    found = {
        _length(length, side): part
        for length, part in zip(lengths, parts, strict=True)
        if isinstance(part, Number) and part.kind is PERPLEXITY
    }
    name = heading_text(heading).removesuffix(" PPL")
    return Series(name, name.lower().replace("t5 bias", "t5"), min(found, default=0), found)


def _length(heading: Heading, side: int) -> int:
    """The length that a heading is, on one of the two sides."""
    assert isinstance(heading, tuple)
    (length,) = (part for part in heading if isinstance(part, Length))
    return length.here if side else length.paper


def _draw_bars(axes: Axes, comparison: Comparison, side: int) -> None:
    """For each row a group of bars, one a column: its value in percent of its reference."""
    width = 0.8 / len(comparison.header)
    rows = range(len(comparison.labels))
    for column, name in enumerate(comparison.header):
        parts = [row[column][side] if row[column] else None for row in comparison.cells]
        ratios = [part.ratio if isinstance(part, Number) else None for part in parts]
        heights = [math.nan if ratio is None else 100 * ratio for ratio in ratios]
        places = np.arange(len(rows)) + width * column
        axes.bar(places, heights, width, label=heading_text(name), color=COLOURS[column])
    axes.set_xticks(
        np.arange(len(rows)) + 0.4 - width / 2,
        [" ".join(map(heading_text, labels)) for labels in comparison.labels],
        rotation=60,
        ha="right",
    )
    axes.axhline(100, color="#555555", linestyle=":")
    axes.set_ylabel("percent of sinusoidal at the same length")
    axes.spines[["top", "right"]].set_visible(False)
    # Above the bars, which may reach any height.
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 0.97), ncols=len(comparison.header))
