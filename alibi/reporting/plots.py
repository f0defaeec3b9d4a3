"""The extrapolation figure: perplexity against evaluation length, one line a method."""

import contextlib
import dataclasses
import itertools
import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from alibi.reporting import tables
from alibi.reporting.report import Panel, Series
from alibi.reporting.tables import Number, Table
from alibi.reporting.writers import heading_text
from alibi.storage.atomic import made_whole

# Okabe and Ito's palette (jfly.uni-koeln.de/color), distinct under every common colour blindness; its yellow
# is left out, which is too pale on white. Marker and dash differ as well, for print without colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))

# In a figure that shows each method once, these methods always have the style of their place here; any other
# method takes one of the styles that are left.
KNOWN_METHODS = ("alibi", "sinusoidal", "rotary", "t5", "learned", "none", "alibi_learned")

FONT_SIZE = 15  # points on a figure 10 inches wide: read from the back of a lecture room
DOTS_PER_INCH = 200
MAX_TICKS = 16  # labels of lengths that fit side by side
MARK_WIDTH = 0.3  # of the axes: what a train length needs, written above them
LABEL_HEIGHT = 0.06  # of the axes: what one line of direct labels needs
LABEL_WIDTH = 22  # letters, after which a label goes on in the next line
LARGE_GAIN = 0.05  # nats a token: a scale is logarithmic where there are larger ones
MOST_RATIO = 20  # that are so many times as large as others
MOST_LINES = 12  # that a figure shows in one part
LINES_OF_PART = 8  # that each part has at most, where there are several


def draw_extrapolation(panel: Panel, path: str | os.PathLike) -> None:
    """Writes the figure of `panel` to the PNG file `path`; a length without a result has no marker.

    Of more lines than MOST_LINES there are several parts, each with a scale of its own: the best ones come first.
    """
    with _parts(panel, path) as parts:
        for axes, part in parts:
            draw_axes(axes, part)


def draw_context_use(panel: Panel, path: str | os.PathLike) -> None:
    """Writes the figure of what context gains to the PNG file `path`.

    The bars are 95% intervals of single runs, and the mean and standard deviation over seeds where there are several.
    """
    with _parts(panel, path) as parts:
        for axes, part in parts:
            _draw_gains(axes, part)


def _draw_gains(axes: Axes, panel: Panel) -> None:
    found = [{length: cell for length, cell in one.cells.items() if isinstance(cell, Number)} for one in panel.series]
    ends = [abs([*cells.values()][-1].mean) for cells in found if cells]
    # Gains of hundredths are read beside losses of several nats.
    if ends and max(ends) > max(LARGE_GAIN, MOST_RATIO * min(ends)):
        axes.set_yscale("symlog", linthresh=0.01)
    for series, cells, number in zip(
        panel.series, found, style_numbers([one.position for one in panel.series]), strict=True
    ):
        errors = [[abs(cell.span[side] - cell.mean) for cell in cells.values()] for side in (0, 1)]
        axes.errorbar(
            [*cells], [cell.mean for cell in cells.values()], errors, label=wrapped(series.label), capsize=4,
            color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)],
            ls=DASHES[number % len(DASHES)],
        )  # fmt: skip
    bars = tables.SPREAD if panel.has_seeds else "95% interval of a single run"
    _draw_lengths(axes, panel, f"bars: {bars}")
    axes.axhline(0, color="#555555", linewidth=1.5)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("nats a token gained by context")
    axes.grid()
    axes.legend(fontsize=FONT_SIZE - 3, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


@contextlib.contextmanager
def _parts(panel: Panel, path: str | os.PathLike) -> Iterator[Iterator[tuple[Axes, Panel]]]:
    """The axes of a figure, each with the part of `panel` that it shows, where it has more lines than one can show."""
    if len(panel.series) <= MOST_LINES:
        with png(path) as figure:
            yield iter([(figure.add_subplot(), panel)])
        return
    count = math.ceil(len(panel.series) / LINES_OF_PART)
    worth = 1 if panel.kind is tables.CONTEXT_GAIN else -1
    series = sorted(panel.series, key=lambda one: _last(one, worth), reverse=True)
    bounds = [number * len(series) // count for number in range(count + 1)]
    parts = [dataclasses.replace(panel, series=tuple(series[a:b])) for a, b in itertools.pairwise(bounds)]
    rows = math.ceil(count / 2)
    with png(path, (20, 6 * rows), DOTS_PER_INCH // 2) as figure:
        figure.suptitle(
            f"{len(series)} lines by their value at the greatest length, best first; each part has its own scale"
        )
        grid = figure.subplots(rows, 2).ravel()
        for axes in grid[count:]:
            axes.remove()
        yield zip(grid[:count], parts, strict=True)


def _last(series: Series, sign: int) -> tuple[int, float]:
    """The last length that a series has a number of, and that number times `sign`."""
    found = [(length, sign * cell.mean) for length, cell in series.cells.items() if isinstance(cell, Number)]
    return max(found, default=(0, 0.0))


def draw_passkeys(table: Table, path: str | os.PathLike) -> None:
    """Writes the figure of keys found again to the PNG file `path`: a row a run, and a part for each length of windows.

    The number and the colour of a cell are the share of keys that were found; cells without a result are white.
    """
    names = list(dict.fromkeys(name for name, _ in table.labels))
    shares = {
        (name, length, distance): part.mean
        for (name, length), cells in zip(table.labels, table.cells, strict=True)
        for distance, (part,) in zip(table.header, cells, strict=True)
        if isinstance(part, Number)
    }
    lengths = sorted({length for _, length, _ in shares})
    asked = {length: sorted({distance for _, at, distance in shares if at == length}) for length in lengths}
    widths = [len(distances) for distances in asked.values()]
    with png(path, (0.8 * sum(widths) + 5, 0.42 * len(names) + 2), DOTS_PER_INCH // 2) as figure:
        grid = figure.subplots(1, len(asked), sharey=True, squeeze=False, width_ratios=widths)[0]
        for axes, (length, distances) in zip(grid, asked.items(), strict=True):
            found = np.array([[shares.get((name, length, d), np.nan) for d in distances] for name in names])
            axes.imshow(found, cmap="cividis", vmin=0, vmax=1, aspect="auto")
            for (row, column), share in np.ndenumerate(found):
                if np.isfinite(share):
                    colour = "white" if share < 0.5 else "black"
                    axes.text(column, row, f"{share:.0%}", color=colour, ha="center", va="center", size=FONT_SIZE - 5)
            axes.set_xticks(range(len(distances)), [f"{distance:,}" for distance in distances])
            axes.set_yticks(range(len(names)), [heading_text(name) for name in names], size=FONT_SIZE - 3)
            axes.set_title(f"windows of {length:,}", size=FONT_SIZE - 2)
        figure.supxlabel("tokens from key to answer", size=FONT_SIZE)


@contextlib.contextmanager
def png(
    path: str | os.PathLike, size: tuple[float, float] = (10, 6), dots_per_inch: int = DOTS_PER_INCH
) -> Iterator[Figure]:
    """A figure of `size` in inches to draw into, which is then written to the PNG file `path`."""
    # Written in place, where its keys are known to be matplotlib's.
    with (
        matplotlib.rc_context(
            {"font.size": FONT_SIZE, "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#dddddd"}
        ),
        made_whole(path) as partial,
    ):
        figure = Figure(figsize=size, facecolor="white", layout="constrained")
        yield figure
        figure.savefig(partial, dpi=dots_per_inch, format="png")


def draw_axes(axes: Axes, panel: Panel) -> None:
    """Draws `panel` into `axes`: lines, train lengths, ticks and labels."""
    styled = zip(panel.series, style_numbers([one.position for one in panel.series]), strict=True)
    lines = [line for series, number in styled if (line := _draw_line(axes, series, number))]
    _draw_lengths(axes, panel, f"bands: {tables.SPREAD}" if panel.has_seeds else "")
    axes.set_yscale("log")
    ticks = perplexity_ticks(*axes.get_ylim())
    axes.set_yticks(ticks, [f"{tick:,.10g}" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("perplexity (log scale)")
    _draw_labels(axes, lines)
    axes.grid()


def wrapped(label: str) -> str:
    """The label in lines that leave room for the figure."""
    return textwrap.fill(label, LABEL_WIDTH)


def style_numbers(positions: Sequence[str]) -> list[int]:
    """Of series of these position methods their places in COLOURS, MARKERS and DASHES, which go round."""
    if len(set(positions)) < len(positions):
        return list(range(len(positions)))
    left = [number for number, method in enumerate(KNOWN_METHODS) if method not in positions]
    others = itertools.chain(reversed(left), itertools.count(len(KNOWN_METHODS)))
    return [KNOWN_METHODS.index(name) if name in KNOWN_METHODS else next(others) for name in positions]


def _draw_line(axes: Axes, series: Series, number: int) -> Line2D | None:
    """The line of the series' finite means, and the band of its seeds; None without any."""
    cells = {length: cell for length, cell in series.cells.items() if isinstance(cell, Number)}
    cells = {length: cell for length, cell in cells.items() if math.isfinite(cell.mean)}
    if not cells:
        return None
    colour = COLOURS[number % len(COLOURS)]
    dashes, marker = DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)]
    means = [cell.mean for cell in cells.values()]
    (line,) = axes.plot(
        [*cells], means, lw=2.5, markersize=9, label=series.label, color=colour, ls=dashes, marker=marker
    )
    if any(cell.deviation for cell in cells.values()):
        low, high = zip(*map(band, cells.values()), strict=True)
        axes.fill_between([*cells], low, high, color=colour, alpha=0.2, linewidth=0)
    return line


def band(cell: Number) -> tuple[float, float]:
    """The mean less and plus the standard deviation; a log scale ends at the least seed where that is below zero."""
    low, high = cell.span
    return (low if low > 0 else min(cell.values)), high


def _draw_lengths(axes: Axes, panel: Panel, spread_is: str) -> None:
    """The axis of lengths, with the train lengths, and a line below it that says what bands or bars are."""
    axes.set_xscale("log", base=2)
    ticks = apart(panel.lengths, len(panel.lengths) and (panel.lengths[-1] / panel.lengths[0]) ** (1 / MAX_TICKS))
    axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
    if len(ticks) > 7:
        axes.tick_params(axis="x", rotation=60)
    axes.xaxis.set_minor_locator(NullLocator())
    windows = "" if panel.stride is None or panel.use is not None else f", stride {panel.stride:,}"
    label = f"evaluation length in tokens ({panel.corpus}, {panel.split}{windows})"
    axes.set_xlabel("\n".join(filter(None, [textwrap.fill(label, 80), spread_is])))
    for length, text in train_lengths(panel).items():
        axes.axvline(length, color="#555555", linestyle=":", linewidth=1.5, zorder=0)
        axes.annotate(
            text, (length, 1.0), (4, 4), xycoords=("data", "axes fraction"),
            textcoords="offset points", color="#555555", fontsize=FONT_SIZE - 1,
        )  # fmt: skip


def train_lengths(panel: Panel) -> dict[int, str]:
    """The train lengths of a panel, ascending, with what is written at each: the first speaks for those too near."""
    lengths = sorted({series.train_length for series in panel.series})
    span = panel.lengths[-1] / panel.lengths[0] if panel.lengths else 1.0
    if len(apart(lengths, span**MARK_WIDTH)) == len(lengths):
        return {length: f"trained at L = {length:,}" for length in lengths}
    return dict.fromkeys(lengths, "") | {lengths[0]: "dotted: lengths of training"}


def apart(lengths: Sequence[int], factor: float) -> list[int]:
    """The first of ascending `lengths`, and then each that is at least `factor` times the one before it."""
    kept: list[int] = []
    for length in lengths:
        if not kept or length >= factor * kept[-1]:
            kept.append(length)
    return kept


def perplexity_ticks(low: float, high: float) -> list[float]:
    """Round values between `low` and `high`: the coarsest steps that give at least four, however narrow the range."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tenths, fiftieths = ([step / each for step in range(each, 10 * each)] for each in (10, 50))
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), tenths, fiftieths):
        ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 4:
            break
    return ticks[:: math.ceil(len(ticks) / 10)] if ticks else []


def _draw_labels(axes: Axes, lines: Iterable[Line2D]) -> None:
    """Writes each line's name at the right, at its end's height or as near as its neighbours allow."""
    ends = sorted(((*np.asarray(line.get_xydata())[-1], line) for line in lines), key=lambda end: end[1])
    low, high = (math.log(limit) for limit in axes.get_ylim())
    right = max((length for length, *_ in ends), default=0)
    heights = [(math.log(value) - low) / (high - low) for _, value, _ in ends]
    names = [f"{line.get_label()}" + ("" if length == right else f" (to {length:,.0f})") for length, _, line in ends]
    labels = [wrapped(name) for name in names]
    sizes = [LABEL_HEIGHT * (1 + label.count("\n")) for label in labels]
    smaller = min(1.0, 1 / sum(sizes)) if sizes else 1.0  # where there are more than the axes are high
    placed = spread(heights, [size * smaller for size in sizes])
    for (length, value, line), label, height, wanted in zip(ends, labels, placed, heights, strict=True):
        colour = line.get_color()
        moved = length == right and abs(height - wanted) > LABEL_HEIGHT / 4
        axes.annotate(
            label, (length, value), (1.03, height), fontsize=FONT_SIZE * smaller,
            textcoords="axes fraction", va="center", color=colour, fontweight="bold", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.5} if moved else None,
        )  # fmt: skip


def spread(heights: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Moves what has these `sizes` and ascending `heights` apart, and down again where that leaves the axes at 1."""
    gaps = [(one + other) / 2 for one, other in itertools.pairwise(sizes)]
    placed = [*heights[:1]]
    for height, gap in zip(heights[1:], gaps, strict=True):
        placed.append(max(height, placed[-1] + gap))
    ceiling = max(1.0, sum(sizes))
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - (gaps[index - 1] if index else 0.0)
    return placed
