"""The division of a program into kernels by XLA's CPU backend."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def in_own_kernel(function: Callable[[Array], Array], x: Array) -> Array:
    """Returns the function of x, computed by a kernel of its own, so that x and the result are
    written once.

    On CPUs XLA otherwise computes both again in each kernel that uses the result, at a quarter of
    the speed if the function transposes. A barrier doesn't prevent it, a branch does. No number is
    above infinity, nor is NaN, so the function is always computed. If x is split over devices, its
    first element is sent to all.
    """

    def in_a_branch(x: Array) -> Array:
        of_all = jax.eval_shape(function, x)
        # As a matrix, since XLA otherwise leaves transposes to the users of the result.
        shape = (-1, of_all.shape[-1])
        taken = lax.cond(
            x.reshape(-1)[0] > jnp.inf,
            lambda x: jnp.zeros(of_all.shape, of_all.dtype).reshape(shape),
            lambda x: function(x).reshape(shape),
            x,
        )
        return taken.reshape(of_all.shape)

    return lax.platform_dependent(x, cpu=in_a_branch, default=function)
