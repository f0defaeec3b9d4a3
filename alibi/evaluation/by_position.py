"""NLL by a token's position in its window, and the early token curse (paper, appendix B).

In windows that don't overlap, a token near the start of its window has little context. Longer
windows have fewer such tokens, and are better for that alone, even if the model does not use the
longer context. `analyse` computes both from NLL dumps, without a model. The evaluator measures a run,
and reports show its rows.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from alibi.config import Config
from alibi.evaluation.base import Subject, Text, refuse_other_objectives
from alibi.evaluation.dumps import Dump
from alibi.evaluation.perplexity import OfWindows, text_results
from alibi.evaluation.windows import windows_of
from alibi.reporting.intervals import interval, part_sums, six_digits
from alibi.reporting.names import grouped
from alibi.reporting.panels import Panel, Series
from alibi.reporting.rows import Entry, Row
from alibi.reporting.tables import Number, fact, mean_kind

Line = dict[str, Any]  # in by_context.jsonl
NATS = mean_kind("Nats per token", "{:.3f}".format, "nats", merit=-1)


@dataclasses.dataclass(frozen=True)
class ByPosition(OfWindows):
    """NLL by a token's position in windows without overlap, in ranges of positions: 1, 2, 3 to 4, 5 to
    8, ... up to the length.
    """

    kinds: ClassVar = (NATS,)
    labels: ClassVar = ("window",)
    across: ClassVar = "last position of a range"

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        super().check(config, lengths)
        refuse_other_objectives(self.name(), config, whole=True)

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        windows = self.begun(windows_of(len(text.tokens), row.cell["length"]), subject)
        score = subject.score(text.tokens, windows, self.title(row.cell))
        dump = Dump(row, score.values, np.zeros(0, np.int32))
        return text_results(score.values, score.seconds) | {"by_position": range_sums(dump)}

    # ---- how reports show it

    def entries(self, row: Row) -> list[Entry]:
        length = row.cell["length"]
        if not row.results:
            return [Entry(row, (length,), length, {})]
        entries, tokens = [], row.results["tokens"]
        left = tokens - np.arange(0, tokens, length)  # from the start of each window to the end
        by_position = zip(ranges(length), row.results["by_position"], strict=True)
        for (low, high), (nats, parts) in by_position:
            counts = part_sums(np.clip(left, low - 1, high) - (low - 1))
            results = {"tokens": int(counts.sum()), "tokens_of_parts": tuple(counts.tolist())}
            results |= {"nats": nats / results["tokens"], "parts": parts}
            entries.append(Entry(row, (length,), high, results))
        return entries

    def facts(self, panel: Panel) -> list[str]:
        title, tokens, *others = super().facts(panel)
        return [title, tokens.replace("in each cell", "in windows of each length"), *others]

    def explanation(self, panel: Panel) -> str:
        """Returns the gain of each run's longest windows, and the early token curse in it."""
        measured = [one for one in panel.series if isinstance(one.cells[one.labels[0]], Number)]
        by_run = grouped(measured, lambda one: one.label).values()
        return fact(
            "Nats per token that the longest windows save against the shortest. In brackets stands what fewer tokens "
            "with little context save (the early token curse): {}.",
            (_saved(lines[0], lines[-1]) for lines in by_run if len(lines) > 1),
        )


def range_sums(dump: Dump) -> tuple[tuple[float, tuple[float, ...]], ...]:
    """Returns the NLL summed over the tokens in each range of context, and its sums by part of the blocks."""
    nll, blocks = dump.nll, np.arange(dump.nll_nats.size) // dump.length
    by_block = [
        np.bincount(blocks[inside], nll[inside], blocks[-1] + 1)
        for *_, inside in _context_ranges(dump)
    ]
    return tuple((float(sums.sum()), six_digits(part_sums(sums))) for sums in by_block)


def _saved(short: Series, long: Series) -> str:
    """Returns the gain from `short` to `long` windows, and the gain of a model that pays in each range
    as much as in the short ones, and beyond these as much as in their last range.
    """
    length, longer = (int(one.labels[0]) for one in (short, long))
    costs, long_costs = (
        [cell.mean for _, cell in sorted(one.cells.items()) if isinstance(cell, Number)]
        for one in (short, long)
    )
    sizes, long_sizes = (
        [high - low + 1 for low, high in ranges(each)] for each in (length, longer)
    )
    early = np.pad(costs, (0, len(long_costs) - len(costs)), "edge")
    mean = np.average(costs, weights=sizes)
    gain, by_early = (mean - np.average(each, weights=long_sizes) for each in (long_costs, early))
    return f"{short.label} {gain:+.4f} ({by_early:+.4f}) from {length:,} to {longer:,}"


def analyse(dumps: Sequence[Dump]) -> list[Line]:
    """Returns each dump's NLL by context and by position, and the early token curse between any two
    lengths of a run.
    """
    by_key = {(_run_and_text(dump), dump.length, dump.stride): dump for dump in dumps}
    dumps = list(by_key.values())  # a copy of a dump counts once
    lines = [line for dump in dumps for line in (*by_context(dump), *by_position(dump))]
    blocks = [dump for dump in dumps if dump.stride == dump.length]
    for short, long in itertools.combinations(sorted(blocks, key=lambda dump: dump.length), 2):
        if _run_and_text(short) == _run_and_text(long):
            alike = [dump for dump in dumps if _run_and_text(dump) == _run_and_text(short)]
            lines.append(early_token_curse(short, long, alike))
    return lines


def _run_and_text(dump: Dump) -> tuple:
    """Returns the key of a dump without its windows."""
    options = {key: value for key, value in dump.row.options.items() if key != "stride"}
    return (
        *dump.row.tested,
        dump.row.trained_on,
        dump.row.tokens_sha256,
        dump.row.config_hash,
        str(options),
    )


def by_context(dump: Dump) -> list[Line]:
    """Returns the NLL, summed over the tokens with 1, 2, 3-4, 5-8, ... inputs before them.

    The 95% interval is for the mean. It needs more than one block of windows, else it is None.
    """
    blocks, nll = np.arange(dump.nll.size) // dump.length, dump.nll
    return [
        dump.line(
            "by_context",
            context_from=low,
            context_to=high,
            tokens=int(inside.sum()),
            nll_nats=float(nll[inside].sum()),
            interval=_interval(nll[inside], blocks[inside]),
        )
        for low, high, inside in _context_ranges(dump)
        if inside.any()
    ]


def _interval(
    values: Float[np.ndarray, " tokens"], blocks: Int[np.ndarray, " tokens"]
) -> tuple[float, float] | None:
    """Returns the 95% interval for a mean over tokens, each in a block of the text."""
    sums, tokens = (np.bincount(blocks, weights) for weights in (values, None))
    covered = interval(sums[None], tokens)
    return covered.bounds if covered else None


def by_position(dump: Dump) -> list[Line]:
    """Returns the NLL, summed over the tokens at each position in their windows, from 1: the window's
    inputs up to the token's own.
    """
    tokens, nats = (np.bincount(dump.context, weights) for weights in (None, dump.nll))
    return [
        dump.line(
            "by_position",
            position=int(position),
            tokens=int(tokens[position]),
            nll_nats=float(nats[position]),
        )
        for position in np.flatnonzero(tokens)
    ]


def ranges(length: int) -> list[tuple[int, int]]:
    """Returns ranges of context up to `length`, each as long as all ranges before it together."""
    ends = [1 << power for power in range(length.bit_length()) if 1 << power < length] + [length]
    return [(low + 1, high) for low, high in zip([0, *ends], ends, strict=False)]


def _context_ranges(dump: Dump) -> list[tuple[int, int, Bool[np.ndarray, " tokens"]]]:
    """Returns each range of context, and a mask for its tokens."""
    context = dump.context
    return [(low, high, (context >= low) & (context <= high)) for low, high in ranges(dump.length)]


def early_token_curse(short: Dump, long: Dump, others: Sequence[Dump]) -> Line:
    """Returns the share of the gain from `short` to `long` blocks that fewer tokens with little context
    explain.

    There are two estimates, as shares of the gain in nats per token. Both are None if the 95% interval
    reaches half of the gain or less (they could be any number), and each is None without its dumps.

    composition_share: the gain of a model that pays, at each context, as much as in the short blocks,
      and beyond these as much as with their full context.
    sliding_share: the part that vanishes if windows slide by the least stride in `others` at both
      lengths, so (nearly) all tokens have the full context: the paper's argument (appendix B, tables
      13 to 15).

    gain_by_context divides the gain by the tokens' context in the short blocks.
    """
    saved = short.nll - long.nll
    gain, blocks = saved.mean(), np.arange(saved.size) // long.length
    between = _interval(saved, blocks)
    is_known = between is not None and between[0] > abs(gain) / 2
    sliding, sliding_long = (
        {dump.stride: dump for dump in others if dump.stride < dump.length == blocks.length}
        for blocks in (short, long)
    )
    stride = min(sliding.keys() & sliding_long.keys(), default=None)
    slid = stride and sliding[stride].nll.mean() - sliding_long[stride].nll.mean()
    full = sliding[min(sliding)] if sliding else None
    composition = short.nll.mean() - _with_costs_of(short, long, full)
    line = short.line(
        "early_token_curse",
        longer_length=long.length,
        tokens=short.nll.size,
        gain_nats=float(gain),
        gain_interval=between,
        composition_share=float(composition / gain) if is_known else None,
        sliding_share=float(1 - slid / gain) if is_known and stride else None,
        sliding_stride=stride,
        gain_by_context=[
            {
                "context_from": low,
                "context_to": high,
                "share": float(saved[inside].sum() / saved.sum()) if is_known else None,
            }
            for low, high, inside in _context_ranges(short)
        ],
    )
    return {key: value for key, value in line.items() if key not in ("mode", "stride")}


def _with_costs_of(short: Dump, long: Dump, sliding: Dump | None) -> float:
    """Returns the mean NLL of the long blocks if each context cost as much as in the short ones.

    A longer context costs as much as the short blocks' full context: that of a sliding window as long,
    if it was dumped, else that in their second half.
    """
    length = short.length
    tokens, nats = (
        np.bincount(short.context, weights, length + 1) for weights in (None, short.nll)
    )
    costs = nats / np.maximum(tokens, 1)
    if sliding is not None:
        full = sliding.nll[sliding.context > length - sliding.stride].mean()
    else:
        full = short.nll[short.context > length // 2].mean()
    return float(
        np.where(long.context <= length, costs[np.minimum(long.context, length)], full).mean()
    )
