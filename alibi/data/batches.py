"""Training batches as a pure function of (seed, step, row): nothing to save or to replay."""

import functools
from collections.abc import Sequence

import numpy as np

from alibi.data.tokenfile import Tokens, TokenStream
from alibi.objectives import Batch, Objective, Sequences


class TrainBatches:
    """A token stream's blocks, shuffled anew in each epoch.

    Blocks are `length` tokens long, cross document borders and are the same in each epoch. The last
    one may be shorter, or begins earlier if the objective sees both sides. An epoch holds each block
    once (arXiv 2108.12409, fairseq's "none" break mode). Batches may cross epochs.
    """

    def __init__(
        self, tokens: Tokens, *, length: int, batch_size: int, seed: int, objective: Objective
    ):
        """`tokens` [N]: a split. Raises ValueError if it is shorter than `length` or an update."""
        if length > len(tokens):
            raise ValueError(
                f"train_length={length:,} is longer than the corpus, which has {len(tokens):,} tokens; "
                "use a shorter length or more text"
            )
        self._tokens, self.length, self.batch_size = tokens, length, batch_size
        self._objective = objective
        self.num_blocks = -(-len(tokens) // length)
        if batch_size > self.num_blocks:
            raise ValueError(
                f"train.batch_tokens={batch_size * length:,} is more than the corpus, which has {len(tokens):,} "
                f"tokens, and an update reads no token twice; use at most {self.num_blocks * length:,}, or more text"
            )
        self._seed = seed

    @functools.cached_property
    def _order(self) -> Sequence[int]:
        """Each row's block. Made at its first use: importing Grain takes time, and JAX."""
        import grain

        # Its shuffle is an index permutation, another one for each pass of the repeat: it stores
        # nothing.
        return grain.MapDataset.range(self.num_blocks).seed(self._seed).shuffle().repeat()

    def rows(self, step: int, rows: Sequence[int]) -> Batch:
        """Returns `rows` in update `step` (from 0). Targets are -1 past the end of the stream."""
        tokens = np.full((len(rows), self.length + 1), -1, np.int32)
        for row in rows:
            if not 0 <= row < self.batch_size:
                raise ValueError(f"row {row} is outside the batch of {self.batch_size} rows")
        starts = [self.block(step, row) * self.length for row in rows]
        if not self._objective.causal:  # padding would be seen
            starts = [min(start, len(self._tokens) - self.length) for start in starts]
        if isinstance(self._tokens, TokenStream):
            for start in starts:
                self._tokens.will_read(max(start - 1, 0), start + self.length)
        for i, start in enumerate(starts):
            block = self._tokens[max(start - 1, 0) : start + self.length]
            first = int(start == 0)  # no token stands before the stream
            tokens[i, first : first + len(block)] = block
        sequences = Sequences(tokens, np.asarray(starts, np.int64))
        return self._objective.batch(sequences, self._seed, step)

    def block(self, step: int, row: int) -> int:
        """Returns the block for `row` in update `step`."""
        return int(self._order[step * self.batch_size + row])
