"""Where in its window a token stands, and what that costs: the early token curse (paper, appendix B).

In windows that don't overlap, a token near the start of its window has little context.
Longer windows have fewer such tokens, and are better for that alone, even where the model
makes nothing of the longer context. Computed from NLL dumps; no model is needed.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool

from alibi.evaluation.context_use import interval
from alibi.evaluation.dumps import Dump
from alibi.reporting.rows import Analysis, ByContext, ByPosition, EarlyTokenCurse, GainShare, Scoring


def analyse(dumps: Sequence[Dump]) -> list[Analysis]:
    """NLL by context and by position of each dump, and the curse for each two lengths of a run and text.

    Raises:
      ValueError: two dumps of the same run, text, length and stride.
    """
    for of, times in Counter(dump.of for dump in dumps).items():
        if times > 1:
            raise ValueError(
                f"{times} dumps are of {of.run} after {of.step:,} updates at length={of.length} and "
                f"stride={of.stride}, of the text {(of.tokens_sha256 or '')[:8]}; give one of them"
            )
    rows: list[Analysis] = [row for dump in dumps for row in (*by_context(dump), *by_position(dump))]
    blocks = sorted((dump for dump in dumps if dump.of.mode == "nonoverlapping"), key=lambda dump: dump.of.length)
    for short, long in itertools.combinations(blocks, 2):
        if _run_and_text(short) == _run_and_text(long):
            alike = [dump for dump in dumps if _run_and_text(dump) == _run_and_text(short)]
            rows.append(early_token_curse(short, long, alike))
    return rows


def _run_and_text(dump: Dump) -> Scoring:
    """What is compared has this in common: all but the windows."""
    return dataclasses.replace(dump.of, length=0, stride=0)


def by_context(dump: Dump) -> list[ByContext]:
    """NLL of the tokens with 1, 2, 3-4, 5-8, ... inputs of context, in a window of `length`."""
    pieces, nll, rows = np.arange(dump.nll.size) // dump.of.length, dump.nll, []
    for low, high, inside in _by_context(dump):
        if inside.any():
            sums, counts = (np.bincount(pieces[inside], weights) for weights in (nll[inside], None))
            between = interval(sums, counts.astype(int))
            rows.append(ByContext(dump.of, low, high, int(inside.sum()), float(sums.sum()), between))
    return rows


def _by_context(dump: Dump) -> Iterator[tuple[int, int, Bool[np.ndarray, " tokens"]]]:
    """Each range of context, and which tokens of the dump have it."""
    context = dump.context
    return ((low, high, (context >= low) & (context <= high)) for low, high in ranges(dump.of.length))


def by_position(dump: Dump) -> list[ByPosition]:
    """NLL of the tokens at each position in their window, 1 to `length`: the window's inputs up to the token's own."""
    tokens, nats = (np.bincount(dump.context, weights) for weights in (None, dump.nll))
    return [
        ByPosition(dump.of, int(position), int(tokens[position]), float(nats[position]))
        for position in np.flatnonzero(tokens)
    ]


def ranges(length: int) -> list[tuple[int, int]]:
    """Ranges of context up to `length`, each as long as all before it together."""
    ends = [1 << power for power in range(length.bit_length()) if 1 << power < length] + [length]
    return [(low + 1, high) for low, high in zip([0, *ends], ends, strict=False)]


def early_token_curse(short: Dump, long: Dump, others: Sequence[Dump]) -> EarlyTokenCurse:
    """What of the gain from blocks of one length to blocks of a greater one is due to fewer tokens of short context.

    Two answers, as shares of the gain in nats a token; None where it can't be said, as of a gain that may be half of
    what was measured, or chance.

    composition_share: the gain that there would be if at each context a token cost what it
      costs in the short blocks, and beyond them what it costs with their full context.
    sliding_share: what of the gain is gone when a window slides by the least stride that
      was dumped at both lengths, so that (nearly) all tokens have the full context: the
      paper's own argument (appendix B, tables 13 to 15).

    gain_by_context says on which tokens the gain falls: of each range of context in the
    short blocks, its part of the gain.
    """
    saved = short.nll - long.nll
    gain, blocks = saved.mean(), np.arange(saved.size) // long.of.length
    between = interval(*(np.bincount(blocks, weights) for weights in (saved, None)))
    is_known = between is not None and between[0] > abs(gain) / 2
    sliding, sliding_long = (
        {one.of.stride: one for one in others if one.of.mode == "sliding" and one.of.length == blocks.of.length}
        for blocks in (short, long)
    )
    strides = sorted(sliding.keys() & sliding_long.keys())
    slid = sliding[strides[0]].nll.mean() - sliding_long[strides[0]].nll.mean() if strides else None
    full = sliding[min(sliding)] if sliding else None
    composition = short.nll.mean() - _with_costs_of(short, long, full)
    return EarlyTokenCurse(
        short.of,
        longer_length=long.of.length,
        tokens=short.nll.size,
        gain_nats=float(gain),
        gain_interval=between,
        composition_share=float(composition / gain) if is_known else None,
        sliding_share=float(1 - slid / gain) if is_known and slid is not None else None,
        sliding_stride=strides[0] if strides else None,
        gain_by_context=tuple(
            GainShare(low, high, float(saved[inside].sum() / saved.sum()) if is_known else None)
            for low, high, inside in _by_context(short)
        ),
    )


def _with_costs_of(short: Dump, long: Dump, sliding: Dump | None) -> float:
    """The mean NLL of the long blocks if a token's context cost what it does in the short ones.

    A context that the short blocks don't have costs what their full one does: by the sliding
    window of their length if it was dumped, else what their second half costs.
    """
    length = short.of.length
    tokens, nats = (np.bincount(short.context, weights, length + 1) for weights in (None, short.nll))
    costs = nats / np.maximum(tokens, 1)
    if sliding is not None:
        full = sliding.nll[sliding.context > length - sliding.of.stride].mean()
    else:
        full = short.nll[short.context > length // 2].mean()
    return float(np.where(long.context <= length, costs[np.minimum(long.context, length)], full).mean())
