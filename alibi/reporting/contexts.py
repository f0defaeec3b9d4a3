"""What a token costs by where it stands in its window: the rows of that, and their figure."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from alibi.reporting.plots import COLOURS, DOTS_PER_INCH, FONT_SIZE, MARKERS


@dataclasses.dataclass(frozen=True)
class Analysis:
    """One finding of a run and text at a length; `analysis` tells the kinds of lines apart."""

    analysis: ClassVar[str]

    run: str
    step: int
    tokens_sha256: str
    config_hash: str
    eval_length: int

    def to_json(self) -> dict[str, Any]:
        """The content of its line."""
        return {"analysis": self.analysis} | dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class ByContext(Analysis):
    """NLL of the tokens with `context_from` to `context_to` inputs of context."""

    analysis = "by_context"

    mode: str
    stride: int
    context_from: int
    context_to: int
    tokens: int
    nll_nats: float

    @property
    def line(self) -> tuple:
        """The run, text and windows, whose rows make one line of the figure."""
        return self.run, self.step, self.tokens_sha256, self.config_hash, self.eval_length, self.stride


@dataclasses.dataclass(frozen=True)
class ByPosition(Analysis):
    """NLL of the tokens at one position in their windows, from 1: the window's inputs up to the token's own."""

    analysis = "by_position"

    mode: str
    stride: int
    position: int
    tokens: int
    nll_nats: float


@dataclasses.dataclass(frozen=True)
class GainShare:
    """The part of a gain that falls on tokens of a range of contexts; None where there is no gain."""

    context_from: int
    context_to: int
    share: float | None


@dataclasses.dataclass(frozen=True)
class EarlyTokenCurse(Analysis):
    """What of the gain from blocks of `eval_length` to those of `longer_length` is due to fewer early tokens."""

    analysis = "early_token_curse"

    longer_length: int
    tokens: int
    gain_nats: float
    composition_share: float | None
    sliding_share: float | None
    sliding_stride: int | None
    gain_by_context: tuple[GainShare, ...]


def draw_by_context(rows: Iterable[Analysis], path: str | os.PathLike[str]) -> None:
    """Writes a PNG of the NLL by context: a line for each run and length of blocks.

    Of a sliding window, in which all tokens but a text's first have nearly the same
    context, the level of its last range is drawn across.

    Raises:
      ValueError: there is none of them.
    """
    lines: dict[tuple, list[ByContext]] = {}
    for row in rows:
        if isinstance(row, ByContext):
            lines.setdefault(row.line, []).append(row)
    if not lines:
        raise ValueError("there are no rows of NLL by context to draw; give dumps of eval_extrapolation.py --dump_nll")
    with matplotlib.rc_context({"font.size": FONT_SIZE}):
        figure = Figure(figsize=(10, 6), facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw_lines(axes, lines)
        ends = sorted({row.context_to for cells in lines.values() for row in cells})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ends, [f"{end:,}" for end in ends], rotation=60 if len(ends) > 8 else 0)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("tokens of context, up to")
        axes.set_ylabel("nats per token")
        axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend()
        figure.savefig(path, dpi=DOTS_PER_INCH, format="png")


def _draw_lines(axes: Axes, lines: Mapping[tuple, Sequence[ByContext]]) -> None:
    differs = [len({line[part] for line in lines}) > 1 for part in range(3)]
    for number, (_, rows) in enumerate(sorted(lines.items())):
        first = rows[0]
        name = f"L = {first.eval_length:,}" + (f", stride {first.stride:,}" if first.mode == "sliding" else "")
        # What is the same for all lines is left out.
        told = (first.run, f"{first.step:,} updates", f"text {first.tokens_sha256[:8]}")
        label = ", ".join([*(word for word, many in zip(told, differs, strict=True) if many), name])
        colour, means = COLOURS[number % len(COLOURS)], [row.nll_nats / row.tokens for row in rows]
        if first.mode == "sliding":
            axes.axhline(means[-1], label=label, color=colour, ls="--", linewidth=2)
        else:
            marker, ends = MARKERS[number % len(MARKERS)], [row.context_to for row in rows]
            axes.plot(ends, means, label=label, color=colour, marker=marker, linewidth=2.5, markersize=8)
