"""Every token is scored exactly once, with the context that the paper's code gives it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi.evaluation.windows import batches, gather, plan

BOUNDARY = 7


def literal_windows(tokens, length, stride):
    """(inputs, targets) of each window, straight from the recipe's words, one token at a time."""
    found, start = [], 0
    while start < len(tokens):
        targets = tokens[start : start + stride]
        source = [BOUNDARY, *tokens][: start + len(targets)]  # all true tokens up to the last one's predecessor
        found.append((source[-(min(length - stride, start) + len(targets)) :], targets))
        start += stride
    return found


shapes = st.integers(1, 40).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))


@settings(deadline=None, max_examples=300)
@given(num_tokens=st.integers(1, 100), shape=shapes, batch_size=st.sampled_from([1, 3, 8]))
def test_windows_equal_the_literal_ones(num_tokens, shape, batch_size):
    length, stride = shape
    tokens = (np.arange(num_tokens) + 100).astype(np.uint16)
    windows = plan(num_tokens, length, stride)
    expected = literal_windows(tokens.tolist(), length, stride)
    assert len(windows) == len(expected)
    rows = []
    for numbers in batches(windows, batch_size):
        batch = gather(tokens, windows, numbers, BOUNDARY)
        assert batch.inputs.shape == (batch_size, length)
        assert batch.targets.shape == (batch_size, stride)
        assert {batch.inputs.dtype, batch.targets.dtype, batch.scored_from.dtype} == {np.dtype(np.int32)}
        rows += zip(batch.inputs, batch.targets, batch.scored_from, strict=True)
    for (inputs, targets, scored_from), (want_inputs, want_targets) in zip(rows, expected, strict=False):
        count = int((targets >= 0).sum())
        assert targets[:count].tolist() == want_targets
        assert inputs[: scored_from + count].tolist() == want_inputs
        assert (inputs[scored_from + count :] == BOUNDARY).all()
        # The input of a target is the true token before it.
        previous = [BOUNDARY, *tokens.tolist()][want_targets[0] - 100]
        assert inputs[scored_from] == previous
    for _, targets, scored_from in rows[len(expected) :]:
        assert (targets == -1).all()
        assert 0 <= scored_from < length
    scored = np.concatenate([targets[targets >= 0] for _, targets, _ in rows])
    assert scored.tolist() == tokens.tolist()


def test_the_recipe_in_numbers():
    """N = 5, L = 4, S = 2: the second window reads two tokens of context, the third has one token to score."""
    windows = plan(5, 4, 2)
    numbers = np.arange(4)
    assert windows.first_scored(numbers).tolist() == [0, 2, 4, 5]
    assert windows.num_scored(numbers).tolist() == [2, 2, 1, 0]
    assert windows.first_input(numbers).tolist() == [0, 0, 2, 3]
    assert windows.num_inputs(numbers).tolist() == [2, 4, 3, 2]
    batch = gather(np.array([10, 11, 12, 13, 14]), windows, np.arange(3), BOUNDARY)
    assert batch.inputs.tolist() == [[7, 10, 7, 7], [7, 10, 11, 12], [11, 12, 13, 7]]
    assert batch.targets.tolist() == [[10, 11], [12, 13], [14, -1]]
    assert batch.scored_from.tolist() == [0, 2, 2]


def test_mode():
    assert plan(5, 4).mode == plan(5, 4, 4).mode == "nonoverlapping"
    assert plan(5, 4, 3).mode == "sliding"


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
    with pytest.raises(ValueError, match=message):
        plan(*arguments)


def test_only_the_windows_own_part_of_the_stream_is_read():
    """A memory map of a large corpus must not be loaded for each batch."""

    class Recorder:
        def __getitem__(self, key):
            self.read = (key.start, key.stop)
            return np.arange(key.start, key.stop)

    recorder = Recorder()
    gather(recorder, plan(10**9, 512, 1), np.arange(5_000_000, 5_000_032), BOUNDARY)
    assert recorder.read == (5_000_000 - 512, 5_000_032)
