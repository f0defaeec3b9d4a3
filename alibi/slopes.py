"""Slope schedules: how steeply each head penalizes distance (paper, section 3)."""

import math
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

CONVENTIONS = ("paper", "closed_form", "random")
MOST_BIAS_MAX = 125  # 2^-126 is float32's smallest normal number, and the exponential of a logarithm may be rounded
MOST_HEADS = 2**16  # no model has a hundredth of them: a larger number is another one's


def alibi_slopes(
    num_heads: int,
    convention: str | Sequence[float | int] = "paper",
    draw: int = 0,
    *,
    alibi_bias_max: float | int = 8.0,
) -> Float[Array, " heads"]:
    """ALiBi's slope m of each head, float32 `[num_heads]`, logits per token of distance.

    `"paper"` is what the authors' code computes: 2^(-8h/n), h = 1..n, when n is a power
    of two; otherwise the slopes of the power of two below n, then every other slope of
    the power of two above, in that order. `"closed_form"` is 2^(-8h/n) for every n.
    `"random"` draws them from the exponential distribution, which the paper says works at
    times (section 3); it doesn't publish the scale: here their expectation is the mean of
    the paper's slopes. A tuple of numbers, one for each head, is the slopes themselves.

    Args:
      draw: which draw of `"random"`; each is the same for ever.
      alibi_bias_max: what stands in place of 8 in all of these but a tuple, as MPT names it; 16 makes each slope the
        square of what it was.

    Raises:
      ValueError: `num_heads` that is no whole number from 1 to 65,536, an unknown convention, a
        tuple of another length or with what is no finite number of at least 0, a draw below 0, or an
        `alibi_bias_max` that is not above 0, that is above 125, or that a tuple can't heed.
    """
    if not _is_whole(num_heads) or not 1 <= num_heads <= MOST_HEADS:
        raise ValueError(f"num_heads={num_heads!r} must be a whole number from 1 to {MOST_HEADS:,}, such as 8")
    if not _is_whole(draw) or not 0 <= draw < 2**32:
        raise ValueError(f"draw={draw!r} of random slopes must be at least 0, a whole number below 2^32")
    if not (isinstance(alibi_bias_max, numbers.Real) and 0 < alibi_bias_max <= MOST_BIAS_MAX):
        raise ValueError(
            f"alibi_bias_max={alibi_bias_max!r} must be a number above 0, such as the paper's 8, and at most "
            f"{MOST_BIAS_MAX}: the flattest slope is 2^-alibi_bias_max, and float32 holds no smaller ones in full"
        )
    num_heads = int(num_heads)
    if isinstance(convention, tuple | list):
        if alibi_bias_max != 8:
            raise ValueError(
                f"alibi_bias_max={alibi_bias_max} is for slopes that have a name, and these are given one by one; "
                "leave out one of the two"
            )
        slopes = _given(tuple(convention), num_heads)
    elif not isinstance(convention, str) or convention not in CONVENTIONS:
        named = ", ".join(CONVENTIONS)
        raise ValueError(f"slope convention {convention!r} is unknown; use one of {named}, or a tuple of numbers")
    elif convention == "random":
        # NumPy keeps this old generator's numbers as they are, so that a saved run always gets its own slopes.
        slopes = np.random.RandomState(draw).exponential(_paper(num_heads, alibi_bias_max).mean(), num_heads)
    else:
        slopes = (_geometric if convention == "closed_form" else _paper)(num_heads, alibi_bias_max)
    # Also under jit these are numbers, by which attention can choose what computes it.
    with jax.ensure_compile_time_eval():
        return jnp.asarray(slopes, jnp.float32)


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _given(slopes: tuple[float | int, ...], num_heads: int) -> np.ndarray:
    finite = all(isinstance(slope, numbers.Real) and math.isfinite(slope) and slope >= 0 for slope in slopes)
    if not finite or len(slopes) != num_heads:
        raise ValueError(
            f"slopes={list(slopes)} must be {num_heads} finite numbers of at least 0, one for each head, such as "
            f"{_paper(num_heads).tolist()}; or name one of {', '.join(CONVENTIONS)}"
        )
    return np.asarray(slopes, np.float64)


def _geometric(num_heads: int, bias_max: float | int = 8.0) -> np.ndarray:
    return 2.0 ** (-bias_max * np.arange(1, num_heads + 1) / num_heads)


def _paper(num_heads: int, bias_max: float | int = 8.0) -> np.ndarray:
    below = 2 ** (num_heads.bit_length() - 1)
    steep = _geometric(below, bias_max)
    # The first, third, fifth... slope of twice as many heads lies between those of `below`.
    between = _geometric(2 * below, bias_max)[::2][: num_heads - below]
    return np.concatenate([steep, between])
