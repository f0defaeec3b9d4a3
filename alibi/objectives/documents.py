"""Packed documents that don't see each other, for any objective."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from alibi.objectives.base import Batch, Objective, Sequences


@dataclasses.dataclass(frozen=True)
class IsolatedDocuments(Objective):
    """Another objective, in which a token sees only its own document.

    A boundary ends each document and belongs to it. Under a causal objective the token after a
    boundary is predicted from the boundary alone.

    Attributes:
      objective: predicts the tokens.
      restart: positions count from each document's first token in a row, otherwise through the row.
    """

    objective: Objective
    restart: bool

    @property
    def causal(self) -> bool:
        return self.objective.causal

    @property
    def both_sides(self) -> bool:
        return self.objective.both_sides

    @property
    def added_tokens(self) -> int:
        return self.objective.added_tokens

    @property
    def scored_as_text(self) -> bool:
        return self.objective.scored_as_text

    @property
    def recorded(self) -> dict[str, Any] | None:
        return self.objective.recorded

    def batch(
        self, sequences: Sequences, seed: int = 0, step: int = 0, *, training: bool = False
    ) -> Batch:
        documents = self._documents(sequences)
        batch = self.objective.batch(sequences, seed, step, training=training)
        positions, reach = (_places(documents) if self.restart else None), batch.reach
        if reach is not None and positions is not None:
            reach = reach - np.arange(reach.shape[1], dtype=np.int32) + positions
        return batch._replace(positions=positions, segment_ids=documents, reach=reach)

    @property
    def selects(self) -> bool:
        return self.objective.selects

    def context(self, sequences: Sequences) -> Int[np.ndarray, "rows length"]:
        """Returns how many inputs each token's prediction sees."""
        documents = self._documents(sequences)
        before = _places(documents) + 1
        return before if self.causal else before + _places(documents[:, ::-1])[:, ::-1]

    def _documents(self, sequences: Sequences) -> Int32[np.ndarray, "rows length"]:
        """Returns the number of each token's document in its row."""
        return np.cumsum(sequences.tokens[:, :-1] == self.boundary_id, axis=1, dtype=np.int32)


def _places(documents: Int32[np.ndarray, "rows length"]) -> Int32[np.ndarray, "rows length"]:
    """Returns each token's place in its document, counted from 0 in each row."""
    columns = np.arange(documents.shape[1], dtype=np.int32)
    first = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    return columns - np.maximum.accumulate(np.where(first, columns, 0), axis=1)
