"""The in-context score (Olsson et al. 2022, arXiv 2209.11895): the loss of a late token of a window
less that of an early one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from alibi.config import Config
from alibi.evaluation.base import Cell, Subject, Text, mean_results, option, refuse_other_objectives
from alibi.evaluation.perplexity import OfText
from alibi.evaluation.windows import Windows
from alibi.reporting.panels import Panel
from alibi.reporting.rows import Row
from alibi.reporting.tables import mean_kind

SCORE = mean_kind("In-context score", "{:+.4f}".format, "score_nats", axis=", nats", merit=-1)


@dataclasses.dataclass(frozen=True)
class InContext(OfText):
    """The loss of the token `late` less that of the token `early`, mean over windows without overlap.

    Below zero: the tokens between them help.
    """

    early: int = option(50, "place of the early token in a window, counted from 1", at_least=1)
    late: int = option(500, "place of the late token", at_least=2)

    kinds: ClassVar = (SCORE,)

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        super().check(config, lengths)
        refuse_other_objectives(self.name(), config)
        if self.early >= self.late:
            raise ValueError(f"early={self.early} must be below late={self.late}")

    def limit(self, subject: Subject, text: Text, cell: Cell) -> str:
        if cell["length"] < self.late:
            return (
                f"windows of {cell['length']:,} have no token {self.late:,}; give a smaller --late=N (and --early=N) "
                "or longer windows"
            )
        if len(text.tokens) < 2 * cell["length"]:
            return f"the text has {len(text.tokens):,} tokens, and the score needs two windows"
        return ""

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        length = row.cell["length"]
        count = len(text.tokens) // length
        windows = Windows(0, count * length, length, length)
        score = subject.score(text.tokens, windows, self.title(row.cell))
        nll = score.values.reshape(count, length)
        by_window = nll[:, self.late - 1].astype(np.float64) - nll[:, self.early - 1]
        return mean_results("score_nats", by_window)

    def facts(self, panel: Panel) -> list[str]:
        title, tokens, *others = super().facts(panel)
        difference = f"nats of token {self.late} less those of token {self.early}"
        return [f"{title}, {difference}", tokens.replace("tokens scored", "windows"), *others]
