"""Echoes: what a model saves on a passage that it has read before, by the distance to the first copy.

A passage that comes again is the simplest use of a long context in natural text. Any run can be
measured; `data.echoes` puts echoes into the text of training.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Int

from alibi.config import Config
from alibi.data.batches import ECHO, LEAST_GAP
from alibi.evaluation.base import Cell, option, refuse_other_objectives
from alibi.evaluation.perplexity import OfText
from alibi.evaluation.windows import Windows
from alibi.reporting.intervals import part_sums, six_digits
from alibi.reporting.rows import Row
from alibi.reporting.tables import Kind, result

if TYPE_CHECKING:
    from alibi.evaluation.subject import Subject, Text
    from alibi.reporting.panels import Panel

SAVED = Kind(
    "Nats saved by an echo",
    "{:+.3f}".format,
    is_gain=True,
    value=result("saved_nats"),
    mean=result("saved_nats"),
    axis=" per token",
)


@dataclasses.dataclass(frozen=True)
class Echo(OfText):
    """Nats per token saved on a passage of 16 tokens whose copy lies `gap` tokens back, beside the same
    passage in the same window without the copy.

    Passages come from other places of the text than their windows.
    """

    echoes: int = option(200, "passages at each length and gap", at_least=2)

    kinds: ClassVar = (SAVED,)
    labels: ClassVar = ("window",)
    across: ClassVar = "tokens from the passage to its echo"

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        super().check(config, lengths)
        refuse_other_objectives(self.name(), config)

    def cells(self, config: Config, lengths: Sequence[int]) -> list[Cell]:
        return [
            {"length": length, "gap": 1 << power}
            for length in lengths
            for power in range(LEAST_GAP.bit_length() - 1, max(length - ECHO, 1).bit_length())
        ]

    def limit(self, subject: "Subject", text: "Text", cell: Cell) -> str:
        if len(text.tokens) > cell["length"] + 4 * ECHO:
            return ""
        return f"the text has {len(text.tokens):,} tokens, too few for other passages than those of a window"

    def title(self, cell: Cell) -> str:
        return f"{super().title(cell)}, echoes after {cell['gap']:,}"

    def measure(self, subject: "Subject", text: "Text", row: Row) -> Mapping[str, Any]:
        length, gap = row.cell["length"], row.cell["gap"]
        size, nats = length + 1, []
        windows = Windows(size - ECHO, self.echoes * size, length, ECHO, spacing=size)
        for copied in (False, True):
            tokens = self._windows(text.tokens, length, gap, copied=copied)
            title = f"{subject.run.title} {self.title(row.cell)}"
            nats.append(subject.score(tokens.ravel(), windows, title).nll_nats.astype(np.float64))
        saved = (nats[0] - nats[1]).reshape(self.echoes, ECHO).mean(axis=1)
        parts = six_digits(part_sums(saved))
        return {"saved_nats": float(saved.mean()), "tokens": self.echoes, "parts": parts}

    def _windows(
        self, text: Any, length: int, gap: int, *, copied: bool
    ) -> Int[np.ndarray, "echoes length+1"]:
        """Returns windows that end with a passage from elsewhere, with or without its copy."""
        random, made = np.random.default_rng([length, gap]), []
        for start in np.linspace(0, len(text) - length - 1, self.echoes).astype(int):
            window = np.array(text[start : start + length + 1], np.int32)
            source = (start + int(random.integers(length + 1, len(text) - 2 * ECHO))) % (
                len(text) - ECHO
            )
            window[-ECHO:] = text[source : source + ECHO]
            if copied:
                window[-gap - ECHO : -gap] = window[-ECHO:]
            made.append(window)
        return np.stack(made)

    def facts(self, panel: "Panel") -> list[str]:
        return [
            f"{panel.kind.title}, by {self.across}: {panel.corpus}, split {panel.split}",
            f"{self.echoes} passages of {ECHO} tokens in each cell",
        ]
