"""Prediction of answers alone, at the places that marks in a task's text say."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from alibi.config import Config
from alibi.objectives.base import Batch, Sequences
from alibi.objectives.next_token import NextToken

# An answer is the token after ASK, the second after QUERY, and each from EQUALS to the next END.
END, EQUALS, ASK, QUERY = b"\n=?!"


@dataclasses.dataclass(frozen=True)
class Answers(NextToken):
    """The next token, in answers alone. A model reads the other tokens and is not trained on them. For
    texts in bytes.
    """

    selects = True

    def check(self, config: Config) -> None:
        if config.data.tokenizer != "bytes":
            raise ValueError(
                "objective.name=answers reads the marks of answers as bytes, and data.tokenizer="
                f"{config.data.tokenizer} has other tokens; use bytes"
            )

    def batch(
        self, sequences: Sequences, seed: int = 0, step: int = 0, *, training: bool = False
    ) -> Batch:
        batch = super().batch(sequences, seed, step)
        answers = answers_of(sequences.tokens)[:, 1:] & (batch.targets >= 0)
        return batch._replace(targets=np.where(answers, batch.targets, np.int32(-1)))


def answers_of(tokens: Int[np.ndarray, "rows length"]) -> Bool[np.ndarray, "rows length"]:
    """Returns which tokens are answers. The mark must lie in the row too."""
    places = np.arange(tokens.shape[1])
    equals, end = (
        np.maximum.accumulate(np.where(tokens == mark, places, -1), axis=1)
        for mark in (EQUALS, END)
    )
    answers = (equals > end) & (equals < places)
    answers[:, 1:] |= tokens[:, :-1] == ASK
    answers[:, 2:] |= tokens[:, :-2] == QUERY
    return answers
