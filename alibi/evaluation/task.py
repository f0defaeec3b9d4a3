"""Tasks: the share of examples and of answers that are right, by length, or by the answers' gaps."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from alibi.config import Config
from alibi.data.tasks import Tasks, find_task
from alibi.evaluation.base import Cell, Evaluator, option
from alibi.evaluation.windows import Windows
from alibi.reporting.rows import Entry, Row
from alibi.reporting.tables import Kind, Number, result

if TYPE_CHECKING:
    from alibi.evaluation.subject import Subject, Text
    from alibi.reporting.panels import Panel

EXACT = Kind("Examples all right", "{:.1%}".format, value=result("exact"), trials="examples")
ANSWERS = Kind("Answers right", "{:.1%}".format, value=result("answers"), trials="tokens")
THRESHOLD = 0.9  # of the effective length


@dataclasses.dataclass(frozen=True)
class TaskAccuracy(Evaluator):
    """Accuracy on new examples of the task of a run, as long as the evaluation length.

    An answer is right if it is the likeliest token after the true ones before it; an example is, if
    all of its answers are, as greedy decoding would write them.
    """

    examples: int = option(200, "examples at each length", at_least=1)

    kinds: ClassVar[tuple[Kind, ...]] = (EXACT, ANSWERS)

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        if config.data.corpus != Tasks.name or config.data.tokenizer != "bytes":
            raise ValueError(
                f"data.corpus={config.data.corpus}, data.tokenizer={config.data.tokenizer} with {self.name()}, which "
                "is for models trained on a task in bytes; configs/task.py trains one"
            )

    def text(self, subject: "Subject", cell: Cell) -> "Text":
        from alibi.evaluation.subject import Text

        name, length = subject.run.config.data.task, cell["length"]
        tokens = (
            np.zeros(0, np.uint8) if self.limit_of(name, length) else self._made(name, length)[0]
        )
        return Text(tokens, name, "valid", hashlib.sha256(tokens.tobytes()).hexdigest())

    def limit(self, subject: "Subject", text: "Text", cell: Cell) -> str:
        return self.limit_of(subject.run.config.data.task, cell["length"])

    def limit_of(self, name: str, length: int) -> str:
        """Returns why a task has no example of a length, or ""."""
        least = find_task(name).least
        return f"the shortest example of {name} has {least} tokens" if length < least else ""

    def _made(self, name: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples, one after the other, and their gaps."""
        random = np.random.default_rng([length, *name.encode()])
        made = [find_task(name).example(random, length) for _ in range(self.examples)]
        tokens, gaps = (np.concatenate(side) for side in zip(*made, strict=True))
        return tokens, gaps

    def measure(self, subject: "Subject", text: "Text", row: Row) -> Mapping[str, Any]:
        from alibi.evaluation.scorer import wrong_tokens

        length = row.cell["length"]
        gaps = self._made(text.corpus, length)[1]
        windows = Windows(0, gaps.size, length, length)
        title = f"{subject.run.title} {self.title(row.cell)}"
        wrong = subject.score(text.tokens, windows, title, wrong_tokens).nll_nats
        if wrong.size == gaps.size:  # the objective predicts other tokens, too
            wrong = wrong[gaps > 0]
        failed = {*(np.flatnonzero(gaps)[wrong > 0] // length)}
        ranges = np.ceil(np.log2(gaps[gaps > 0])).astype(int)
        count, errors = np.bincount(ranges), np.bincount(ranges, wrong)
        return {
            "exact": 1 - len(failed) / self.examples,
            "examples": self.examples,
            "answers": float(1 - wrong.mean()),
            "tokens": wrong.size,
            "gaps": tuple(2**number for number in np.flatnonzero(count).tolist()),
            "by_gap": tuple((1 - errors / np.maximum(count, 1))[count > 0].tolist()),
            "tokens_by_gap": tuple(count[count > 0].tolist()),
        }

    # ---- how reports show it

    def facts(self, panel: "Panel") -> list[str]:
        task = find_task(panel.corpus)
        return [
            f"{panel.kind.title} by {self.across}: {panel.corpus}, {task.about}",
            f"{self.examples} new examples in each cell",
            f"an answer drawn at random is right in {task.chance:.1%}",
        ]

    def explanation(self, panel: "Panel") -> str:
        """Returns the effective length of each line: the longest up to which all are good enough."""
        found = []
        for one in panel.series:
            good = [""]
            for length, cell in sorted(one.cells.items()):
                if not isinstance(cell, Number) or cell.mean < THRESHOLD:
                    break
                good.append(f"{length:,}")
            found.append(f"{one.label} {good[-1] or 'none'}")
        return (
            f"Effective length, up to which at least {THRESHOLD:.0%} are right: {', '.join(found)}."
        )


@dataclasses.dataclass(frozen=True)
class TaskGaps(TaskAccuracy):
    """Accuracy of answers by the distance to the symbol that decides them, in powers of two."""

    kinds: ClassVar = (ANSWERS,)
    labels: ClassVar = ("window",)
    across: ClassVar = "tokens from the deciding symbol to its answer, up to"

    def entries(self, row: Row) -> list[Entry]:
        found = row.results
        by_gap = [found.get(key, ()) for key in ("gaps", "by_gap", "tokens_by_gap")]
        return [
            Entry(row, (row.cell["length"],), gap, {"answers": share, "tokens": tokens})
            for gap, share, tokens in zip(*by_gap, strict=True)
        ]

    def explanation(self, panel: "Panel") -> str:
        return ""
