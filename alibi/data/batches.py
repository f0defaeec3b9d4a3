"""Training batches as a pure function of (seed, step, row): nothing to save or to replay."""

import functools
from collections.abc import Sequence

import numpy as np

from alibi.data.tokenfile import Tokens, TokenStream
from alibi.objectives import Batch, Objective, Sequences

ECHO = 16  # tokens of a passage that comes again
LEAST_GAP = 2 * ECHO
ECHOED = 8  # one block in so many has an echo


class TrainBatches:
    """A token stream's blocks, shuffled anew in each epoch.

    Blocks are `length` tokens long, cross document borders and are the same in each epoch. The last
    one may be shorter, or begins earlier if the objective sees both sides. An epoch holds each block
    once (arXiv 2108.12409, fairseq's "none" break mode). Batches may cross epochs. With `split`, blocks
    have `split * length` tokens, and each is that many rows, so an update reads the same text as with longer rows.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        length: int,
        batch_size: int,
        seed: int,
        objective: Objective,
        echoes: int = 0,
        split: int = 1,
    ):
        """Checks the sizes.

        Args:
          tokens: a split, `[N]`.
          batch_size: rows in an update, a multiple of `split`.
          echoes: longest gap of the echoes in the rows, 0 for none.

        Raises:
          ValueError: a split shorter than a block or than an update, or echoes longer than a row.
        """
        if length * split > len(tokens):
            raise ValueError(
                f"train_length={length * split:,} is longer than the corpus, which has {len(tokens):,} tokens; "
                "use a shorter length or more text"
            )
        self._tokens, self.length, self.batch_size = tokens, length, batch_size
        self._objective, self._split = objective, split
        self.num_blocks = -(-len(tokens) // (length * split))
        if batch_size > (most := self.num_blocks * split):
            raise ValueError(
                f"train.batch_tokens={batch_size * length:,} is more than the corpus, which has {len(tokens):,} "
                f"tokens, and an update reads no token twice; use at most {most * length:,}, or more text"
            )
        self._seed, self._echoes = seed, echoes
        if echoes and not LEAST_GAP <= echoes <= length - ECHO:
            raise ValueError(
                f"data.echoes={echoes} must be 0, or a gap from {LEAST_GAP} to train_length - {ECHO} = {length - ECHO}"
            )

    @functools.cached_property
    def order(self) -> Sequence[int]:
        """Each row's block. Made at its first use: importing Grain takes time, and JAX."""
        import grain

        # Its shuffle is an index permutation, another one for each pass of the repeat: it stores
        # nothing.
        return grain.MapDataset.range(self.num_blocks).seed(self._seed).shuffle().repeat()

    def rows(self, step: int, rows: Sequence[int]) -> Batch:
        """Returns `rows` in update `step` (from 0). Targets are -1 past the end of the stream."""
        tokens = np.full((len(rows), self.length + 1), -1, np.int32)
        whole = self.length * self._split
        starts = [self.block(step, row) * whole for row in rows]
        if self._objective.both_sides:  # padding would be seen
            starts = [min(start, len(self._tokens) - whole) for start in starts]
        parts = zip(starts, rows, strict=True)
        starts = [start + row % self._split * self.length for start, row in parts]
        if isinstance(self._tokens, TokenStream):
            for start in starts:
                self._tokens.will_read(max(start - 1, 0), start + self.length)
        for i, start in enumerate(starts):
            block = self._tokens[max(start - 1, 0) : start + self.length]
            first = int(start == 0)  # no token stands before the stream
            tokens[i, first : first + len(block)] = block
            if self._echoes:
                self._add_echo(tokens[i], np.random.default_rng([self._seed, step, rows[i]]))
        sequences = Sequences(tokens, np.asarray(starts, np.int64))
        return self._objective.batch(sequences, self._seed, step, training=True)

    def _add_echo(self, tokens: np.ndarray, random: np.random.Generator) -> None:
        """Writes a passage of one block in eight again after a gap, with a uniform logarithm."""
        gap = int(LEAST_GAP * (self._echoes / LEAST_GAP) ** random.uniform())
        start = int(random.integers(1, len(tokens) - gap - ECHO + 1))
        if random.integers(ECHOED) == 0 and tokens.min() >= 0:
            tokens[start + gap :][:ECHO] = tokens[start:][:ECHO]

    def block(self, step: int, row: int) -> int:
        """Returns the block for `row` in update `step`."""
        return int(self.order[(step * self.batch_size + row) // self._split])
