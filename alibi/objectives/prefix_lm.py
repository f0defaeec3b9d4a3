"""Next tokens after a prefix that sees itself from both sides (Raffel et al. 2020, arXiv 1910.10683,
section 3.2.1; Dong et al. 2019, arXiv 1905.03197).
"""

import dataclasses

import numpy as np

from alibi.config.fields import number
from alibi.objectives.base import Batch, Sequences, random_lots, uniform
from alibi.objectives.next_token import NextToken


@dataclasses.dataclass(frozen=True)
class PrefixLM(NextToken):
    """The next token, after a prefix in some rows. Tokens of a prefix see all of it and are not predicted.

    The prefix's length is drawn uniformly from 0 to below the row's. Other rows, evaluation and
    generation have no prefix, as plain text.

    Attributes:
      rate: share of the rows with a prefix.
    """

    both_sides = True
    scored_as_text = True

    rate: float = number(0.5, at_least=0.0, at_most=1.0)

    def batch(
        self, sequences: Sequences, seed: int = 0, step: int = 0, *, training: bool = False
    ) -> Batch:
        batch = super().batch(sequences, seed, step)
        places = np.arange(batch.inputs.shape[1], dtype=np.int32)
        if not training:
            return batch
        drawn = [uniform(random_lots(first, 1, seed, step))[0, :2] for first in sequences.first]
        chosen, share = np.array(drawn).reshape(-1, 2).T[..., None]
        last = np.where(chosen < self.rate, share * places.size, 0.0).astype(np.int32) - 1
        # an input before the last of the prefix would see its target
        targets = np.where(places < last, np.int32(-1), batch.targets)
        return batch._replace(targets=targets, reach=np.maximum(places, last))
