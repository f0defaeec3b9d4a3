"""Training batches as a pure function of (seed, step, row): nothing to save, nothing to replay."""

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from alibi.data.tokenfile import Tokens, TokenStream


class TrainBatches:
    """The blocks of a token stream, shuffled anew in each epoch.

    Blocks are `length` tokens long, cross document borders and are the same in each epoch; the last
    block may be shorter. An epoch holds each block once (arXiv 2108.12409; fairseq's "none" break
    mode). Batches may cross epochs.
    """

    def __init__(
        self, tokens: Tokens, *, length: int, batch_size: int, seed: int, boundary_id: int
    ):
        """`tokens` [N]: a split; `boundary_id`: the token before its first one.

        Raises ValueError if the split has fewer than `length` tokens.
        """
        if length > len(tokens):
            raise ValueError(
                f"train_length={length:,} is longer than the corpus, which has {len(tokens):,} tokens; "
                "use a shorter length or more text"
            )
        self._tokens, self.length, self.batch_size, self._boundary_id = (
            tokens,
            length,
            batch_size,
            boundary_id,
        )
        self.num_blocks = -(-len(tokens) // length)
        self._seed = seed

    @functools.cached_property
    def _order(self) -> Sequence[int]:
        """The block of each row. Made at its first use: importing Grain takes time, and JAX."""
        import grain

        # Its shuffle is an index permutation, another one for each pass of the repeat: it stores
        # nothing.
        return grain.MapDataset.range(self.num_blocks).seed(self._seed).shuffle().repeat()

    def rows(
        self, step: int, rows: Sequence[int]
    ) -> tuple[Int32[np.ndarray, "rows length"], Int32[np.ndarray, "rows length"]]:
        """Returns inputs and targets of `rows` of update `step` (from 0); targets are -1 past the
        end of the stream.
        """
        inputs = np.full((len(rows), self.length), self._boundary_id, np.int32)
        targets = np.full((len(rows), self.length), -1, np.int32)
        for row in rows:
            if not 0 <= row < self.batch_size:
                raise ValueError(f"row {row} is outside the batch of {self.batch_size} rows")
        starts = [self.block(step, row) * self.length for row in rows]
        if isinstance(self._tokens, TokenStream):
            for start in starts:
                self._tokens.will_read(max(start - 1, 0), start + self.length)
        for i, start in enumerate(starts):
            scored = self._tokens[start : start + self.length]
            targets[i, : len(scored)] = scored
            inputs[i, 1 : len(scored)] = scored[:-1]
            if start:  # else the boundary precedes the first token
                inputs[i, 0] = self._tokens[start - 1]
        return inputs, targets

    def block(self, step: int, row: int) -> int:
        """Returns the number of the block in `row` of update `step`."""
        return int(self._order[step * self.batch_size + row])
