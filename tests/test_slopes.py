"""Slopes against the paper's numbers: an exponent off by one or a wrong rule for 12 heads changes
every result.
"""

import numpy as np
import pytest

from alibi import alibi_slopes
from tests.refusals import assert_refused

PINNED = {
    1: [1 / 256],
    2: [1 / 16, 1 / 256],
    3: [1 / 16, 1 / 256, 1 / 4],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: [2.0**-h for h in range(1, 9)],
    12: [*(2.0**-h for h in range(1, 9)), 0.70710678, 0.35355339, 0.17677670, 0.08838835],
    16: [2.0 ** (-h / 2) for h in range(1, 17)],
    40: [*(2.0 ** (-h / 4) for h in range(1, 33)), *(2.0 ** (-(2 * h + 1) / 8) for h in range(8))],
}


# -mean ln(1 - u), of the first four u of NumPy's Mersenne twister of seed 1.
PINNED_DRAW = [0.04479150016311598, 0.10576235010364342, 9.49454637174053e-06, 0.02988387125252257]


@pytest.mark.parametrize("num_heads", PINNED)
def test_paper_slopes(num_heads: int) -> None:
    slopes = alibi_slopes(num_heads)
    assert slopes.dtype == np.float32
    np.testing.assert_allclose(slopes, PINNED[num_heads], rtol=1e-6)


@pytest.mark.parametrize("num_heads", [1, 3, 12, 16])
def test_closed_form(num_heads: int) -> None:
    expected = [2 ** (-8 * h / num_heads) for h in range(1, num_heads + 1)]
    np.testing.assert_allclose(alibi_slopes(num_heads, "closed_form"), expected, rtol=1e-6)


def test_random_slopes_have_the_papers_mean_and_are_those_of_their_draw() -> None:
    slopes = alibi_slopes(4096, "random", 1)
    assert (slopes > 0).all()
    mean = float(alibi_slopes(4096).mean())
    # Of an exponential distribution: as wide as its mean is great, 1 / e of it above that.
    np.testing.assert_allclose([slopes.mean(), slopes.std()], [mean, mean], rtol=0.05)
    np.testing.assert_allclose((slopes > mean).mean(), np.exp(-1), atol=0.02)
    # A saved run has no other record of its slopes than the number of the draw.
    np.testing.assert_allclose(alibi_slopes(4, "random", 1), PINNED_DRAW, rtol=1e-6)
    assert (alibi_slopes(4, "random", 1) != alibi_slopes(4, "random", 2)).all()
    assert_refused("draw=-1", alibi_slopes, 4, "random", -1)


def test_given_slopes_are_taken_as_they_are() -> None:
    np.testing.assert_array_equal(alibi_slopes(3, (0.5, 0, 0.1)), np.float32([0.5, 0.0, 0.1]))


@pytest.mark.parametrize(
    "slopes", [(0.5,), (0.5, 0.25, 0.1), (0.5, float("inf")), (0.5, "x"), (0.5, -0.1), ()]
)
def test_given_slopes_that_are_none(slopes: tuple) -> None:
    assert_refused(r"2 finite numbers .* \[0\.06", alibi_slopes, 2, slopes)
