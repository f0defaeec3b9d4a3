"""The use of longer contexts: the same tokens scored with more and more tokens before them.

In windows that don't overlap, longer windows are better because fewer of their tokens have little
context (the early token curse; paper, appendix B): even a model without use for more than a hundred
tokens gains. If the same tokens are scored at each length
(`alibi.evaluation.windows.same_token_windows`), the gain is due to the context alone.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float

from alibi.config import Config
from alibi.evaluation.base import Cell, option, refuse_other_objectives
from alibi.evaluation.perplexity import OfText
from alibi.evaluation.windows import same_token_windows
from alibi.reporting.intervals import interval, part_sums, six_digits
from alibi.reporting.rows import Entry, Row
from alibi.reporting.tables import CONTEXT_GAIN

if TYPE_CHECKING:
    from alibi.evaluation.subject import Subject, Text
    from alibi.reporting.panels import Panel


@dataclasses.dataclass(frozen=True)
class ContextUse(OfText):
    """What the same tokens gain from longer windows, in nats; a cell is the set of lengths."""

    context_windows: int = option(512, "windows whose last tokens are scored", at_least=2)

    kinds: ClassVar = (CONTEXT_GAIN,)

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        super().check(config, lengths)
        refuse_other_objectives("context_use", config)

    def cells(self, config: Config, lengths: Sequence[int]) -> list[Cell]:
        return [{"lengths": tuple(lengths)}]

    def undefined(self, subject: "Subject", cell: Cell) -> str:
        found = [length for length in cell["lengths"] if not subject.run.undefined(length)]
        return _too_few(found)

    def limit(self, subject: "Subject", text: "Text", cell: Cell) -> str:
        return _too_few(_lengths(subject, text, cell))

    def title(self, cell: Cell) -> str:
        return f"at {', '.join(f'{length:,}' for length in cell['lengths'])}, the same tokens"

    def measure(self, subject: "Subject", text: "Text", row: Row) -> Mapping[str, Any]:
        lengths = _lengths(subject, text, row.cell)
        title = f"{subject.run.title} {self.title(row.cell)}"
        windows = same_token_windows(len(text.tokens), lengths, self.context_windows)
        nll = [subject.score(text.tokens, each, title).nll_nats for each in windows]
        totals = [float(each.sum(dtype=np.float64)) for each in nll]
        gains = [gain_of(nll[0], longer, windows[0].stride) for longer in nll[1:]]
        return {
            "lengths": tuple(lengths),
            "windows": len(windows[0]),
            "tokens": nll[0].size,
            "nll_nats": tuple(total if math.isfinite(total) else None for total in totals),
            "gain_nats": (0.0, *(gain["gain_nats"] for gain in gains)),
            "interval": (None, *(gain["interval"] for gain in gains)),
            "parts": (None, *(gain["parts"] for gain in gains)),
        }

    # ---- how reports show it

    def entries(self, row: Row) -> list[Entry]:
        if not row.results:
            return [Entry(row, (), length, {}) for length in row.cell["lengths"]]
        found, one = row.results, {}
        by_length = [found[key] for key in ("nll_nats", "gain_nats", "interval", "parts")]
        for length, nats, gain, bounds, parts in zip(found["lengths"], *by_length, strict=True):
            one[length] = {
                "from_length": found["lengths"][0],
                "windows": found["windows"],
                "tokens": found["tokens"],
                "tokens_of_window": found["tokens"] // found["windows"],
                "nll_nats": nats,
                "gain_nats": gain,
                "interval": bounds,
                "parts": parts,
            }
        return [Entry(row, (), length, results) for length, results in one.items()]

    def alike(self, row: Row) -> Hashable:
        # the shortest is what gains are relative to, the longest decides where the tokens lie
        lengths = row.results.get("lengths", row.cell["lengths"])
        return lengths[0], lengths[-1]

    def windows(self, panel: "Panel") -> str:
        (found, *_) = [row.results for row in panel.rows if row.is_measured] or [{}]
        if not found:
            return "the same tokens at each length"
        count, (shortest, *_, longest) = found["windows"], found["lengths"]
        return (
            f"the last {found['tokens'] // count:,} tokens of {count:,} windows, the same at each length, against what "
            f"they cost at {shortest:,}, at ends of windows of {longest:,}"
        )

    def explanation(self, panel: "Panel") -> str:
        return (
            "Nats per token that longer windows save on the same tokens: above zero if the model uses the longer "
            "context, zero if it only survives it."
        )

    def alt(self, panel: "Panel") -> str:
        return panel.kind.title.lower()


def gain_of(
    shortest: Float[np.ndarray, " tokens"], longer: Float[np.ndarray, " tokens"], stride: int
) -> dict[str, Any]:
    """Returns the gain of `longer` windows on the same tokens, in nats per token.

    Its interval is of the differences between the two lengths, so hard and easy windows cancel.

    Args:
      shortest, longer: the NLL of the tokens.
      stride: scored tokens of a window.
    """
    saved = shortest.astype(np.float64) - longer
    by_window = saved.reshape(-1, stride).sum(axis=1)
    if not np.isfinite(by_window).all():
        return {"gain_nats": None, "interval": None, "parts": None}
    parts = part_sums(by_window)
    found = interval(parts[None], part_sums(np.full(by_window.size, stride)))
    bounds = found.bounds if found else None
    return {"gain_nats": float(saved.mean()), "interval": bounds, "parts": six_digits(parts)}


def _lengths(subject: "Subject", text: "Text", cell: Cell) -> list[int]:
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
