"""How XLA's CPU backend divides a program into kernels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def in_own_kernel(function: Callable[[Array], Array], x: Array) -> Array:
    """Returns `function(x)`, computed in a separate kernel, so that x and the result are written once.

    On CPUs XLA otherwise computes both again in each kernel that uses the result, at a quarter of the
    speed if the function transposes. A barrier doesn't prevent this, but a branch does. No number is
    above infinity, nor is NaN, so the function is always computed. If x is split over devices, all
    receive its first element.
    """

    def in_a_branch(x: Array) -> Array:
        result = jax.eval_shape(function, x)
        # As a matrix, since XLA otherwise leaves transposes to the users of the result.
        shape = (-1, result.shape[-1])
        taken = lax.cond(
            x.reshape(-1)[0] > jnp.inf,
            lambda x: jnp.zeros(result.shape, result.dtype).reshape(shape),
            lambda x: function(x).reshape(shape),
            x,
        )
        return taken.reshape(result.shape)

    return lax.platform_dependent(x, cpu=in_a_branch, default=function)
