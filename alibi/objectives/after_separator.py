"""Prediction of the text between a separator and an end, such as the answers to questions."""

import dataclasses

import numpy as np
from jaxtyping import Bool

from alibi.config import Config
from alibi.objectives.base import Batch, Sequences
from alibi.objectives.next_token import NextToken


@dataclasses.dataclass(frozen=True)
class AfterSeparator(NextToken):
    """The next token, after each separator up to its end, the end included. A model reads the other tokens
    and is not trained on them. For texts in bytes.

    Attributes:
      separator: the text before an answer, such as "Answer:".
      end: the text that ends an answer.
    """

    selects = True

    separator: str = "\t"
    end: str = "\n"

    def check(self, config: Config) -> None:
        if config.data.tokenizer != "bytes" or not self.separator or not self.end:
            raise ValueError(
                f"objective.name=after_separator needs data.tokenizer=bytes, a separator and an end; got "
                f"data.tokenizer={config.data.tokenizer}, separator={self.separator!r}, end={self.end!r}"
            )

    def batch(
        self, sequences: Sequences, seed: int = 0, step: int = 0, *, training: bool = False
    ) -> Batch:
        batch = super().batch(sequences, seed, step)
        places = np.arange(sequences.tokens.shape[1])
        # each token's last place before it at which a separator, or an end, is complete
        opened, closed = (
            np.maximum.accumulate(np.where(_ends(sequences.tokens, text), places, -1), axis=1)
            for text in (self.separator, self.end)
        )
        answers = (opened > closed)[:, :-1]
        return batch._replace(targets=np.where(answers, batch.targets, np.int32(-1)))


def _ends(tokens: np.ndarray, text: str) -> Bool[np.ndarray, "rows length"]:
    """Returns whether a text in bytes ends at each token."""
    wanted = np.frombuffer(text.encode(), np.uint8)
    ends = np.zeros(tokens.shape, bool)
    if (after := tokens.shape[1] - wanted.size + 1) > 0:
        shifts = [tokens[:, i : i + after] == byte for i, byte in enumerate(wanted)]
        ends[:, wanted.size - 1 :] = np.logical_and.reduce(shifts)
    return ends
