"""Passkey retrieval: accuracy by the key's distance and the window's length.

Perplexity does not show whether a model uses a longer context or only survives it. Here a window
holds book text and a key, at a known distance from the question at the window's end (after
Mohtashami & Jaggi 2023, arXiv 2305.16300, where the passkey lies between repeated sentences).
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from alibi.config import Config
from alibi.data.books import DIGITS, Books, PassKeys, distances, make_prompts, why_too_short
from alibi.evaluation.base import Cell, Evaluator, option, refuse_other_objectives
from alibi.evaluation.windows import Windows
from alibi.reporting.rows import Row
from alibi.reporting.tables import Kind, fact, result

if TYPE_CHECKING:
    from alibi.evaluation.subject import Subject, Text
    from alibi.reporting.panels import Panel

ACCURACY = Kind("Keys found again", "{:.0%}".format, value=result("accuracy"), trials="prompts")


@dataclasses.dataclass(frozen=True)
class Passkey(Evaluator):
    """The share of passkeys that greedy decoding finds, by window and distance."""

    prompts: int = option(200, "keys to be found at each length and distance", at_least=1)

    kinds: ClassVar = (ACCURACY,)
    labels: ClassVar = ("window",)
    across: ClassVar = "tokens from the key to its answer"

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        refuse_other_objectives("passkey", config)
        if config.data.tokenizer != "bytes":
            raise ValueError(
                f"data.tokenizer={config.data.tokenizer} with passkey; passkeys need a model of bytes"
            )

    def cells(self, config: Config, lengths: Sequence[int]) -> list[Cell]:
        return [
            {"length": length, "distance": distance}
            for length in lengths
            for distance in distances(length)
        ]

    def note(self, config: Config) -> str:
        if config.data.corpus == PassKeys.name:
            return ""
        return (
            f"was trained on data.corpus={config.data.corpus}, not {PassKeys.name}, and may find no key; "
            "configs/passkey.py trains a run that does"
        )

    def text(self, subject: "Subject", cell: Cell) -> "Text":
        from alibi.evaluation.subject import Text

        length, book = cell["length"], _book()
        prompts = book
        if not why_too_short(book, length):
            prompts = make_prompts(book, length, cell["distance"], self.prompts).tobytes()
        sha256 = hashlib.sha256(prompts).hexdigest()
        return Text(np.frombuffer(prompts, np.uint8), Books.name, "valid", sha256)

    def limit(self, subject: "Subject", text: "Text", cell: Cell) -> str:
        return why_too_short(_book(), cell["length"])

    def title(self, cell: Cell) -> str:
        return f"with a key {cell['distance']:,} tokens back in {cell['length']:,}"

    def measure(self, subject: "Subject", text: "Text", row: Row) -> Mapping[str, Any]:
        from alibi.evaluation.scorer import wrong_tokens

        count, length = self.prompts, row.cell["length"]
        tokens = length + 1
        windows = Windows(tokens - DIGITS, count * tokens, length, DIGITS, spacing=tokens)
        title = f"{subject.run.title} {self.title(row.cell)}"
        score = subject.score(text.tokens, windows, title, wrong_tokens)
        # each digit after the true ones before it: greedy decoding answers with the key
        is_found = (score.nll_nats.reshape(count, DIGITS) == 0).all(axis=1)
        return {"accuracy": float(is_found.mean()), "prompts": count}

    # ---- how reports show it

    def facts(self, panel: "Panel") -> list[str]:
        return [
            f"{panel.kind.title}, by {self.across}",
            f"{self.prompts} prompts in each cell",
            fact("trained at {}", (row.train_length for row in panel.rows)),
        ]

    def alt(self, panel: "Panel") -> str:
        return "keys found again, by distance"


@functools.cache
def _book() -> bytes:
    return b"".join(piece.utf8 for piece in Books({"valid": "valid"}).pieces("valid"))
