"""Which tokens are scored with which context, so that each is scored exactly once.

The stream t[0..N) is read through its inputs u = [boundary, t[0], ..., t[N-2]]: u[i] is
the true token before t[i], and t[i] is the target of u[i]. Window k scores the targets
t[kS : (k+1)S], S the stride, and reads the inputs of those and up to L - S inputs before
them, L the length. With S = L the windows do not overlap.

With S < L the first L // S windows begin with the stream: each is the beginning of the
last of them, which a causal model therefore computes for all. All further windows have
L inputs, of which the last S are scored.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

# The mode of windows that end with the same tokens, however long they are.
SAME_TOKENS = "same tokens"


@runtime_checkable
class Tokens(Protocol):
    """The ids of a stream: an array of one dimension, or what reads the slices of it that are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Windows:
    """All windows of a stream."""

    num_tokens: int  # of the stream, each scored once
    length: int  # inputs that a window holds at most (L)
    stride: int  # tokens that a window scores at most (S)

    @property
    def mode(self) -> str:
        """What a result row calls such windows: "nonoverlapping" or "sliding"."""
        return "nonoverlapping" if self.stride == self.length else "sliding"

    @property
    def parts(self) -> list["Part"]:
        """The rows to compute, in stream order; those of a part are all of one shape."""
        if self.stride == self.length:
            return [Part(0, self.num_tokens, self.length, self.length)]
        begin_together = min(self.length // self.stride * self.stride, self.num_tokens)
        parts = [Part(0, begin_together, self.length, self.length)]
        if begin_together < self.num_tokens:
            parts.append(Part(begin_together, self.num_tokens, self.length, self.stride))
        return parts


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows that score the tokens `start` to `stop` of the stream; arrays are made only for the rows asked for."""

    start: int
    stop: int
    length: int  # inputs of a row
    scored: int  # the last inputs of a row, whose targets it scores; the last row may have fewer
    spacing: int = 0  # tokens from the first one that a row scores to that of the next row; 0: `scored`
    mode: str = ""  # as that of `Windows`, where the rows stand at places of their own

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // (self.spacing or self.scored))

    @property
    def num_tokens(self) -> int:
        """How many tokens the rows score."""
        return self.stop - self.start if not self.spacing else len(self) * self.scored

    @property
    def stride(self) -> int:
        """As that of `Windows`."""
        return self.scored

    def first_scored(self, rows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """Index in the stream of the first token that each row scores; `stop` beyond the last row."""
        return np.minimum(self.start + np.asarray(rows, np.int64) * (self.spacing or self.scored), self.stop)


class Batch(NamedTuple):
    """Rows of one static shape, int32."""

    inputs: Int[np.ndarray, "rows length"]  # u of each row, padded on the right by the boundary
    targets: Int[np.ndarray, "rows scored"]  # of the last inputs; -1 where there is nothing to score


def plan(num_tokens: int, length: int, stride: int | None = None) -> Windows:
    """The windows that score a stream of `num_tokens` at `length`, as the paper's code does (section 2.1, appendix B).

    Args:
      num_tokens: at least 1.
      length: inputs of a window, at least 1.
      stride: tokens that each window scores, 1 to `length`; None: `length`.

    Raises:
      ValueError: a number out of its range.
    """
    stride = length if stride is None else stride
    if num_tokens < 1:
        raise ValueError(f"there are {num_tokens} tokens to score and at least 1 is needed; is the text empty?")
    if length < 1:
        raise ValueError(f"length={length} must be at least 1 token")
    if not 1 <= stride <= length:
        raise ValueError(
            f"stride={stride} must be between 1 and the length {length}: "
            "a window scores its last `stride` tokens; leave it out for windows that do not overlap"
        )
    return Windows(num_tokens, length, stride)


def plan_contexts(num_tokens: int, lengths: Sequence[int], windows: int) -> list[Part]:
    """For each of `lengths`, ascending, the windows that score the same tokens, with that many inputs at most.

    The tokens are the last tenth of each window of the least length, so that even there they have nearly all of its
    context. The windows end at places that are spread evenly over the text, as many as asked for; fewer where they
    would score a token twice.

    Raises:
      ValueError: the text is shorter than the longest window.
    """
    longest, scored = max(lengths), max(1, min(lengths) // 10)
    if num_tokens < longest:
        raise ValueError(f"the text has {num_tokens:,} tokens, fewer than one window of {longest:,}")
    start, last = longest - scored, num_tokens - scored
    count = min(windows, (last - start) // scored + 1)
    spacing = (last - start) // (count - 1) if count > 1 else scored
    stop = start + (count - 1) * spacing + scored
    return [Part(start, stop, length, scored, spacing, SAME_TOKENS) for length in sorted(lengths)]


def gather(tokens: Tokens, part: Part, rows: Int[np.ndarray, " rows"], boundary_id: int) -> Batch:
    """The rows of these numbers; one beyond the last scores nothing.

    Args:
      tokens: the stream, read only where these rows lie (a memory map stays on disk).
      boundary_id: the token that stands before the first one.
    """
    first_scored = part.first_scored(rows)[:, None]
    stop = np.minimum(first_scored + part.scored, part.stop)
    first_input = first_scored - (part.length - part.scored)
    first = np.maximum(first_input - 1, 0)
    # One piece of the stream holds all rows whose windows are neighbours; between others may lie most of the stream.
    begins, ends = (first, stop) if part.spacing else (first.min(keepdims=True), stop.max(keepdims=True))
    pieces = [np.asarray(tokens[begin:end]) for begin, end in zip(begins.flat, ends.flat, strict=True)]
    piece = np.concatenate(pieces).astype(np.int32)
    if not piece.size:
        piece = np.array([boundary_id], np.int32)
    start = ends - np.cumsum(ends - begins)[:, None]  # a row finds token i of the stream at `piece[i - start]`

    before = first_input + np.arange(part.length)[None, :] - 1  # u[i] = t[i - 1]
    inputs = piece[np.clip(before - start, 0, piece.size - 1)]
    inputs = np.where((before >= 0) & (before < stop - 1), inputs, np.int32(boundary_id))

    scored = first_scored + np.arange(part.scored)[None, :]
    targets = piece[np.clip(scored - start, 0, piece.size - 1)]
    targets = np.where(scored < stop, targets, np.int32(-1))
    return Batch(inputs, targets)


def batches(part: Part, batch_size: int) -> Iterator[Int[np.ndarray, " rows"]]:
    """Row numbers in stream order, `batch_size` at a time; those of the last batch run on beyond the last row."""
    for start in range(0, len(part), batch_size):
        yield np.arange(start, start + batch_size)
