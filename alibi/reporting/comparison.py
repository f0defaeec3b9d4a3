"""A table of the paper beside our results, in the paper's own layout: paper / ours / difference; and its figure."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from alibi.reporting.plots import COLOURS, DOTS_PER_INCH, draw_axes, png
from alibi.reporting.report import Panel, Series
from alibi.reporting.tables import PERPLEXITY, Cell, Difference, Grid, Heading, Length, Number, Part, Table, related
from alibi.reporting.writers import heading_text


@dataclasses.dataclass(frozen=True)
class Comparison(Table):
    """A table of the paper, whose cells are (paper, ours, difference).

    Where `ratios`, the values themselves can't be compared (another corpus, another model):
    the differences are those of each value's ratio to its reference.
    """

    number: int = 0  # the paper's
    stride: int | None = None  # of all windows, in tokens; None: they don't overlap, or not all have one stride

    @property
    def has_ours(self) -> bool:
        """Whether there is a number of ours."""
        return any(isinstance(cell[1], Number) for row in self.cells for cell in row)

    def side(self, side: int) -> list[list[Part]]:
        """One part of each cell: the paper's (0) or ours (1)."""
        return [[cell[side] for cell in row] for row in self.cells]


def compare(
    paper: Grid, ours: Grid, references: Mapping[tuple[int, int], tuple[int, int]], *, ratios: bool
) -> tuple[tuple[Cell, ...], ...]:
    """The cells of a comparison; both sides are None where the paper's table has an empty cell."""
    sides = [related(grid, references) for grid in (paper, ours)]
    return tuple(
        tuple(
            (theirs, mine, _difference(theirs, mine, ratios, references.get((i, j)) == (i, j)))
            for j, (theirs, mine) in enumerate(zip(*rows, strict=True))
        )
        for i, rows in enumerate(zip(*sides, strict=True))
    )


def part_names(ratios: bool) -> tuple[str, ...]:
    """What the parts of a comparison's cells are."""
    return "paper", "ours", "difference of ratios" if ratios else "difference"


def _difference(paper: Part, ours: Part, ratios: bool, itself: bool) -> Difference | None:
    """Ours against the paper's: of the values, or of their ratios, which the reference `itself` has none of."""
    if not isinstance(paper, Number) or not isinstance(ours, Number):
        return None
    if ratios:
        if paper.ratio is None or ours.ratio is None or itself:
            return None
        return Difference(ours.ratio - paper.ratio, share=False)
    if ours.kind.is_loss:
        return Difference(ours.mean - paper.mean, share=False)
    return Difference(ours.mean / paper.mean - 1, share=True)


def draw_comparison(comparison: Comparison, lines: str, path: str | os.PathLike[str]) -> None:
    """Writes the PNG file `path`, the paper's numbers on the left, ours, of which there must be some, on the right.

    Args:
      lines: "columns" or "rows" of perplexities become lines over the length, which the
        other of the two has; "bars": each column's ratios to its references.
    """
    titles = ("paper", f"this project, {comparison.scale} scale")  # in the order of a cell's parts
    with png(path, (20, 7), DOTS_PER_INCH // 2) as figure:
        for side, axes in enumerate(figure.subplots(1, 2)):
            if lines == "bars":
                _draw_bars(axes, comparison, side)
            else:
                draw_axes(axes, _panel(comparison, lines, side))
            axes.set_title(titles[side], pad=28)


def _panel(comparison: Comparison, lines: str, side: int) -> Panel:
    """The perplexities of one side as series over the lengths of their scale."""
    names, grid = comparison.header, [*zip(*comparison.side(side), strict=True)]
    headings = tuple(labels[0] for labels in comparison.labels)
    if lines == "rows":
        names, headings, grid = headings, names, [*zip(*grid, strict=True)]
    lengths = [_length(heading, side) for heading in headings]
    made = (_series(name, lengths, parts) for name, parts in zip(names, grid, strict=True))
    series = tuple(one for one in made if one.cells)
    return Panel(f"table {comparison.number}", "valid", comparison.stride, PERPLEXITY, series, ())


def _series(heading: Heading, lengths: Sequence[int], parts: Sequence[Part]) -> Series:
    by_length = zip(lengths, parts, strict=True)
    found = {length: part for length, part in by_length if isinstance(part, Number) and part.kind is PERPLEXITY}
    name = heading_text(heading).removesuffix(" PPL")
    return Series(name, name.lower().replace("t5 bias", "t5"), min(found, default=0), found)


def _length(heading: Heading, side: int) -> int:
    """The length that a heading is, on one of the two sides."""
    assert isinstance(heading, tuple)
    (length,) = (part for part in heading if isinstance(part, Length))
    return length.here if side else length.paper


def _draw_bars(axes: Axes, comparison: Comparison, side: int) -> None:
    """Draws a group of bars for each row, one a column: its value in percent of its reference."""
    width, places = 0.8 / len(comparison.header), np.arange(len(comparison.labels))
    columns = zip(comparison.header, zip(*comparison.side(side), strict=True), strict=True)
    for number, (name, parts) in enumerate(columns):
        ratios = [part.ratio if isinstance(part, Number) else None for part in parts]
        heights = [math.nan if ratio is None else 100 * ratio for ratio in ratios]
        axes.bar(places + width * number, heights, width, label=heading_text(name), color=COLOURS[number])
    groups = [" ".join(map(heading_text, labels)) for labels in comparison.labels]
    axes.set_xticks(places + 0.4 - width / 2, groups, rotation=60, ha="right")
    axes.axhline(100, color="#555555", linestyle=":")
    axes.set_ylabel("percent of sinusoidal at the same length")
    # Above the bars, which may reach any height.
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 0.97), ncols=len(comparison.header))
