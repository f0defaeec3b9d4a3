"""The ALiBi bias: exact at any length, of the right sign, from explicit positions; also with slopes
by length.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi import alibi_bias, alibi_slopes
from alibi.positions import make_position
from tests.refusals import assert_refused

SIZES = {"num_heads": 4, "head_dim": 8, "width": 32, "train_length": 16}


def formula(num_heads: int, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    slopes = np.asarray(alibi_slopes(num_heads), np.float64)
    return -slopes[:, None, None] * (queries[..., None, :, None] - keys[..., None, None, :])


compiled_bias = jax.jit(alibi_bias, static_argnums=0, static_argnames="symmetric")


@pytest.mark.parametrize("num_heads", [1, 12])
@pytest.mark.parametrize(
    ("queries", "keys", "shape"),
    [
        (np.arange(3, 8), np.arange(11), (5, 11)),
        (*[np.asarray([[0, 1, 2], [5, 7, 9]])] * 2, (3, 3)),  # of each batch entry
    ],
)
def test_formula(num_heads: int, queries: np.ndarray, keys: np.ndarray, shape: tuple) -> None:
    bias = alibi_bias(num_heads, jnp.asarray(queries), jnp.asarray(keys))
    assert bias.shape == (*queries.shape[:-1], num_heads, *shape)
    assert bias.dtype == jnp.float32
    np.testing.assert_allclose(bias, formula(num_heads, queries, keys), rtol=1e-6)


def test_softmax_of_64k_positions_is_that_of_float64() -> None:
    """In float32 the form +m j, equal in exact arithmetic, would be off by 5e-4 in L1 here; in bf16
    by 1.9. Built from positions in bf16 or fp16, neighbouring keys would be equal (Falcon, BLOOM,
    flash-attention).
    """
    keys = np.arange(65_536)
    bias = np.asarray(compiled_bias(16, keys[-1:], keys))[:, 0]
    exact = formula(16, keys[-1:], keys)[:, 0]
    np.testing.assert_allclose(bias, exact, rtol=2**-24)  # one rounding, of the product
    weights = np.exp(exact) / np.exp(exact).sum(axis=-1, keepdims=True)
    assert np.abs(np.asarray(jax.jit(jax.nn.softmax)(bias)) - weights).sum(axis=-1).max() < 1e-5


@pytest.mark.usefixtures("unchecked")
def test_floating_point_positions_are_refused() -> None:
    assert_refused("must be integers", alibi_bias, 8, jnp.arange(4.0), jnp.arange(4))


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32])
def test_unsigned_positions_do_not_wrap(dtype: jnp.dtype) -> None:
    unsigned, signed = (
        compiled_bias(4, positions, positions, symmetric=True)
        for positions in (np.arange(5, dtype=dtype), np.arange(5, dtype=np.int32))
    )
    np.testing.assert_array_equal(unsigned, signed)


@pytest.mark.parametrize("heads", [1, 3, 12])
@pytest.mark.parametrize("stretch", [0.5, 4.0])
def test_ntk_flattens_head_h_by_a_power(heads: int, stretch: float) -> None:
    """m_h = 2^(-8h/H) a^(-(h-1)/(H-1)); head 1 is as it was, head H is divided by a, also where H
    is 1.
    """
    sizes = {"num_heads": heads, "head_dim": 2, "width": 2 * heads, "train_length": 16}
    method = make_position("alibi_ntk", **sizes, options={"slopes": "closed_form"}).at_length(
        int(16 * stretch)
    )
    h, a = np.arange(1, heads + 1), max(1.0, stretch)
    expected = 2.0 ** (-8 * h / heads) * a ** -((h - 1) / max(heads - 1, 1))
    np.testing.assert_allclose(method.bias({}).slopes, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("heads", "heights"), [(3, [4, 8, 2]), (12, [*range(1, 9), 0.5, 1.5, 2.5, 3.5])]
)
def test_ntk_flattens_slopes_in_no_order_by_their_logarithms(
    heads: int, heights: list[float]
) -> None:
    """The paper's slopes of other numbers of heads are no geometric series, and don't descend: m_h
    is 2^-height. The steepest stays, and the flattest is divided by 4.
    """
    sizes = {"num_heads": heads, "head_dim": 2, "width": 2 * heads, "train_length": 16}
    slopes = 2.0 ** -np.asarray(heights)
    got = make_position("alibi_ntk", **sizes).at_length(64).bias({}).slopes
    power = (np.asarray(heights) - min(heights)) / (max(heights) - min(heights))
    np.testing.assert_allclose(got, slopes * 4.0**-power, rtol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "alibi_ntk", "alibi_learned"])
def test_the_flattest_slopes_are_normal_and_have_logarithms(name: str) -> None:
    """2^-125, by the largest `alibi_bias_max`; in longer windows NTK's are finite too."""
    method = make_position(name, **SIZES, options={"alibi_bias_max": 125})
    params = method.init(jax.random.key(0))
    slopes = np.asarray(method.bias(params).slopes, np.float64)
    np.testing.assert_allclose(np.log2(slopes), [-31.25, -62.5, -93.75, -125], rtol=1e-6)
    assert np.isfinite(method.at_length(64).bias(params).slopes).all()


def test_slopes_that_depend_on_the_length_are_known_under_jit() -> None:
    """Attention then chooses a kernel for ALiBi's bias alone."""
    for name in ("alibi", "alibi_interpolated", "alibi_ntk"):
        method = make_position(name, **SIZES).at_length(64)
        jax.jit(lambda x, m=method: x + np.asarray(m.bias({}).slopes).sum())(1.0)
