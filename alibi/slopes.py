"""Slope schedules: how steeply each head penalizes distance (paper, section 3)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

CONVENTIONS = ("paper", "closed_form", "random")


def alibi_slopes(
    num_heads: int, convention: str | tuple[float | int, ...] = "paper", draw: int = 0
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

    Raises:
      ValueError: `num_heads` below 1, an unknown convention, a tuple of another length or
        with what is no finite number, or a draw below 0.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads={num_heads} must be at least 1")
    if draw < 0:
        raise ValueError(f"draw={draw} of random slopes must be at least 0")
    if isinstance(convention, tuple):
        slopes = _given(convention, num_heads)
    elif convention not in CONVENTIONS:
        raise ValueError(f"slope convention {convention!r} is unknown; use one of {', '.join(CONVENTIONS)}")
    elif convention == "random":
        # NumPy keeps this old generator's numbers as they are, so that a saved run always gets its own slopes.
        slopes = np.random.RandomState(draw).exponential(_paper(num_heads).mean(), num_heads)
    else:
        slopes = _geometric(num_heads) if convention == "closed_form" else _paper(num_heads)
    # Also under jit these are numbers, by which attention can choose what computes it.
    with jax.ensure_compile_time_eval():
        return jnp.asarray(slopes, jnp.float32)


def _given(slopes: tuple[float | int, ...], num_heads: int) -> np.ndarray:
    numbers = all(isinstance(slope, int | float) and math.isfinite(slope) for slope in slopes)
    if not numbers or len(slopes) != num_heads:
        raise ValueError(
            f"slopes={list(slopes)} must be {num_heads} finite numbers, one for each head, such as "
            f"{_paper(num_heads).tolist()}; or name one of {', '.join(CONVENTIONS)}"
        )
    return np.asarray(slopes, np.float64)


def _geometric(num_heads: int) -> np.ndarray:
    return 2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)


def _paper(num_heads: int) -> np.ndarray:
    below = 2 ** (num_heads.bit_length() - 1)
    steep = _geometric(below)
    # The first, third, fifth... slope of twice as many heads lies between those of `below`.
    between = _geometric(2 * below)[::2][: num_heads - below]
    return np.concatenate([steep, between])
