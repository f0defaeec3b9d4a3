"""The questions that a report asks an evaluator: which numbers it has, in which cells, in which words.

`alibi.evaluation.base.Evaluator` adds how they are measured. An evaluator is a name in `EVALUATORS`,
or package.module:Class from anywhere.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from alibi.config.classes import Registry
from alibi.reporting.rows import Entry, Row
from alibi.reporting.tables import Kind, fact

if TYPE_CHECKING:
    from alibi.reporting.panels import Panel

# The class of each evaluator, which is imported when it is used. Reports have this order.
EVALUATORS = {
    "perplexity": "alibi.evaluation.perplexity:Perplexity",
    "context_use": "alibi.evaluation.context_use:ContextUse",
    "by_position": "alibi.evaluation.by_position:ByPosition",
    "passkey": "alibi.evaluation.passkey:Passkey",
    "in_context": "alibi.evaluation.in_context:InContext",
    "receptive_field": "alibi.evaluation.receptive_field:ReceptiveField",
    "longppl": "alibi.evaluation.longppl:LongPPL",
    "echo": "alibi.evaluation.echo:Echo",
    "task": "alibi.evaluation.task:TaskAccuracy",
    "task_gaps": "alibi.evaluation.task:TaskGaps",
    "heads": "alibi.evaluation.heads:Heads",
    "head_loss": "alibi.evaluation.heads:HeadLoss",
    "head_bias": "alibi.evaluation.heads:HeadBias",
}

BEST = (
    "The best of a column is marked only if the 95% interval of its difference from each other excludes zero: "
    "over common seeds, and over the parts of the text where these are known."
)
NO_BEST = (
    "No best is marked: the runs have several tokenizers, and the numbers are per token. "
    "Compare bits per byte."
)


class Measure:
    """An evaluator's numbers in rows, tables and charts. A subclass's fields are its options.

    By default a cell's last key is the column of its table, and keys before it are labels of its line.
    """

    kinds: ClassVar[tuple[Kind, ...]]  # figures draw the first
    labels: ClassVar[tuple[str, ...]] = ()  # headings of the labels of a line, besides the run
    across: ClassVar[str] = "evaluation length"  # what the columns are, in words
    figure: ClassVar[str] = ""  # the name of the figure's file; defaults to the evaluator's name
    is_map: ClassVar[bool] = False  # figures show all kinds, and facets are runs, not labels

    @classmethod
    def name(cls) -> str:
        """Returns the evaluator's name in rows."""
        return REGISTRY.name_of(cls)

    @property
    def is_by_length(self) -> bool:
        """Whether columns are evaluation lengths and make a chart with lines, not coloured cells."""
        return not self.labels and self.across == Measure.across

    def kinds_of(self, row: Row) -> tuple[Kind, ...]:
        """Returns the kinds of numbers in a row."""
        return self.kinds

    def entries(self, row: Row) -> list[Entry]:
        """Returns the cells of the table in which a row has a result, or the reason for none."""
        *labels, column = row.cell.values()
        return [Entry(row, tuple(labels), column, row.results)]

    def alike(self, row: Row) -> Hashable:
        """Returns what rows of one table have in common, besides text, evaluator and options."""
        return ()

    def windows(self, panel: "Panel") -> str:
        """Returns how the text is cut, in words, or ""."""
        return ""

    def axis(self) -> str:
        """Returns how the text is cut, for a chart's axis, or ""."""
        return ""

    def alt(self, panel: "Panel") -> str:
        """Returns what the figure shows, in words."""
        return f"{panel.kind.title.lower()} by {self.across}"

    def suffix(self, row: Row) -> str:
        """Returns the end of a figure's name, besides text and split."""
        return f"-documents-{row.documents}" if row.documents else ""

    def facts(self, panel: "Panel") -> list[str]:
        """Returns what a caption says of the numbers, before seeds, steps and origin."""
        text = f"{panel.kind.title} by {self.across}: {panel.corpus}, split {panel.split}"
        measured = [row for row in panel.rows if row.is_measured]
        tokens = (f"{row.results['tokens']:,}" for row in measured if row.results.get("tokens"))
        unknown = (f"{row.unknown_tokens:,}" for row in measured if row.unknown_tokens)
        return [
            ", ".join(filter(None, [text, self.windows(panel)])),
            fact("{} tokens scored in each cell", tokens, " or "),
            panel.reading,
            fact("{} tokens of the text unknown to the tokenizer", unknown, " or "),
        ]

    def explanation(self, panel: "Panel") -> str:
        """Returns how to read the table."""
        if not panel.kind.is_loss:
            return ""
        ratios = "In brackets: the value divided by the run's own at its train length. "
        return ratios * self.is_by_length + (BEST if panel.has_best else NO_BEST)


REGISTRY = Registry("evaluator", "evaluator", EVALUATORS, "alibi.reporting.measure:Measure")


def measure_of(row: Row) -> Measure:
    """Returns the evaluator of a row."""
    return _measure(row.evaluator, tuple(sorted(row.options.items())))


@functools.cache
def _measure(name: str, options: Sequence[tuple[str, Any]]) -> Measure:
    return REGISTRY.make(name, dict(options))
