"""Which tokens are scored with which context, so that each is scored exactly once.

The stream t[0..N) is read through its inputs u = [boundary, t[0], ..., t[N-2]]: u[i] is
the true token before t[i], and t[i] is the target of u[i]. Window k scores the targets
t[kS : (k+1)S], S the stride, and reads the inputs of those and up to L - S inputs before
them, L the length. With S = L the windows do not overlap.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class Windows:
    """All windows of a stream; arrays are made only for the windows asked for, so a long stream costs nothing.

    Attributes:
      num_tokens: tokens of the stream, each scored once.
      length: inputs that a window holds at most (L).
      stride: tokens that a window scores at most (S).
    """

    num_tokens: int
    length: int
    stride: int

    def __len__(self) -> int:
        return -(-self.num_tokens // self.stride)

    @property
    def mode(self) -> str:
        """Of a result row: "nonoverlapping" or "sliding"."""
        return "nonoverlapping" if self.stride == self.length else "sliding"

    def first_scored(self, windows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """Index in the stream of the first token that each window scores."""
        return np.minimum(np.asarray(windows, np.int64) * self.stride, self.num_tokens)

    def num_scored(self, windows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """Tokens that each window scores; 0 for numbers beyond the last window."""
        return np.minimum(self.num_tokens - self.first_scored(windows), self.stride)

    def first_input(self, windows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """Index in u of the first input of each window; u[0] is the boundary."""
        return np.maximum(self.first_scored(windows) - (self.length - self.stride), 0)

    def num_inputs(self, windows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """Inputs of each window, at most `length`."""
        return self.first_scored(windows) + self.num_scored(windows) - self.first_input(windows)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of one static shape, whatever the windows in them.

    Attributes:
      inputs: int32, u of each window, padded on the right by the boundary.
      targets: int32, -1 where there is nothing to score.
      scored_from: int32, the input position that targets[:, 0] belongs to.
    """

    inputs: Int[np.ndarray, "rows length"]
    targets: Int[np.ndarray, "rows stride"]
    scored_from: Int[np.ndarray, " rows"]


def plan(num_tokens: int, length: int, stride: int | None = None) -> Windows:
    """The windows that score a stream of `num_tokens` at `length`, as the paper's code does (section 2.2, appendix B).

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


def gather(
    tokens: Int[np.ndarray, " tokens"], windows: Windows, numbers: Int[np.ndarray, " rows"], boundary_id: int
) -> Batch:
    """The rows of the windows `numbers`; a number beyond the last window gives a row that scores nothing.

    Args:
      tokens: the stream, read only where these windows lie (a memory map stays on disk).
      boundary_id: the token that stands before the first one.
    """
    first_input, num_inputs = windows.first_input(numbers), windows.num_inputs(numbers)
    first_scored, num_scored = windows.first_scored(numbers), windows.num_scored(numbers)
    # One contiguous piece of the stream holds all rows, because their windows are neighbours.
    start = max(int(first_input.min()) - 1, 0)
    piece = np.asarray(tokens[start : int((first_scored + num_scored).max())]).astype(np.int32)
    if not piece.size:
        piece = np.array([boundary_id], np.int32)

    columns = np.arange(windows.length)[None, :]
    before = first_input[:, None] + columns - 1  # u[i] = t[i - 1]
    inputs = piece[np.clip(before - start, 0, piece.size - 1)]
    inputs = np.where((before >= 0) & (columns < num_inputs[:, None]), inputs, np.int32(boundary_id))

    columns = np.arange(windows.stride)[None, :]
    targets = piece[np.clip(first_scored[:, None] + columns - start, 0, piece.size - 1)]
    targets = np.where(columns < num_scored[:, None], targets, np.int32(-1))
    return Batch(inputs, targets, (num_inputs - num_scored).astype(np.int32))


def batches(windows: Windows, batch_size: int) -> Iterator[Int[np.ndarray, " rows"]]:
    """Window numbers in stream order, `batch_size` at a time; those of the last batch run on beyond the last window."""
    for start in range(0, len(windows), batch_size):
        yield np.arange(start, start + batch_size)
