"""Products of tokens and vectors of distances, where tokens and their partners stand at consecutive positions.

A row is a token, and a column one of its partners. All pairs of one distance share a vector, so each band of rows is
multiplied with the vectors of its own distances, which are few more than there are columns, and no product of a token
with all vectors is ever held. The columns of a row are then a range of its band's products, which begins one place
before that of the row above.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BAND = 64  # rows that are multiplied together


def whole_bands(rows: int) -> int:
    """So many rows and what fills up the last band."""
    return -(-rows // BAND) * BAND


def products_in_bands(
    tokens: Float[Array, "*batch rows heads head_dim"],
    vectors: Float[Array, "distances heads head_dim"],
    columns: int,
    *,
    swapped: bool,
) -> Float[Array, "*batch heads _ _"]:
    """The product of each token with the vector of its distance to each of so many columns.

    Differentiable once, in reverse mode.

    Args:
      tokens: one for each row.
      vectors: of the distances in order, the last `whole_bands(rows)` + `columns` of which are read. Of these, row i
        and column j have number `whole_bands(rows)` - 1 - i + j.
      swapped: the result is `[*batch, heads, columns, rows]`, and else `[*batch, heads, rows, columns]`.
    """
    *batch, rows, heads, head_dim = tokens.shape
    of_tile = vectors[-(whole_bands(rows) + columns) :]
    found = _in_bands(tokens.reshape(-1, rows, heads, head_dim), of_tile, columns, swapped)
    return found.reshape(*batch, *found.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _in_bands(
    tokens: Float[Array, "batch rows heads head_dim"],
    vectors: Float[Array, "distances heads head_dim"],
    columns: int,
    swapped: bool,
) -> Float[Array, "batch heads _ _"]:
    batch, rows, heads, _ = tokens.shape
    products = _product("brd,bnd->brn", _by_band(tokens), _of_bands(vectors, columns))

    def shifted(products: Array) -> Array:
        by_row = products.reshape(-1, BAND, BAND + columns)
        ranges = _ranges(by_row, jnp.arange(BAND - 1, -1, -1), columns)
        ranges = ranges.reshape(heads, -1, batch, BAND, columns).transpose(2, 0, 1, 3, 4)
        of_rows = ranges.reshape(batch, heads, -1, columns)[:, :, :rows]
        return of_rows.swapaxes(2, 3) if swapped else of_rows

    return _kernel(shifted, products)


def _saving(tokens: Array, vectors: Array, columns: int, swapped: bool) -> tuple[Array, tuple[Array, Array]]:
    return _in_bands(tokens, vectors, columns, swapped), (tokens, vectors)


def _backward(columns: int, swapped: bool, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    tokens, vectors = saved
    batch, rows, heads, head_dim = tokens.shape
    bands, width = whole_bands(rows) // BAND, BAND + columns

    def by_band(gradient: Array) -> Array:
        of_rows = gradient.swapaxes(2, 3) if swapped else gradient
        filled = jnp.pad(of_rows, ((0, 0), (0, 0), (0, bands * BAND - rows), (0, 0)))
        return filled.reshape(batch, heads, bands, BAND, columns).transpose(1, 2, 0, 3, 4)

    def shifted_back(of_rows: Array) -> Array:
        wide = jnp.pad(of_rows.reshape(-1, BAND, columns), ((0, 0), (0, 0), (BAND, BAND)))
        return _ranges(wide, jnp.arange(1, BAND + 1), width).reshape(heads * bands, -1, width)

    of_products = _kernel(shifted_back, _kernel(by_band, gradient))
    of_tokens = _product("brn,bnd->brd", of_products, _of_bands(vectors, columns))
    of_tokens = of_tokens.reshape(heads, bands, batch, BAND, head_dim).transpose(2, 1, 3, 0, 4)
    # The small operand first and transposed: see the backward pass of `blocked`.
    of_bands = _product("bdr,brn->bdn", _by_band(tokens).swapaxes(1, 2), of_products)
    add_up = jax.linear_transpose(lambda vectors: _of_bands(vectors, columns), vectors)
    return of_tokens.reshape(batch, -1, heads, head_dim)[:, :rows], add_up(of_bands.swapaxes(1, 2))[0]


_in_bands.defvjp(_saving, _backward)


def _by_band(tokens: Float[Array, "batch rows heads head_dim"]) -> Float[Array, "heads_bands batch_band head_dim"]:
    batch, rows, heads, head_dim = tokens.shape
    filled = jnp.pad(tokens, ((0, 0), (0, whole_bands(rows) - rows), (0, 0), (0, 0)))
    by_band = filled.reshape(batch, -1, BAND, heads, head_dim).transpose(3, 1, 0, 2, 4)
    return by_band.reshape(-1, batch * BAND, head_dim)


def _of_bands(
    vectors: Float[Array, "distances heads head_dim"], columns: int
) -> Float[Array, "heads_bands width head_dim"]:
    """The vectors of each band: as many as there are columns, and one more for each of its rows."""
    starts = jnp.arange(vectors.shape[0] - columns - BAND, -1, -BAND)
    windows = jax.vmap(lambda start: lax.dynamic_slice_in_dim(vectors, start, BAND + columns))(starts)
    return windows.transpose(2, 0, 1, 3).reshape(-1, BAND + columns, vectors.shape[-1])


def _ranges(x: Float[Array, "rest band _"], starts: Int[Array, " band"], size: int) -> Float[Array, "rest band size"]:
    """A range of each row, from its own start on. (As rows to be copied, XLA is fast at it.)"""
    take = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, size, axis=-1), (1, 0), 1)
    return take(x, starts)


def _product(pattern: str, left: Array, right: Array) -> Array:
    # One batch dimension, which XLA's CPU backend has fast products for; the barriers keep transposes out of them.
    return lax.optimization_barrier(jnp.einsum(pattern, *lax.optimization_barrier((left, right)), precision="highest"))


def _kernel(function: Callable[[Array], Array], x: Array) -> Array:
    """The function of x, in a kernel of its own.

    On CPUs XLA would else compute it as a part of each kernel that uses it, at a quarter of the speed where it
    transposes. A barrier doesn't keep it from that, but a branch does. Nothing is above infinity, nor is NaN, so it is
    always the function that is computed.
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
