"""Packed documents that don't see each other, for any objective."""

import dataclasses

import numpy as np
from jaxtyping import Int, Int32

from alibi.objectives.base import Batch, Objective, Sequences


@dataclasses.dataclass(frozen=True)
class IsolatedDocuments(Objective):
    """Another objective, in which a token sees only tokens of its own document.

    A boundary ends each document. A token that follows one is predicted from it alone, under a
    causal objective; the boundary itself belongs to the document that it ends.

    Attributes:
      objective: predicts the tokens.
      restart: positions are counted from the first token of each document in a row; else through
        the row.
    """

    objective: Objective
    restart: bool

    @property
    def causal(self) -> bool:
        return self.objective.causal

    def batch(self, sequences: Sequences, seed: int = 0, step: int = 0) -> Batch:
        numbers = self._numbers(sequences)
        positions = _places(numbers) if self.restart else None
        batch = self.objective.batch(sequences, seed, step)
        return batch._replace(positions=positions, segment_ids=numbers)

    @property
    def selects(self) -> bool:
        return self.objective.selects

    def context(self, sequences: Sequences) -> Int[np.ndarray, "rows length"]:
        """Returns the number of inputs that the prediction of each token sees."""
        numbers = self._numbers(sequences)
        before = _places(numbers) + 1
        return before if self.causal else before + _places(numbers[:, ::-1])[:, ::-1]

    def _numbers(self, sequences: Sequences) -> Int32[np.ndarray, "rows length"]:
        """Returns the number of each token's document in its row."""
        ends = sequences.tokens[:, :-1] == self.boundary_id
        return np.cumsum(ends, axis=1, dtype=np.int32)


def _places(numbers: Int32[np.ndarray, "rows length"]) -> Int32[np.ndarray, "rows length"]:
    """Returns the place of each token in its document, counted from 0 in each row."""
    columns = np.arange(numbers.shape[1], dtype=np.int32)
    first = np.diff(numbers, axis=1, prepend=numbers[:, :1]) != 0
    return columns - np.maximum.accumulate(np.where(first, columns, 0), axis=1)
