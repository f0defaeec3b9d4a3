"""Initial parameters, randomised positions, and options that are refused."""

import jax
import numpy as np
import pytest

from alibi.model.positions import randomised_positions
from alibi.positions import PositionMethod, make_position

HEADS, HEAD_DIM, WIDTH, TRAIN_LENGTH = 4, 8, 32, 16
KEY = jax.random.key(0)


def make(name: str, **options: object) -> PositionMethod:
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "width": WIDTH, "train_length": TRAIN_LENGTH}
    return make_position(name, **sizes, options=options)


def test_parameters_start_as_in_the_papers() -> None:
    start = {name: {**make(name).init(KEY), **make(name).init_layer(KEY)} for name in ("fire", "shaw", "fox")}
    many = make_position("kerple_log", num_heads=2000, head_dim=8, width=16_000, train_length=16).init(KEY)
    for name, most in (("r1", 2.0), ("r2", 1.0)):
        of_heads = np.asarray(many[name])
        assert (of_heads.min(), of_heads.max()) == pytest.approx((0.01, most), abs=0.01), f"uniform, {name}"
        assert of_heads.mean() == pytest.approx(most / 2, abs=0.05)
    assert start["fire"]["c"] == np.float32(0.1)
    assert start["fire"]["threshold_multiple"] == 1.0
    assert make("fire").options()["threshold"] == 512
    assert start["fire"]["hidden_kernel"].shape == (32,)
    assert start["shaw"]["vectors"].shape == (2 * 16 + 1, HEAD_DIM)
    assert start["fox"]["kernel"].shape == (WIDTH, HEADS)
    np.testing.assert_array_equal(start["fox"]["bias"], 0.0)


def test_randomised_positions_are_sorted_samples_without_replacement() -> None:
    """New ones for each sequence and key; each of the 64 positions as often as any other."""
    place = jax.jit(lambda key: randomised_positions(np.arange(TRAIN_LENGTH), TRAIN_LENGTH, 64, 512, key))
    drawn = np.asarray(place(KEY))
    assert drawn.shape == (512, TRAIN_LENGTH)
    assert (np.diff(drawn, axis=1) > 0).all(), "ascending, so also distinct"
    assert (drawn.min(), drawn.max()) == (0, 63)
    assert len({tuple(row) for row in drawn}) == 512, "each sequence has its own"
    assert (drawn != np.asarray(place(jax.random.key(1)))).any(axis=1).all(), "and each key"
    counts = np.bincount(drawn.reshape(-1), minlength=64)
    # 512 draws with a chance of 16 in 64 each: 128 times, with a standard deviation of 9.8.
    assert abs(counts - 128).max() < 5 * 9.8


@pytest.mark.parametrize("length", [16, 32, 64])
def test_randomised_positions_stand_in_evaluation_where_they_do_on_average(length: int) -> None:
    """The mean of the i-th smallest of n numbers that are drawn from 1, ..., N is i (N + 1) / (n + 1)."""
    placed = randomised_positions(np.arange(length), length, 64, 3, None)
    np.testing.assert_array_equal(placed, np.arange(1, length + 1) * 65 // (length + 1) - 1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fire", {"threshold": 0}, "fire needs a threshold from 1 to 16,777,216 tokens, such as 512, and got 0"),
        ("shaw", {"max_distance": 0}, "shaw needs a max_distance from 1 to 1,048,576 tokens, such as 16, and got 0"),
        ("rotary_ntk", {"base": 0.0}, "rotary needs a base above 0"),
        ("rotary", {"bass": 3.0}, "has no option 'bass'; did you mean 'base'"),
    ],
)
def test_options_that_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, **options)


def test_sizes_that_are_refused() -> None:
    with pytest.raises(ValueError, match="rotary_ntk needs a head_dim of at least 4 and got 2"):
        make_position("rotary_ntk", num_heads=2, head_dim=2, width=4, train_length=16)
    with pytest.raises(ValueError, match="fox needs causal=True"):
        type(make("fox"))(HEADS, HEAD_DIM, WIDTH, TRAIN_LENGTH, causal=False)


@pytest.mark.parametrize(
    ("name", "options", "length", "remedy"),
    [
        ("learned", {}, 17, "use 16 or fewer, or train it for more"),
        ("learned", {"num_positions": 32}, 33, "use 32 or fewer, or train it for more"),
    ],
)
def test_a_length_that_is_too_long_is_told_with_what_sets_the_longest(
    name: str, options: dict[str, object], length: int, remedy: str
) -> None:
    """An option that was given sets it, else the training length."""
    method = make(name, **options)
    method.check_length(length - 1)
    with pytest.raises(ValueError, match=f"{remedy}$"):
        method.check_length(length)
