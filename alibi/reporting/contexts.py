"""What a token costs by where it stands in its window: the rows of that, and their figure."""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from alibi.reporting.plots import COLOURS, MARKERS, png
from alibi.reporting.rows import Scoring

WIDEST_INTERVAL = 0.1  # of a range that is drawn, as a share of what some range costs for sure
LETTERS = 80  # of a legend that stand side by side in the figure's width
LETTERS_OF_A_LINE = 8  # the room of a line and its marker beside a label


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Something found of a text that was scored; `analysis` tells the kinds of lines apart."""

    analysis: ClassVar[str]

    of: Scoring

    def to_json(self) -> dict[str, Any]:
        """The content of its line."""
        found = dataclasses.asdict(self)
        of = found.pop("of")
        if not of["override"]:
            del of["override"]
        windows = {"eval_length": of.pop("length"), "mode": self.of.mode, "stride": of.pop("stride")}
        if isinstance(self, EarlyTokenCurse):
            del windows["mode"], windows["stride"]
        return {"analysis": self.analysis} | of | windows | found


@dataclasses.dataclass(frozen=True)
class ByContext(Analysis):
    """NLL of the tokens with `context_from` to `context_to` inputs of context.

    The interval holds their mean with a probability of 95%, by resampling pieces of the text as long as a window; None
    where all of them lie in one piece.
    """

    analysis = "by_context"

    context_from: int
    context_to: int
    tokens: int
    nll_nats: float
    interval: tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class ByPosition(Analysis):
    """NLL of the tokens at one position in their windows, from 1: the window's inputs up to the token's own."""

    analysis = "by_position"

    position: int
    tokens: int
    nll_nats: float


@dataclasses.dataclass(frozen=True)
class GainShare:
    """The part of a gain that falls on tokens of a range of contexts; None where the gain is hardly known."""

    context_from: int
    context_to: int
    share: float | None


@dataclasses.dataclass(frozen=True)
class EarlyTokenCurse(Analysis):
    """What of the gain from the blocks `of` one length to those of `longer_length` is due to fewer early tokens.

    The interval holds the gain with a probability of 95%, by resampling the longer blocks; None where there is
    one. Shares are None where the gain may be half of what was measured, or chance: they would be any number.
    """

    analysis = "early_token_curse"

    longer_length: int
    tokens: int
    gain_nats: float
    gain_interval: tuple[float, float] | None
    composition_share: float | None
    sliding_share: float | None
    sliding_stride: int | None
    gain_by_context: tuple[GainShare, ...]


def draw_by_context(rows: Iterable[Analysis], path: str | os.PathLike[str]) -> None:
    """Writes a PNG of the NLL by context: a line for each run and length of blocks.

    Each mean stands in its 95% interval. A range is left out where it has no interval, or one wider than a tenth of
    the highest lower end of all the intervals, which is what some range costs for sure. Of a sliding window, in which
    all tokens but a text's first have nearly the same context, the level of its last range is drawn across.

    Raises:
      ValueError: there is none of them.
    """
    lines: dict[Scoring, list[ByContext]] = {}
    for row in rows:
        if isinstance(row, ByContext):
            lines.setdefault(row.of, []).append(row)
    if not lines:
        raise ValueError("there are no rows of NLL by context to draw; give dumps of eval_extrapolation.py --dump_nll")
    with png(path) as figure:
        axes = figure.add_subplot()
        _draw_lines(axes, lines)
        ends = sorted({row.context_to for rows in lines.values() for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ends, [f"{end:,}" for end in ends], rotation=60 if len(ends) > 8 else 0)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("tokens of context, up to")
        axes.set_ylabel("nats per token")
        axes.grid()
        # Below, since lines of many lengths leave no room for it; beside each other, names of runs are too long.
        longest = max(map(len, axes.get_legend_handles_labels()[1]))
        figure.legend(loc="outside lower center", ncols=max(1, LETTERS // (longest + LETTERS_OF_A_LINE)))


def _draw_lines(axes: Axes, lines: Mapping[Scoring, Sequence[ByContext]]) -> None:
    told = {of: (of.run, of.override, f"{of.step:,} updates", f"text {(of.tokens_sha256 or '')[:8]}") for of in lines}
    several = [len(set(words)) > 1 for words in zip(*told.values(), strict=True)]
    # Lower ends, not means: ranges of few tokens have high means by chance, but then wide intervals too.
    sure = max((row.interval[0] for rows in lines.values() for row in rows if row.interval), default=0.0)
    widest = sure * WIDEST_INTERVAL
    for number, of in enumerate(sorted(lines)):
        sliding, rows = of.mode == "sliding", lines[of]
        # What is the same for all lines is left out.
        name = f"L = {of.length:,}" + (f", stride {of.stride:,}" if sliding else "")
        label = ", ".join(filter(None, [*itertools.compress(told[of], several), name]))
        colour = COLOURS[number % len(COLOURS)]
        if sliding:
            axes.axhline(rows[-1].nll_nats / rows[-1].tokens, label=label, color=colour, ls="--", linewidth=2)
            continue
        known = [(row, row.interval) for row in rows if row.interval and row.interval[1] - row.interval[0] <= widest]
        ends, means = [row.context_to for row, _ in known], [row.nll_nats / row.tokens for row, _ in known]
        axes.plot(ends, means, label=label, color=colour, marker=MARKERS[number % len(MARKERS)], lw=2.5, markersize=8)
        low, high = zip(*(interval for _, interval in known), strict=True) if known else ((), ())
        axes.fill_between(ends, low, high, color=colour, alpha=0.15, linewidth=0)
