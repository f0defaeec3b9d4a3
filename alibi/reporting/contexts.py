"""The figure of NLL by context: what a token costs by how far into its window it stands."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from alibi.reporting.plots import COLOURS, DOTS_PER_INCH, FONT_SIZE, MARKERS

Row = Mapping[str, Any]


def draw_by_context(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Writes a PNG of the `by_context` rows: a line for each run and length of blocks.

    Of a sliding window, in which all tokens but a text's first have nearly the same
    context, the level of its last range is drawn across.

    Raises:
      ValueError: there is none of them.
    """
    lines: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["analysis"] == "by_context":
            run = (row["run"], row["step"], row["tokens_sha256"], row["config_hash"])
            lines.setdefault((*run, row["eval_length"], row["stride"]), []).append(row)
    if not lines:
        raise ValueError("there are no rows of NLL by context to draw; give dumps of eval_extrapolation.py --dump_nll")
    with matplotlib.rc_context({"font.size": FONT_SIZE}):
        figure = Figure(figsize=(10, 6), facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw_lines(axes, lines)
        ends = sorted({row["context_to"] for cells in lines.values() for row in cells})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ends, [f"{end:,}" for end in ends], rotation=60 if len(ends) > 8 else 0)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("tokens of context, up to")
        axes.set_ylabel("nats per token")
        axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend()
        figure.savefig(path, dpi=DOTS_PER_INCH, format="png")


def _draw_lines(axes: Axes, lines: Mapping[tuple, Sequence[Row]]) -> None:
    differs = [len({line[part] for line in lines}) > 1 for part in range(3)]
    for number, ((run, step, text, _, length, stride), cells) in enumerate(sorted(lines.items())):
        name = f"L = {length:,}" + ("" if stride == length else f", stride {stride:,}")
        told = (run, f"{step:,} updates", f"text {text[:8]}")  # what is the same for all lines is left out
        label = ", ".join([*(word for word, many in zip(told, differs, strict=True) if many), name])
        colour, means = COLOURS[number % len(COLOURS)], [row["nll_nats"] / row["tokens"] for row in cells]
        if stride < length:
            axes.axhline(means[-1], label=label, color=colour, ls="--", linewidth=2)
        else:
            marker, ends = MARKERS[number % len(MARKERS)], [row["context_to"] for row in cells]
            axes.plot(ends, means, label=label, color=colour, marker=marker, linewidth=2.5, markersize=8)
