"""Products and norms that XLA computes fast on CPUs."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from alibi.numerics.target import current_target

Dimensions = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Products:
    """How a model multiplies and normalizes on its platform.

    Attributes:
      plain: True if the config asks for JAX's and Flax's own functions alone, which have forward-mode
        derivatives too. On accelerators products and norms are these in any case.
      dot_general: the product to inject into Flax's dense and attention layers.
      layer_dtype: the dtype for these layers.
      flat_norms: True if norms get `[rows, features]`.
    """

    plain: bool
    dot_general: Callable[..., Array]
    layer_dtype: Any
    flat_norms: bool

    @classmethod
    def of(cls, choice: str, dtype: Any) -> "Products":
        """Returns the products in `dtype` for `config.model.products`: "plain", or "auto" for the
        fastest on the platform.

        On CPUs only products have half precision: XLA would sum the gradient of a bias in it, slowly
        and with errors of some percent.
        """
        if choice == "plain" or current_target()[0] != "cpu":
            return cls(choice == "plain", lax.dot_general, dtype, False)
        return cls(False, FlatProduct(dtype), jnp.float32, True)

    def norm(
        self, norm: Callable[[Array], Array], x: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch features"]:
        """Returns `norm(x)` for a norm over features, such as Flax's.

        On CPUs the gradient of layer norm takes a tenth of the time on `[rows, features]` if the
        first dimension is 1, as for a single long sequence, and else about as long. Accelerators get
        `x` unchanged: on several devices it would gather a split length.
        """
        return norm(x.reshape(-1, x.shape[-1])).reshape(x.shape) if self.flat_norms else norm(x)

    def matmul(
        self, x: Float[Array, "batch length inputs"], kernel: Float[Array, "_ _"], axis: int = 0
    ) -> Float[Array, "batch length outputs"]:
        """Returns x kernel, float32. `axis` is the kernel's dimension for inputs."""
        return self.dot_general(
            x, kernel, (((2,), (axis,)), ((), ())), preferred_element_type=jnp.float32
        )


@dataclasses.dataclass(frozen=True)
class FlatProduct:
    """`lax.dot_general` with a float32 result, computed as a product of two matrices where possible.

    It is possible if the last dimensions of `lhs` meet the first dimensions of `rhs`, in order and
    without batch dimensions, as in every dense layer, or the last dimension of a matrix `rhs`, such
    as an embedding. There is no forward-mode derivative.

    For activations `[batch, length, width]` the weight gradient contracts two dimensions: XLA's CPU
    backend then writes transposed copies of the activations and multiplies slowly. With matrices
    `[batch * length, width]` it does neither.

    Attributes:
      dtype: operands are rounded to it, in the backward pass too. XLA's CPU backend multiplies
        bfloat16 fast only if the result is float32.
    """

    dtype: Any

    def __call__(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        dimension_numbers: Dimensions,
        precision: lax.PrecisionLike = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Float[Array, "..."]:
        """Returns the product, float32 or `preferred_element_type`."""
        (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
        contracted = len(lhs_contracted)
        rows = lhs.ndim - contracted
        is_matrix_product = (
            not lhs_batch
            and not rhs_batch
            and 0 < contracted < min(lhs.ndim, rhs.ndim)
            and tuple(lhs_contracted) == tuple(range(rows, lhs.ndim))
            and (tuple(rhs_contracted) == tuple(range(contracted)) or rhs.ndim == 2)
        )
        result_dtype = preferred_element_type or jnp.float32
        if not is_matrix_product or out_sharding is not None or 0 in lhs.shape or 0 in rhs.shape:
            return lax.dot_general(
                lhs.astype(self.dtype),
                rhs.astype(self.dtype),
                dimension_numbers,
                precision=precision,
                preferred_element_type=jnp.float32,
                out_sharding=out_sharding,
            ).astype(result_dtype)
        width, axis = math.prod(lhs.shape[rows:]), rhs_contracted[0]
        outputs = rhs.shape[:1] if axis else rhs.shape[contracted:]
        x, kernel = lhs.reshape(-1, width), rhs if axis else rhs.reshape(width, -1)
        product = _matmul(
            x.astype(jnp.float32), kernel.astype(jnp.float32), axis, precision, self.dtype
        )
        return product.reshape(*lhs.shape[:rows], *outputs).astype(result_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _matmul(
    x: Float[Array, "rows features"],
    kernel: Float[Array, "_ _"],
    axis: int,
    precision: Any,
    dtype: Any,
) -> Float[Array, "rows out"]:
    """Returns the product over features, with operands rounded to `dtype`.

    The kernel has features in dimension `axis`. Arguments, result and gradients are float32.
    """
    return _matmul_forward(x, kernel, axis, precision, dtype)[0]


def _matmul_forward(
    x: Array, kernel: Array, axis: int, precision: Any, dtype: Any
) -> tuple[Array, tuple[Array, Array]]:
    x, kernel = x.astype(dtype), kernel.astype(dtype)
    return _contract(x, kernel, 1, axis, precision), (x, kernel)


def _matmul_backward(
    axis: int,
    precision: Any,
    dtype: Any,
    saved: tuple[Array, Array],
    gradient: Float[Array, "rows out"],
) -> tuple[Array, Array]:
    # The barrier keeps these as matrices. Without it XLA folds reshapes from neighbouring layers into
    # the products, and makes transposed copies after all.
    x, kernel, gradient = lax.optimization_barrier((*saved, gradient.astype(dtype)))
    dx = _contract(gradient, kernel, 1, 1 - axis, precision)
    # Both operands have the contracted rows in front. Transposing the narrower one first costs less
    # than it gains.
    x_first = x.shape[1] <= gradient.shape[1]
    narrow, wide = (x, gradient) if x_first else (gradient, x)
    dkernel = _contract(transposed(narrow), wide, 1, 0, precision)
    return dx, dkernel if x_first == (axis == 0) else lax.optimization_barrier(dkernel).T


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _contract(a: Array, b: Array, axis_a: int, axis_b: int, precision: Any) -> Array:
    dimensions = (((axis_a,), (axis_b,)), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def transposed(x: Float[Array, "*batch rows columns"]) -> Float[Array, "*batch columns rows"]:
    """Returns x with its last two dimensions swapped, as an operand for a product (`written_out`)."""
    return written_out(x.swapaxes(-1, -2))


def written_out(x: Float[Array, "*batch rows columns"]) -> Float[Array, "*batch rows columns"]:
    """Returns x, an operand for a product, written to memory on CPUs.

    XLA's CPU backend can't run a bfloat16 product into which it folded a transpose. The barrier
    prevents this. It computes bfloat16 products in float32 if an operand has the layout of a
    transposed array. The reshapes give x the layout of a new one.
    """
    if current_target()[0] != "cpu":
        return x
    *batch, rows, columns = x.shape
    return lax.optimization_barrier(x.reshape(*batch, rows, 1, columns)).reshape(x.shape)
