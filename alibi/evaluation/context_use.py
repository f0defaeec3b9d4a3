"""The use of longer contexts: the same tokens scored with more and more tokens before them.

In windows that don't overlap, longer windows are better because fewer of their tokens have little
context (the early token curse, paper, appendix B): even a model that uses a hundred tokens only
gains. If each length scores the same tokens (`alibi.evaluation.windows.same_token_windows`), the
context alone explains the gain. A model of masked tokens predicts the same masks at each length, with
more and more tokens on both sides.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from alibi.config import Config
from alibi.evaluation.base import (
    Cell,
    NoResultError,
    Subject,
    Text,
    option,
    refuse_other_objectives,
)
from alibi.evaluation.perplexity import OfWindows
from alibi.evaluation.windows import Windows, predicted, same_token_windows
from alibi.objectives import make_objective
from alibi.reporting.intervals import interval, part_sums, six_digits
from alibi.reporting.panels import Panel
from alibi.reporting.rows import Entry, Row
from alibi.reporting.tables import Kind, result


def _gain(entry: Entry) -> float | None:
    """Returns the gain, None at the shortest length, the base of all gains."""
    is_start = entry.column == entry.results.get("from_length")
    return None if is_start else entry.results.get("gain_nats")


CONTEXT_GAIN = Kind(
    "Nats gained by context",
    "{:+.4f}".format,
    is_gain=True,
    value=result("gain_nats"),
    mean=_gain,
    axis=" per token",
    # linear up to hundredths of a nat, and logarithmic beyond: gains stand beside losses of nats
    scale={"type": "symlog", "constant": 0.01},
)


@dataclasses.dataclass(frozen=True)
class ContextUse(OfWindows):
    """The nats that the same tokens gain from longer windows. A cell is the set of lengths."""

    context_windows: int = option(512, "windows whose last tokens are scored", at_least=2)

    kinds: ClassVar = (CONTEXT_GAIN,)

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        super().check(config, lengths)
        if make_objective(config).causal:
            refuse_other_objectives("context_use", config)

    def cells(self, config: Config, lengths: Sequence[int]) -> list[Cell]:
        return [{"lengths": tuple(lengths)}]

    def undefined(self, subject: Subject, cell: Cell) -> str:
        return _too_few([length for length in cell["lengths"] if not subject.run.undefined(length)])

    def limit(self, subject: Subject, text: Text, cell: Cell) -> str:
        return _too_few(_lengths(subject, text, cell))

    def title(self, cell: Cell) -> str:
        lengths = ", ".join(f"{length:,}" for length in cell["lengths"])
        return f"at {lengths}, the same tokens" + ", after BOS" * self.bos

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        """Without the longest lengths if memory doesn't suffice for their windows."""
        from alibi.evaluation.output import print_once
        from alibi.evaluation.scorer import run_objective
        from alibi.evaluation.subject import memory_limits

        objective, lengths = run_objective(subject.run), _lengths(subject, text, row.cell)
        title = self.title(row.cell)
        while True:
            windows = same_token_windows(
                len(text.tokens), lengths, self.context_windows, causal=objective.causal
            )
            try:
                with memory_limits(f"at {lengths[-1]:,}"):
                    longest_first = [
                        subject.score(text.tokens, self.begun(one, subject), title).values
                        for one in windows[::-1]
                    ]
                break
            except NoResultError as error:
                if _too_few(lengths[:-1]):
                    raise
                print_once(f"{subject.run.title} {title}: {error}; measured without that length")
                del lengths[-1]
        scored = None
        if objective.selects:
            scored = np.concatenate([*predicted(objective, text.tokens, windows[0])])
        return same_token_results(windows, longest_first[::-1], scored)

    # ---- how reports show it

    def entries(self, row: Row) -> list[Entry]:
        if not row.results:
            return [Entry(row, (), length, {}) for length in row.cell["lengths"]]
        lengths, tokens = row.results["lengths"], row.results["tokens"]
        common = {
            "from_length": lengths[0],
            "tokens": tokens,
            "tokens_of_window": tokens // row.results["windows"],
        }
        common |= {key: row.results[key] for key in ("tokens_of_parts",) if key in row.results}
        names = ("nll_nats", "gain_nats", "interval", "parts")
        by_length = zip(*(row.results[name] for name in names), strict=True)
        return [
            Entry(row, (), length, common | dict(zip(names, values, strict=True)))
            for length, values in zip(lengths, by_length, strict=True)
        ]

    def alike(self, row: Row) -> Hashable:
        # the shortest is what gains are relative to, the longest decides where the tokens lie
        lengths = row.results.get("lengths", row.cell["lengths"])
        return lengths[0], lengths[-1]

    def windows(self, panel: Panel) -> str:
        (results, *_) = [row.results for row in panel.rows if row.is_measured] or [{}]
        if not results:
            return "the same tokens at each length"
        count, (shortest, *_, longest) = results["windows"], results["lengths"]
        if "tokens_of_parts" in results:
            return (
                f"{results['tokens']:,} masked tokens in the middle of {count:,} windows, the same at each length, "
                f"against what they cost at {shortest:,}, in the middle of windows of {longest:,}"
            )
        return (
            f"the last {results['tokens'] // count:,} tokens of {count:,} windows, the same at each length, "
            f"against what they cost at {shortest:,}, at ends of windows of {longest:,}"
        )

    def explanation(self, panel: Panel) -> str:
        return (
            "Nats per token that longer windows save on the same tokens: above zero if the model uses the longer "
            "context, zero if it only survives it."
        )

    def alt(self, panel: Panel) -> str:
        return panel.kind.title.lower()


def same_token_results(
    windows: Sequence[Windows],
    nll: Sequence[Float[np.ndarray, " tokens"]],
    scored: Bool[np.ndarray, " places"] | None = None,
) -> dict[str, Any]:
    """Returns a row's results from the NLL of the same tokens at each length, ascending.

    Args:
      windows: windows from `same_token_windows`.
      nll: for each of them, NLL at each token in `Windows.places`, in nats.
      scored: which of these tokens have an NLL, defaults to all.

    Raises:
      NoResultError: none has.
    """
    scored = np.ones(windows[0].num_tokens, bool) if scored is None else scored
    counts = scored.reshape(-1, windows[0].stride).sum(axis=1)
    if not counts.any():
        raise NoResultError(f"none of the {scored.size:,} tokens is masked; use more windows")
    totals = [float(each.sum(dtype=np.float64)) for each in nll]
    gains = [gain_of(nll[0], longer, counts) for longer in nll[1:]]
    of_parts = {} if scored.all() else {"tokens_of_parts": tuple(part_sums(counts).tolist())}
    return of_parts | {
        "lengths": tuple(one.length for one in windows),
        "windows": len(windows[0]),
        "tokens": nll[0].size,
        "nll_nats": tuple(total if math.isfinite(total) else None for total in totals),
        "gain_nats": (0.0, *(gain["gain_nats"] for gain in gains)),
        "interval": (None, *(gain["interval"] for gain in gains)),
        "parts": (None, *(gain["parts"] for gain in gains)),
    }


def gain_of(
    shortest: Float[np.ndarray, " tokens"],
    longer: Float[np.ndarray, " tokens"],
    counts: Int[np.ndarray, " windows"],
) -> dict[str, Any]:
    """Returns the gain from `longer` windows on the same tokens, in nats per token.

    Its interval is for the differences between the two lengths, so hard and easy windows cancel.

    Args:
      shortest, longer: the tokens' NLL.
      counts: scored tokens in each window.
    """
    saved = shortest.astype(np.float64) - longer
    window = np.repeat(np.arange(counts.size), counts)
    by_window = np.bincount(window, saved, counts.size)
    if not np.isfinite(by_window).all():
        return {"gain_nats": None, "interval": None, "parts": None}
    parts = part_sums(by_window)
    covered = interval(parts[None], part_sums(counts))
    bounds = covered.bounds if covered else None
    return {"gain_nats": float(saved.mean()), "interval": bounds, "parts": six_digits(parts)}


def _lengths(subject: Subject, text: Text, cell: Cell) -> list[int]:
    """Returns the lengths that the method and the text have."""
    return [
        length
        for length in cell["lengths"]
        if not subject.run.undefined(length) and not text.too_short(length)
    ]


def _too_few(lengths: Sequence[int]) -> str:
    if len(lengths) > 1:
        return ""
    return f"the gain of more context needs two lengths that can be measured, not {list(lengths)}"
