"""Slope schedules: how steeply each head penalizes distance (paper, section 3)."""

import math
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

CONVENTIONS = ("paper", "closed_form", "random")
# 2^-126 is float32's smallest normal number, and the exponential of a logarithm may be rounded
MOST_BIAS_MAX = 125
MOST_HEADS = 2**16  # a larger number is a mistake, which would otherwise fill the memory


def alibi_slopes(
    num_heads: int,
    convention: str | Sequence[float | int] | Float[Array | np.ndarray, " heads"] = "paper",
    draw: int = 0,
    *,
    alibi_bias_max: float | int = 8.0,
) -> Float[Array, " heads"]:
    """Returns ALiBi's slope m for each head, float32 `[num_heads]`, in logits per token of distance.

    `"paper"` is the rule in the authors' code: 2^(-8h/n), h = 1..n, if n is a power of two.
    Otherwise it takes the slopes for the power of two below n, then every other slope for the power
    of two above. `"closed_form"` is 2^(-8h/n) for every n. `"random"` draws from the exponential
    distribution, which the paper reports to work at times (section 3). The paper gives no scale:
    here the expectation is the mean of the paper's slopes. A tuple, list or array gives the slopes
    directly.

    Args:
      num_heads: heads in a layer.
      convention: "paper", "closed_form", "random" or the slopes.
      draw: which draw `"random"` takes. The same number always gives the same slopes.
      alibi_bias_max: replaces the 8 in these formulas (MPT's name). 16 squares each slope of "paper" and
        "closed_form", and "random" has the new mean.

    Raises:
      ValueError: `num_heads` is no whole number from 1 to 65,536; the convention is unknown; a
        tuple has another length or a number below 0; `draw` is below 0; `alibi_bias_max` is not
        above 0, is above 125, or is given with a tuple.

    Example:
      >>> alibi_slopes(8)[:4].tolist()
      [0.5, 0.25, 0.125, 0.0625]
    """
    if not _is_whole(num_heads) or not 1 <= num_heads <= MOST_HEADS:
        raise ValueError(
            f"num_heads={num_heads!r} must be a whole number from 1 to {MOST_HEADS:,}, such as 8"
        )
    if not _is_whole(draw) or not 0 <= draw < 2**32:
        raise ValueError(
            f"draw={draw!r} of random slopes must be at least 0, a whole number below 2^32"
        )
    if not (isinstance(alibi_bias_max, numbers.Real) and 0 < alibi_bias_max <= MOST_BIAS_MAX):
        raise ValueError(
            f"alibi_bias_max={alibi_bias_max!r} must be a number above 0, such as the paper's 8, and at most "
            f"{MOST_BIAS_MAX}: the flattest slope is 2^-alibi_bias_max, and float32 rounds smaller ones"
        )
    num_heads = int(num_heads)
    if isinstance(convention, np.ndarray | jax.Array):
        convention = convention.tolist()
    if isinstance(convention, tuple | list):
        if alibi_bias_max != 8:
            raise ValueError(
                f"alibi_bias_max={alibi_bias_max} changes named slopes, not given ones; leave one out"
            )
        slopes = _given(convention, num_heads)
    elif convention == "paper":
        slopes = _paper(num_heads, alibi_bias_max)
    elif convention == "closed_form":
        slopes = _geometric(num_heads, alibi_bias_max)
    elif convention == "random":
        # NumPy never changes this old generator, so a saved run always gets its own slopes again.
        slopes = np.random.RandomState(draw).exponential(
            _paper(num_heads, alibi_bias_max).mean(), num_heads
        )
    else:
        raise ValueError(
            f"slope convention {convention!r} is unknown; use {', '.join(CONVENTIONS)}, or a tuple of numbers"
        )
    # Concrete numbers under jit too: attention chooses its backend by them.
    with jax.ensure_compile_time_eval():
        return jnp.asarray(slopes, jnp.float32)


def _geometric(num_heads: int, bias_max: float | int) -> np.ndarray:
    return 2.0 ** (-bias_max * np.arange(1, num_heads + 1) / num_heads)


def _paper(num_heads: int, bias_max: float | int) -> np.ndarray:
    below = 2 ** (num_heads.bit_length() - 1)
    steep = _geometric(below, bias_max)
    # The first, third, fifth... slope of twice as many heads lies between the slopes of `below`.
    between = _geometric(2 * below, bias_max)[::2][: num_heads - below]
    return np.concatenate([steep, between])


def _given(slopes: Sequence[float | int], num_heads: int) -> np.ndarray:
    finite = all(
        isinstance(slope, numbers.Real) and math.isfinite(slope) and slope >= 0 for slope in slopes
    )
    if not finite or len(slopes) != num_heads:
        raise ValueError(
            f"slopes={list(slopes)} must be {num_heads} finite numbers of at least 0, one for each head, such as "
            f"{_paper(num_heads, 8.0).tolist()}; or name one of {', '.join(CONVENTIONS)}"
        )
    return np.asarray(slopes, np.float64)


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
