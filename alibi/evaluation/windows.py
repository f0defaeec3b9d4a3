"""Windows over a token stream: which tokens each window scores, and with which context.

The stream t[0..N) is read through its inputs u = [boundary, t[0], ..., t[N-2]]: u[i] is the true
token before t[i], and t[i] is the target of u[i]. Window k scores the targets t[kS : (k+1)S], with
stride S. It reads their inputs and up to L - S inputs before them, with length L. With S = L the
windows do not overlap. Each token is scored exactly once.

A model that sees both sides reads a window's own tokens t, without overlap (S = L). In
`same_token_windows` it scores those in the middle. A shorter last window is a row with its own length,
since the model would see padding.

With S < L the first L // S windows begin with the stream: each is the beginning of the last one, so
a causal model computes all of them in a single row. All further windows have L inputs, and score
the last S.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int

from alibi.data.tokenfile import Tokens
from alibi.objectives import IsolatedDocuments, Objective, Sequences


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows with the same length, which score tokens between `start` and `stop`."""

    start: int
    stop: int
    length: int  # inputs of a window at most (L)
    stride: int  # tokens that a window scores (S); the last window may score fewer
    # tokens between the first scored tokens of neighbouring windows, defaults to `stride`
    spacing: int = 0
    causal: bool = True  # the model sees no inputs after those of a target
    # the token that each window reads first, in place of the text's own before its second
    begin: int | None = None
    after: int = 0  # inputs after the scored tokens, for a model that sees both sides

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // (self.spacing or self.stride))

    @property
    def num_tokens(self) -> int:
        """The number of scored tokens."""
        return len(self) * self.stride if self.spacing else self.stop - self.start

    @property
    def places(self) -> Int[np.ndarray, " tokens"]:
        """Where the scored tokens stand in the stream, in their order."""
        first = self.start + np.arange(len(self)) * (self.spacing or self.stride)
        return (first[:, None] + np.arange(self.stride)).ravel()[: self.num_tokens]

    @property
    def groups(self) -> list["Windows"]:
        """The same windows as rows to compute, in groups of equal shape: the windows at the start
        share a row, and a shorter last window is a group if the model sees both sides.
        """
        if not self.causal and not self.spacing:
            left = self.num_tokens % self.length
            whole = dataclasses.replace(self, stop=self.stop - left)
            shorter = dataclasses.replace(self, start=whole.stop, length=left, stride=left)
            return [group for group in (whole, shorter) if group.start < group.stop]
        if self.stride == self.length or self.start or self.spacing:
            return [self]
        together = min(self.length // self.stride * self.stride, self.stop)
        row, rest = (
            dataclasses.replace(self, stop=together, stride=self.length),
            dataclasses.replace(self, start=together),
        )
        return [row, rest] if rest.num_tokens else [row]


def windows_of(
    num_tokens: int, length: int, stride: int | None = None, *, causal: bool = True
) -> Windows:
    """Returns the windows that score a stream as the paper's code does (section 2.1, appendix B).

    Args:
      num_tokens: at least 1.
      length: inputs in a window, at least 1.
      stride: tokens that each window scores, 1 to `length`, defaults to `length`.
      causal: whether the model sees earlier tokens alone.

    Raises:
      ValueError: a number is out of its range, or the stride is below the length and the model sees
        both sides.
    """
    stride = length if stride is None else stride
    if num_tokens < 1:
        raise ValueError(
            f"there are {num_tokens} tokens to score and at least 1 is needed; is the text empty?"
        )
    if length < 1:
        raise ValueError(f"length={length} must be at least 1 token")
    if not 1 <= stride <= length:
        raise ValueError(
            f"stride={stride} must be between 1 and the length {length}: "
            "a window scores its last `stride` tokens; leave it out for windows that do not overlap"
        )
    if not causal and stride < length:
        raise ValueError(
            f"stride={stride} is for models that see the tokens before each; leave it out: masked tokens are "
            f"scored in windows of {length} that do not overlap"
        )
    return Windows(0, num_tokens, length, stride, causal=causal)


def spread_windows(num_tokens: int, length: int, most: int, *, causal: bool = True) -> Windows:
    """Returns windows without overlap that score at most `most` tokens, spread evenly over a stream.

    The stream is cut into equal parts, with a window in the middle of each. With fewer tokens than
    `most`, or with -1, the windows score all tokens. Raises as `windows_of`.
    """
    if not 0 <= most < num_tokens:
        return windows_of(num_tokens, length, causal=causal)
    length = min(length, most)
    spacing = num_tokens // (most // length)
    start = (spacing - length) // 2
    return dataclasses.replace(
        windows_of(num_tokens, length, causal=causal),
        start=start,
        stop=start + (most // length - 1) * spacing + length,
        spacing=spacing,
    )


def same_token_windows(
    num_tokens: int, lengths: Sequence[int], windows: int, *, causal: bool = True
) -> list[Windows]:
    """Returns windows for each length, ascending, that all score the same tokens.

    These are the last tenth of each shortest window, so even there they have nearly all of its context.
    If the model sees both sides, they are the tenth in the middle. The windows lie at places spread
    evenly over the text. There are fewer than `windows` if so many would score a token twice.

    Raises:
      ValueError: the text is shorter than the longest window.
    """
    longest, stride = max(lengths), max(1, min(lengths) // 10)
    if num_tokens < longest:
        raise ValueError(
            f"the text has {num_tokens:,} tokens, fewer than one window of {longest:,}"
        )
    after = {length: 0 if causal else (length - stride) // 2 for length in lengths}
    start, last = longest - stride - after[longest], num_tokens - stride - after[longest]
    count = min(windows, (last - start) // stride + 1)
    spacing = (last - start) // (count - 1) if count > 1 else stride
    stop = start + (count - 1) * spacing + stride
    return [
        Windows(start, stop, length, stride, spacing, causal, after=after[length])
        for length in sorted(lengths)
    ]


def read_sequences(tokens: Tokens, windows: Windows, rows: Int[np.ndarray, " rows"]) -> Sequences:
    """Returns the windows with the numbers `rows`. A row ends with the tokens that its window scores, and
    those after them. Rows beyond the last window score none.

    Args:
      tokens: the stream. Only the tokens in these rows are read (a memory map stays on disk).
    """
    step = windows.spacing or windows.stride
    first_scored = np.minimum(windows.start + np.asarray(rows, np.int64) * step, windows.stop)[
        :, None
    ]
    stop = np.minimum(first_scored + windows.stride, windows.stop) + windows.after
    first = first_scored - (windows.length - windows.stride - windows.after)
    before = np.maximum(first - 1, 0)
    # Neighbouring windows are read as one piece of the stream; between spaced windows may lie most
    # of the stream.
    begins, ends = (
        (before, stop) if windows.spacing else (before.min(keepdims=True), stop.max(keepdims=True))
    )
    pieces = [
        np.asarray(tokens[begin:end]) for begin, end in zip(begins.flat, ends.flat, strict=True)
    ]
    pieces.append(np.array([-1]))  # at least one token, to index
    piece = np.concatenate(pieces, dtype=np.int32, casting="unsafe")
    # a row finds token i of the stream at `piece[i - start]`
    start = ends - np.cumsum(ends - begins)[:, None]

    places = first + np.arange(-1, windows.length)[None, :]
    tokens_read = piece[np.clip(places - start, 0, piece.size - 1)]
    sequences = np.where((places >= 0) & (places < stop), tokens_read, np.int32(-1))
    if windows.begin is not None:
        sequences[:, 0] = windows.begin
    return Sequences(sequences, first[:, 0])


def predicted(
    objective: Objective, tokens: Tokens, windows: Windows
) -> Iterator[Bool[np.ndarray, " tokens"]]:
    """Yields whether the objective predicts each token that `windows` score, some rows at a time."""
    for group in windows.groups:
        for first in range(0, len(group), 256):
            rows = np.arange(first, min(first + 256, len(group)))
            targets = objective.batch(read_sequences(tokens, group, rows)).targets
            scored = (scored_targets(targets, group)[:, : group.stride] >= 0).ravel()
            yield scored[: group.num_tokens - first * group.stride]


def scored_targets(
    targets: Int[np.ndarray, "rows length"], windows: Windows
) -> Int[np.ndarray, "rows scored"]:
    """Returns the targets from the first scored token of each row on."""
    return targets[:, -windows.stride - windows.after :]


def mean_context(objective: Objective, tokens: Tokens, windows: Windows) -> float:
    """Returns the mean number of inputs that a prediction sees, for an objective that isolates documents."""
    assert isinstance(objective, IsolatedDocuments)
    inputs = scored = 0
    for group in windows.groups:
        for first in range(0, len(group), 256):  # rows at a time
            rows = np.arange(first, min(first + 256, len(group)))
            sequences = read_sequences(tokens, group, rows)
            targets = objective.batch(sequences).targets[:, -group.stride :] >= 0
            inputs += int(objective.context(sequences)[:, -group.stride :][targets].sum())
            scored += int(targets.sum())
    return inputs / max(scored, 1)
