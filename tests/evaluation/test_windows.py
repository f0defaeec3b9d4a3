"""Every token is scored exactly once, with the context of the paper's code."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi.data.tokenfile import TokenStream
from alibi.evaluation.windows import (
    read_sequences,
    same_token_windows,
    spread_windows,
    windows_of,
)
from alibi.objectives import NextToken
from tests.refusals import assert_refused

BOUNDARY = 7


def make_batch(tokens, windows, rows, boundary=BOUNDARY):
    """Returns the rows of windows as the model reads them, with the targets that they score."""
    batch = NextToken(256, boundary).batch(read_sequences(tokens, windows, rows))
    return batch._replace(targets=batch.targets[:, -windows.stride :])


def literal_windows(tokens, length, stride):
    """Returns (inputs, targets) of each window, straight from the recipe's words, token by token."""
    found, start = [], 0
    while start < len(tokens):
        targets = tokens[start : start + stride]
        # all true tokens up to the last one's predecessor
        source = [BOUNDARY, *tokens][: start + len(targets)]
        found.append((source[-(min(length - stride, start) + len(targets)) :], targets))
        start += stride
    return found


shapes = st.integers(1, 40).flatmap(
    lambda length: st.tuples(st.just(length), st.integers(1, length))
)


@settings(deadline=None, max_examples=300)
@given(num_tokens=st.integers(1, 100), shape=shapes, batch_size=st.sampled_from([1, 3, 8]))
def test_windows_equal_the_literal_ones(num_tokens, shape, batch_size):
    length, stride = shape
    tokens = (np.arange(num_tokens) + 100).astype(np.uint16)
    windows = windows_of(num_tokens, length, stride)
    expected, found = literal_windows(tokens.tolist(), length, stride), []
    for part in windows.groups:
        for first in range(0, len(part), batch_size):
            batch = make_batch(tokens, part, np.arange(first, first + batch_size))
            assert batch.inputs.shape == (batch_size, length)
            assert batch.targets.shape == (batch_size, part.stride)
            assert {batch.inputs.dtype, batch.targets.dtype} == {np.dtype(np.int32)}
            for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
                count = int((targets >= 0).sum())
                assert (targets[count:] == -1).all()
                # A causal model gives target i what it would give it as the last one of a shorter
                # row.
                for i in range(count):
                    found.append((inputs[: length - part.stride + i + 1].tolist(), targets[i]))
    # Of each token: all inputs of its window up to its own.
    literal = []
    for inputs, targets in expected:
        literal += [
            (inputs[: len(inputs) - len(targets) + i + 1], target)
            for i, target in enumerate(targets)
        ]
    assert found == literal


@pytest.mark.parametrize(
    ("num_tokens", "length", "most", "firsts"),
    [
        # 3 windows of 4 in parts of 33 tokens, each in the middle of its part
        (100, 4, 12, [14, 47, 80]),
        (100, 4, 15, [14, 47, 80]),  # 3 more are no window
        (100, 4, 99, [*range(0, 96, 4)]),  # nearly all: 24 parts of 4
        (100, 8, 5, [47]),  # fewer than a window
    ],
)
def test_spread_windows_stand_in_the_middle_of_equal_parts(num_tokens, length, most, firsts):
    windows, size = spread_windows(num_tokens, length, most), min(length, most)
    assert windows.num_tokens == size * len(firsts)
    rows = read_sequences(np.arange(num_tokens), windows, np.arange(len(windows))).tokens
    np.testing.assert_array_equal(rows[:, 1:], np.array(firsts)[:, None] + np.arange(size))
    batch = make_batch(np.arange(num_tokens) + 100, windows, np.arange(len(windows)))
    assert batch.targets.tolist() == [[*range(first + 100, first + 100 + size)] for first in firsts]
    inputs = [
        [BOUNDARY if at == 0 else at + 99 for at in range(first, first + size)] for first in firsts
    ]
    assert batch.inputs.tolist() == inputs, "the true token before each"


@pytest.mark.parametrize("most", [-1, 100, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_a_text_that_fits_is_scored_whole(most, causal):
    """Digits of runs whose validation text fits stay as they were."""
    assert spread_windows(100, 16, most, causal=causal) == windows_of(100, 16, causal=causal)


def test_mode():
    assert windows_of(5, 4) == windows_of(5, 4, 4) != windows_of(5, 4, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4, 0), "stride=0 must be between 1 and the length 4"),
        ((10, 4, 5), "stride=5 must be between 1 and the length 4"),
        ((10, 0), "length=0 must be at least 1"),
        ((0, 4), "at least 1 is needed"),
    ],
)
def test_out_of_range(arguments, message):
    assert_refused(message, windows_of, *arguments)


class Recorder(TokenStream):
    """A stream whose token i is i, and how many of them were read."""

    def __init__(self, size=10**9):
        self.size, self.read, self.places = size, 0, []

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        self.read += key.stop - key.start
        self.places.append((key.start, key.stop))
        return np.arange(key.start, key.stop)


def test_only_the_windows_own_part_of_the_stream_is_read():
    """A memory map of a large corpus must not be loaded for each batch."""
    recorder = Recorder()
    _, sliding = windows_of(10**9, 512, 1).groups
    # of the tokens 512 further on
    make_batch(recorder, sliding, np.arange(5_000_000, 5_000_032))
    assert recorder.places == [(5_000_000, 5_000_544)]


def test_nothing_between_windows_that_are_spread_over_the_text_is_read():
    """Windows of equal length, 128 in a batch: of ten million tokens each row reads its own and the
    token before.
    """
    for part in same_token_windows(10**7, [128, 1024], 512):
        recorder = Recorder(10**7)
        rows = np.arange(448, 576)  # the last half of them beyond the last window
        batch = make_batch(recorder, part, rows)
        assert recorder.read <= len(rows) * (part.length + 1)
        for row, inputs, targets in zip(rows, *batch[:2], strict=True):
            first = part.start + row * part.spacing
            if row < len(part):
                assert targets.tolist() == list(range(first, first + part.stride))
                assert inputs.tolist() == list(range(targets[-1] - part.length, targets[-1]))
            else:
                assert (targets == -1).all()
