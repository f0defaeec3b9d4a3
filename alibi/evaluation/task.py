"""Tasks: the share of examples and of answers that are right, at each length, or at each gap of answers."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from alibi.config import Config
from alibi.data.corpus import REGISTRY
from alibi.data.tasks import Tasks, find_task
from alibi.evaluation.base import Cell, Evaluator, Subject, Text, option
from alibi.evaluation.windows import Windows
from alibi.reporting.panels import Panel
from alibi.reporting.rows import Entry, Row
from alibi.reporting.tables import Kind, Number, result

EXACT = Kind("Examples all right", "{:.1%}".format, value=result("exact"), trials="examples")
# answers in one example depend on each other, so examples are the trials
ANSWERS = Kind("Answers right", "{:.1%}".format, value=result("answers"), trials="examples")
THRESHOLD = 0.9  # of the effective length


@functools.lru_cache(maxsize=2)
def make_examples(name: str, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples of a task, one after the other, and their gaps."""
    random, task = np.random.default_rng([length, *name.encode()]), find_task(name)
    made = [task.example(random, length) for _ in range(count)]
    tokens, gaps = (np.concatenate(side) for side in zip(*made, strict=True))
    return tokens, gaps


@dataclasses.dataclass(frozen=True)
class TaskAccuracy(Evaluator):
    """Accuracy on new examples of the task of a run, as long as the evaluation length.

    An answer is right if it is the likeliest token after the true ones before it. An example is right
    if all its answers are: greedy decoding would write them.
    """

    examples: int = option(200, "examples at each length", at_least=1)

    kinds: ClassVar[tuple[Kind, ...]] = (EXACT, ANSWERS)

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        if (
            not issubclass(REGISTRY.load(config.data.corpus), Tasks)
            or config.data.tokenizer != "bytes"
        ):
            raise ValueError(
                f"data.corpus={config.data.corpus}, data.tokenizer={config.data.tokenizer} with {self.name()}, which "
                "is for models trained on a task in bytes; configs/task.py trains one"
            )

    def text(self, subject: Subject, cell: Cell) -> Text:
        from alibi.evaluation.subject import Text

        name, tokens = subject.run.config.data.task, np.zeros(0, np.uint8)
        if cell["length"] >= find_task(name).least:
            tokens, _ = make_examples(name, cell["length"], self.examples)
        return Text(tokens, name, "valid", hashlib.sha256(tokens.tobytes()).hexdigest())

    def limit(self, subject: Subject, text: Text, cell: Cell) -> str:
        if len(text.tokens):
            return ""
        return f"the shortest example of {text.corpus} has {find_task(text.corpus).least} tokens"

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        from alibi.evaluation.scorer import wrong_tokens

        length = row.cell["length"]
        _, gaps = make_examples(text.corpus, length, self.examples)
        windows = Windows(0, gaps.size, length, length)
        right = subject.score(text.tokens, windows, self.title(row.cell), wrong_tokens).values == 0
        if right.size == gaps.size:  # the objective predicts other tokens, too
            right = right[gaps > 0]
        example, ranges = np.flatnonzero(gaps) // length, np.ceil(np.log2(gaps[gaps > 0]))
        by_gap = []
        for power in np.unique(ranges).astype(int).tolist():
            here = ranges == power
            by_gap.append((2**power, float(right[here].mean()), np.unique(example[here]).size))
        return {
            "exact": 1 - np.unique(example[~right]).size / self.examples,
            "examples": self.examples,
            "answers": float(right.mean()),
            "by_gap": tuple(by_gap),
        }

    # ---- how reports show it

    def facts(self, panel: Panel) -> list[str]:
        task = find_task(panel.corpus)
        return [
            f"{panel.kind.title} by {self.across}: {panel.corpus}, {task.about}",
            f"{self.examples} new examples in each cell",
            f"an answer drawn at random is right in {task.chance:.1%}",
        ]

    def explanation(self, panel: Panel) -> str:
        """Returns the effective length of each line: the longest up to which all are good enough."""
        effective = []
        for one in panel.series:
            good = itertools.takewhile(
                lambda cell: isinstance(cell[1], Number) and cell[1].mean >= THRESHOLD,
                sorted(one.cells.items()),
            )
            longest = max((length for length, _ in good), default=0)
            effective.append(f"{one.label} {longest:,}" if longest else f"{one.label} none")
        return f"Effective length, up to which at least {THRESHOLD:.0%} are right: {', '.join(effective)}."


@dataclasses.dataclass(frozen=True)
class TaskGaps(TaskAccuracy):
    """Accuracy of answers at each distance to the symbol that decides them, in powers of two."""

    kinds: ClassVar = (ANSWERS,)
    labels: ClassVar = ("window",)
    across: ClassVar = "tokens from the deciding symbol to its answer, up to"

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        from alibi.parallel.hosts import broadcast

        twin = dataclasses.replace(row, evaluator=TaskAccuracy.name())
        # those of process 0, which alone writes rows: all processes measure, or none
        measured = broadcast(
            lambda: [
                dict(other.results) for other in subject.output.find(twin) if other.is_measured
            ]
        )
        if not measured:
            return super().measure(subject, text, row)
        return measured[0] | {"by_gap": tuple(map(tuple, measured[0]["by_gap"]))}

    def entries(self, row: Row) -> list[Entry]:
        return [
            Entry(row, (row.cell["length"],), gap, {"answers": share, "examples": examples})
            for gap, share, examples in row.results.get("by_gap", ())
        ]

    def explanation(self, panel: Panel) -> str:
        return ""
