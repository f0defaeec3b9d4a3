"""The methods beside the paper's against their papers' formulas, written out in float64 for each pair of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.model.positions import randomised_positions
from alibi.positions import PositionMethod, make_position
from alibi.positions.base import Bias, Params

HEADS, HEAD_DIM, WIDTH, TRAIN_LENGTH, LENGTH = 4, 8, 32, 16, 12
KEY = jax.random.key(0)


def make(name: str, **options: object) -> PositionMethod:
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "width": WIDTH, "train_length": TRAIN_LENGTH}
    return make_position(name, **sizes, options=options)


def params_of(method: PositionMethod) -> dict[str, jax.Array]:
    """As a model makes them, moved a little, so that none is at a start of zero or one."""
    params = jax.jit(lambda: {**method.init(KEY), **method.init_layer(KEY)})()
    return {name: x + 0.05 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for name, x in params.items()}


def inputs(length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """A layer's input and its queries, of two sequences."""
    rng = np.random.default_rng(0)
    shapes = (2, length, WIDTH), (2, length, HEADS, HEAD_DIM)
    x, query = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, query


def bias_of(method: PositionMethod, params: Params, x: jax.Array, query: jax.Array) -> Bias:
    kept = method.keep(params, x, query, padding=None, before=None)
    return method.content_bias(params, query, kept, kept)


OPTIONS = {"kerple_log": {}, "fire": {"threshold": 7}, "shaw": {"max_distance": 3}, "fox": {}}


def test_parameters_start_as_in_the_papers() -> None:
    start = {name: {**make(name).init(KEY), **make(name).init_layer(KEY)} for name in OPTIONS}
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


@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_is_moved(name: str) -> None:
    """By a random gradient of the bias: in the whole array, but for Shaw's vectors of keys after the query."""
    method = make(name, **OPTIONS[name])
    params = params_of(method)
    rng = np.random.default_rng(1)
    batch = 2 if name in ("shaw", "fox") else 1  # of those the bias depends on the sequence
    wanted = np.tril(rng.normal(size=(batch, HEADS, LENGTH, LENGTH))).astype(np.float32)

    @jax.jit
    def gradients(params: Params, *given: jax.Array) -> Params:
        def loss(params: Params) -> jax.Array:
            block = bias_of(method, params, *given)(jnp.arange(LENGTH), jnp.arange(LENGTH))
            return (block.reshape((-1, HEADS, LENGTH, LENGTH)) * wanted).sum()

        return jax.grad(loss)(params)

    for leaf, gradient in gradients(params, *inputs()).items():
        assert np.isfinite(gradient).all(), leaf
        moved = np.abs(np.asarray(gradient)) > 1e-6
        if leaf == "vectors":
            assert moved[:4].all(), "of keys 3 or more, 2 and 1 before the query, and of its own"
            assert not moved[4:].any(), "of keys after the query, which are hidden"
        elif leaf.startswith("hidden"):
            assert moved.any(), leaf  # a unit of ReLU may be off for all distances
        elif leaf == "kernel" and name == "fire":
            assert moved.any(axis=0).all(), "of each head"
        else:
            assert moved.all(), leaf


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
