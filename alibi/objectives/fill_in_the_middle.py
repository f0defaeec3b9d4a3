"""A row's middle predicted after its prefix and suffix (Bavarian et al. 2022, arXiv 2207.14255)."""

import dataclasses

import numpy as np

from alibi.config import Config
from alibi.config.fields import number
from alibi.objectives.base import Batch, Sequences, random_lots, uniform
from alibi.objectives.next_token import NextToken


@dataclasses.dataclass(frozen=True)
class FillInTheMiddle(NextToken):
    """Next tokens, in rows of which some are put into the order prefix, suffix, middle.

    Two places cut a row, each drawn uniformly from all places. Four new tokens mark the parts: PREFIX
    prefix SUFFIX suffix MIDDLE middle END. So a row has three fewer tokens of the text, its last ones.
    The loss is over all tokens but the first (section 3). Evaluation reads plain text.

    Attributes:
      rate: share of the rows that are put into this order.
    """

    added_tokens = 4  # PREFIX, SUFFIX, MIDDLE, END, after the text's vocabulary
    scored_as_text = True

    rate: float = number(0.5, at_least=0.0, at_most=1.0)

    def check(self, config: Config) -> None:
        if config.data.isolate_documents:
            raise ValueError(
                "objective.name=fill_in_the_middle moves tokens across the borders of data.isolate_documents="
                f"{config.data.isolate_documents}; leave one of them out"
            )

    def batch(
        self, sequences: Sequences, seed: int = 0, step: int = 0, *, training: bool = False
    ) -> Batch:
        batch = super().batch(sequences, seed, step)
        if not training or batch.inputs.shape[1] < self.added_tokens:
            return batch
        inputs, targets = batch.inputs.copy(), batch.targets.copy()
        for row, (tokens, first) in enumerate(
            zip(sequences.tokens[:, 1:], sequences.first, strict=True)
        ):
            drawn = uniform(random_lots(first, 1, seed, step))[0]
            if drawn[0] < self.rate and tokens.min() >= 0:
                ordered = self.ordered(tokens[:-3], *drawn[1:3])
                inputs[row], targets[row] = ordered[:-1], ordered[1:]
        return batch._replace(inputs=inputs, targets=targets)

    def ordered(self, tokens: np.ndarray, one: float, other: float) -> np.ndarray:
        """Returns tokens in the new order, with the marks. `one` and `other`, from 0 to below 1, are where
        the middle begins and ends, as shares of the row.
        """
        start, stop = sorted(int(share * (len(tokens) + 1)) for share in (one, other))
        prefix, suffix, middle, end = np.arange(4, dtype=np.int32)[:, None] + self.vocab_size
        parts = prefix, tokens[:start], suffix, tokens[stop:], middle, tokens[start:stop], end
        return np.concatenate(parts, dtype=np.int32)
