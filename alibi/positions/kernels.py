"""Where XLA's CPU backend cuts a program into kernels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def in_own_kernel(function: Callable[[Array], Array], x: Array) -> Array:
    """The function of x, computed by a kernel of its own: x and the result are each written to memory once.

    On CPUs XLA would else compute both again in each kernel that uses the result, at a quarter of the speed where the
    function transposes. A barrier doesn't keep it from that, but a branch does. Nothing is above infinity, nor is
    NaN, so it is always the function that is computed. Where x is split over devices, its first element is sent to all.
    """

    def in_a_branch(x: Array) -> Array:
        of_all = jax.eval_shape(function, x)
        # As a matrix, since XLA would else leave transposes to those who use the result.
        shape = (-1, of_all.shape[-1])
        taken = lax.cond(
            x.reshape(-1)[0] > jnp.inf,
            lambda x: jnp.zeros(of_all.shape, of_all.dtype).reshape(shape),
            lambda x: function(x).reshape(shape),
            x,
        )
        return taken.reshape(of_all.shape)

    return lax.platform_dependent(x, cpu=in_a_branch, default=function)
