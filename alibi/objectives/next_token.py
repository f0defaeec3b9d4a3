"""Each token predicted from the tokens before it (paper, section 2.1)."""

import dataclasses

import numpy as np

from alibi.objectives.base import Batch, Objective, Sequences


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """Each input is the token before its target. The boundary stands before the text."""

    causal = True

    @property
    def scored_as_text(self) -> bool:
        return type(self) is NextToken  # a subclass says it for itself

    def batch(
        self, sequences: Sequences, seed: int = 0, step: int = 0, *, training: bool = False
    ) -> Batch:
        before, targets = sequences.tokens[:, :-1], sequences.tokens[:, 1:]
        inputs = np.where((before >= 0) & (targets >= 0), before, np.int32(self.boundary_id))
        return Batch(inputs, targets)
