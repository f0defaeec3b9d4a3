"""Echoes: what a model saves on a passage that it has read before, at each distance from the first copy.

A passage that comes again is the simplest use of a long context in natural text. Any run can be
measured. `data.echoes` puts echoes into the text of training.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from alibi.config import Config
from alibi.data.batches import ECHO, LEAST_GAP
from alibi.data.tokenfile import Tokens
from alibi.evaluation.base import Cell, Subject, Text, mean_results, option, refuse_other_objectives
from alibi.evaluation.perplexity import OfText
from alibi.evaluation.windows import Windows
from alibi.reporting.panels import Panel
from alibi.reporting.rows import Row
from alibi.reporting.tables import mean_kind

SAVED = mean_kind(
    "Nats saved by an echo", "{:+.3f}".format, "saved_nats", is_gain=True, axis=" per token"
)


@dataclasses.dataclass(frozen=True)
class Echo(OfText):
    """Nats per token saved on a passage of 16 tokens with a copy `gap` tokens back, beside the same
    passage in the same window without the copy.

    Passages come from other places of the text than their windows.
    """

    echoes: int = option(200, "passages at each length and gap", at_least=2)
    echo_gap: int | None = option(
        None,
        "tokens from a passage to its echo; defaults to each power of two from 32 that fits",
        of_row=False,
        at_least=ECHO,
    )

    kinds: ClassVar = (SAVED,)
    labels: ClassVar = ("window",)
    across: ClassVar = "tokens from the passage to its echo"

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        super().check(config, lengths)
        refuse_other_objectives(self.name(), config)
        if self.echo_gap and self.echo_gap > min(lengths) - ECHO:
            raise ValueError(
                f"echo_gap={self.echo_gap} is too long for windows of {min(lengths)} tokens: the passage and its "
                f"echo need {self.echo_gap + ECHO}; leave out shorter windows"
            )

    def cells(self, config: Config, lengths: Sequence[int]) -> list[Cell]:
        powers = [LEAST_GAP << power for power in range(max(lengths).bit_length())]
        gaps = [self.echo_gap] if self.echo_gap else powers
        return [
            {"length": length, "gap": gap}
            for length in lengths
            for gap in gaps
            if gap <= length - ECHO
        ]

    def limit(self, subject: Subject, text: Text, cell: Cell) -> str:
        if len(text.tokens) > cell["length"] + 4 * ECHO:
            return ""
        return f"the text has {len(text.tokens):,} tokens, too few for other passages than those of a window"

    def title(self, cell: Cell) -> str:
        return f"{super().title(cell)}, echoes after {cell['gap']:,}"

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        length, gap = row.cell["length"], row.cell["gap"]
        size, title = length + 1, self.title(row.cell)
        windows = Windows(size - ECHO, self.echoes * size, length, ECHO, spacing=size)
        plain = self._windows(text.tokens, length, gap)
        echoed = plain.copy()
        echoed[:, -gap - ECHO : -gap] = plain[:, -ECHO:]
        without, with_copy = (
            subject.score(tokens.ravel(), windows, title).values for tokens in (plain, echoed)
        )
        saved = (without - with_copy).reshape(self.echoes, ECHO).mean(axis=1)
        return mean_results("saved_nats", saved)

    def _windows(self, text: Tokens, length: int, gap: int) -> Int[np.ndarray, "echoes length+1"]:
        """Returns windows of the text that end with a passage from elsewhere in it."""
        random, windows = np.random.default_rng([length, gap]), []
        for start in np.linspace(0, len(text) - length - 1, self.echoes).astype(int):
            window = np.array(text[start : start + length + 1], np.int32)
            source = start + int(random.integers(length + 1, len(text) - 2 * ECHO))
            source %= len(text) - ECHO
            window[-ECHO:] = text[source : source + ECHO]
            windows.append(window)
        return np.stack(windows)

    def facts(self, panel: Panel) -> list[str]:
        return [
            f"{panel.kind.title}, by {self.across}: {panel.corpus}, split {panel.split}",
            f"{self.echoes} passages of {ECHO} tokens in each cell",
        ]
