"""Passkey retrieval: accuracy at each distance of the key and length of the window.

Perplexity does not show whether a model uses a longer context or only survives it. Here a window
holds book text and a key, at a known distance from the question at the window's end (after
Mohtashami & Jaggi 2023, arXiv 2305.16300, where the passkey lies between repeated sentences).
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from alibi.config import Config
from alibi.data.books import Books, KeyPrompts, PassKeys, distances
from alibi.data.corpus import REGISTRY
from alibi.data.tokenizers import Tokenizer
from alibi.evaluation.base import Cell, Evaluator, Subject, Text, option, refuse_other_objectives
from alibi.evaluation.windows import Windows
from alibi.reporting.panels import Panel
from alibi.reporting.rows import Row
from alibi.reporting.tables import Kind, fact, result

ACCURACY = Kind("Keys found again", "{:.0%}".format, value=result("accuracy"), trials="prompts")


@dataclasses.dataclass(frozen=True)
class Passkey(Evaluator):
    """The share of passkeys that greedy decoding finds, for each window and distance."""

    prompts: int = option(200, "keys to be found at each length and distance", at_least=1)
    distractors: int = option(
        0, "other keys in each window, told before the one that is asked", at_least=0
    )
    distance: int | None = option(
        None,
        "tokens from the key to its answer, in windows of any length; defaults to each power of two that fits",
        of_row=False,
        at_least=1,
    )

    kinds: ClassVar = (ACCURACY,)
    labels: ClassVar = ("window",)
    across: ClassVar = "tokens from the key to its answer"

    def check(self, config: Config, lengths: Sequence[int]) -> None:
        refuse_other_objectives("passkey", config)
        if config.data.tokenizer == "words":
            raise ValueError(
                "data.tokenizer=words with passkey: a key would be one unknown word; passkeys need bytes or bpe"
            )

    def cells(self, config: Config, lengths: Sequence[int]) -> list[Cell]:
        return [
            {"length": length, "distance": distance}
            for length in lengths
            for distance in ([self.distance] if self.distance else distances(length))
        ]

    def note(self, config: Config) -> str:
        if issubclass(REGISTRY.load(config.data.corpus), PassKeys):
            return ""
        return (
            f"was trained on data.corpus={config.data.corpus}, not {PassKeys.name}, and may find no key; "
            "configs/passkey.py trains a run that does"
        )

    def text(self, subject: Subject, cell: Cell) -> Text:
        from alibi.evaluation.subject import Text

        keys = _keys(subject.run.tokenizer)
        tokens = keys.ids
        if not keys.limit(cell["length"], cell["distance"], self.distractors):
            tokens = keys.make(
                cell["length"], cell["distance"], self.prompts, self.distractors
            ).ravel()
        return Text(tokens, Books.name, "valid", hashlib.sha256(tokens.tobytes()).hexdigest())

    def limit(self, subject: Subject, text: Text, cell: Cell) -> str:
        return _keys(subject.run.tokenizer).limit(
            cell["length"], cell["distance"], self.distractors
        )

    def title(self, cell: Cell) -> str:
        return f"with a key {cell['distance']:,} tokens back in {cell['length']:,}"

    def measure(self, subject: Subject, text: Text, row: Row) -> Mapping[str, Any]:
        from alibi.evaluation.scorer import wrong_tokens

        count, length = self.prompts, row.cell["length"]
        tokens, size = length + 1, _keys(subject.run.tokenizer).size
        windows = Windows(tokens - size, count * tokens, length, size, spacing=tokens)
        score = subject.score(text.tokens, windows, self.title(row.cell), wrong_tokens)
        # each token after the true ones before it: greedy decoding answers with the key
        is_found = (score.values.reshape(count, size) == 0).all(axis=1)
        return {"accuracy": float(is_found.mean()), "prompts": count}

    # ---- how reports show it

    def facts(self, panel: Panel) -> list[str]:
        return [
            f"{panel.kind.title}, by {self.across}",
            f"{self.prompts} prompts in each cell"
            + f", each with {self.distractors} other keys before" * bool(self.distractors),
            fact("trained at {}", (row.train_length for row in panel.rows)),
        ]

    def alt(self, panel: Panel) -> str:
        return "keys found again, by distance"


@functools.lru_cache(maxsize=1)  # it holds a book in tokens
def _keys(tokenizer: Tokenizer) -> KeyPrompts:
    return KeyPrompts(
        b"".join(piece.utf8 for piece in Books({"valid": "valid"}).pieces("valid")), tokenizer
    )
