"""Windows over a token stream: which tokens each window scores, and with which context.

The stream t[0..N) is read through its inputs u = [boundary, t[0], ..., t[N-2]]: u[i] is the true token before t[i],
and t[i] is the target of u[i]. Window k scores the targets t[kS : (k+1)S], with S the stride. It reads the inputs of
those targets and up to L - S inputs before them, with L the length. With S = L the windows do not overlap. Each token
is scored exactly once.

With S < L the first L // S windows begin with the stream: each is the beginning of the last of them, so a causal
model computes all of them in a single row. All further windows have L inputs, and score the last S of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

SAME_TOKENS = "same tokens"  # the mode of windows of several lengths that score the same tokens


@runtime_checkable
class Tokens(Protocol):
    """The ids of a stream: a one-dimensional array, or an object with its slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Windows:
    """All windows of a stream."""

    num_tokens: int  # of the stream, each scored once
    length: int  # inputs of a window at most (L)
    stride: int  # tokens that a window scores at most (S)

    @property
    def mode(self) -> str:
        """The mode in result rows: "nonoverlapping" or "sliding"."""
        return "nonoverlapping" if self.stride == self.length else "sliding"

    @property
    def parts(self) -> list["Part"]:
        """The rows to compute, in stream order, in parts of equal shape."""
        if self.stride == self.length:
            return [Part(0, self.num_tokens, self.length, self.length)]
        begin_together = min(self.length // self.stride * self.stride, self.num_tokens)
        parts = [Part(0, begin_together, self.length, self.length)]
        if begin_together < self.num_tokens:
            parts.append(Part(begin_together, self.num_tokens, self.length, self.stride))
        return parts


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of the same shape, which score tokens between `start` and `stop` of a stream."""

    start: int
    stop: int
    length: int  # inputs of a row
    scored: int  # each row scores the targets of its last inputs, this many; the last row may score fewer
    spacing: int = 0  # tokens from the first scored token of a row to that of the next row; 0: `scored`
    mode: str = ""  # the mode in result rows, if `spacing` is given

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // (self.spacing or self.scored))

    @property
    def num_tokens(self) -> int:
        """The number of scored tokens."""
        return self.stop - self.start if not self.spacing else len(self) * self.scored

    @property
    def stride(self) -> int:
        """The stride in result rows."""
        return self.scored

    def first_scored(self, rows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """Returns the index in the stream of the first scored token of each row; `stop` beyond the last row."""
        return np.minimum(self.start + np.asarray(rows, np.int64) * (self.spacing or self.scored), self.stop)


class Batch(NamedTuple):
    """Rows of a static shape, int32."""

    inputs: Int[np.ndarray, "rows length"]  # u of each row, padded on the right with the boundary
    targets: Int[np.ndarray, "rows scored"]  # of the last inputs; -1 for nothing to score


def plan(num_tokens: int, length: int, stride: int | None = None) -> Windows:
    """Returns the windows that score a stream of `num_tokens` as the paper's code does (section 2.1, appendix B).

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
    """Returns for each of `lengths`, ascending, windows of that length; all lengths score the same tokens.

    These are the last tenth of each window of the shortest length, so even there they have nearly all of its
    context. The windows end at places spread evenly over the text; there are fewer than `windows` if so many would
    score a token twice.

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
    """Returns the rows with these numbers; a row beyond the last scores nothing.

    Args:
      tokens: the stream; only the tokens of these rows are read (a memory map stays on disk).
      boundary_id: the token before the stream.
    """
    first_scored = part.first_scored(rows)[:, None]
    stop = np.minimum(first_scored + part.scored, part.stop)
    first_input = first_scored - (part.length - part.scored)
    first = np.maximum(first_input - 1, 0)
    # Neighbouring windows are read as one piece of the stream; between spaced windows may lie most of the stream.
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
