"""Products of tokens and vectors of distances, where tokens and their partners stand at consecutive positions.

A row is a token, and a column one of its partners. All pairs of one distance share a vector, so each band of rows is
multiplied with the vectors of its own distances, which are few more than there are columns, and no product of a token
with all vectors is ever held. The columns of a row are then a range of its band's products, which begins one place
before that of the row above.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from alibi.positions.kernels import in_own_kernel

BAND = 64  # rows that are multiplied together


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def products_in_bands(
    tokens: Float[Array, "*batch rows heads head_dim"],
    vectors: Float[Array, "distances heads head_dim"],
    columns: int,
    swapped: bool,
) -> Float[Array, "*batch heads _ _"]:
    """The product of each token with the vector of its distance to each of so many columns.

    Differentiable once, in reverse mode.

    Args:
      tokens: one for each row.
      vectors: one for each distance, in order. Of n vectors, that of row i and column j is number
        n - 1 - `columns` - i + j; before that of the last row and first column stand `BAND` - 1 more at least.
      swapped: the result is `[*batch, heads, columns, rows]`, and else `[*batch, heads, rows, columns]`.
    """
    *batch, rows, heads, _ = tokens.shape
    by_band = _by_band(tokens)
    products = _product("brd,bnd->brn", by_band, _of_bands(vectors, rows, columns))

    def shifted(products: Array) -> Array:
        by_row = products.reshape(-1, BAND, BAND + columns)
        of_columns = _ranges(by_row, jnp.arange(BAND - 1, -1, -1), columns)
        of_rows = _by_row(of_columns, heads, rows, by_band.shape[1])
        return of_rows.transpose((0, 2, 3, 1) if swapped else (0, 2, 1, 3))

    found = in_own_kernel(shifted, products)
    return found.reshape(*batch, *found.shape[1:])


def _saving(tokens: Array, vectors: Array, columns: int, swapped: bool) -> tuple[Array, tuple[Array, Array]]:
    return products_in_bands(tokens, vectors, columns, swapped), (tokens, vectors)


def _backward(columns: int, swapped: bool, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    tokens, vectors = saved
    rows, heads, _ = tokens.shape[-3:]
    by_band, of_bands = _by_band(tokens), _of_bands(vectors, rows, columns)

    def gradient_by_band(gradient: Array) -> Array:
        of_all = gradient.reshape(-1, *gradient.shape[-3:])
        return _by_band(of_all.transpose((0, 3, 1, 2) if swapped else (0, 2, 1, 3)))

    def shifted_back(of_rows: Array) -> Array:
        wide = jnp.pad(of_rows.reshape(-1, BAND, columns), ((0, 0), (0, 0), (BAND, BAND)))
        return _ranges(wide, jnp.arange(1, BAND + 1), BAND + columns).reshape(*by_band.shape[:2], -1)

    # The transpose is inside: XLA would else lay the gradient out for one of those who use it, and copy it for others.
    of_products = in_own_kernel(shifted_back, in_own_kernel(gradient_by_band, gradient))
    of_tokens = _by_row(_product("brn,bnd->brd", of_products, of_bands), heads, rows, by_band.shape[1])
    # The small operand first and transposed: see the backward pass of `blocked`.
    of_vectors = _product("bdr,brn->bdn", by_band.swapaxes(1, 2), of_products).swapaxes(1, 2)
    add_up = jax.linear_transpose(lambda vectors: _of_bands(vectors, rows, columns), vectors)
    return of_tokens.reshape(tokens.shape), add_up(of_vectors)[0]


products_in_bands.defvjp(_saving, _backward)


def _by_band(x: Float[Array, "*batch rows heads n"]) -> Float[Array, "heads_bands batch_band n"]:
    """The rows of each head and band, of all batch entries; the last band is filled up with zeros."""
    *_, rows, heads, n = x.shape
    filled = jnp.pad(x.reshape(-1, rows, heads, n), ((0, 0), (0, -rows % BAND), (0, 0), (0, 0)))
    by_band = filled.reshape(filled.shape[0], -1, BAND, heads, n).transpose(3, 1, 0, 2, 4)
    return by_band.reshape(by_band.shape[0] * by_band.shape[1], -1, n)


def _by_row(x: Float[Array, "..."], heads: int, rows: int, batch_band: int) -> Float[Array, "batch rows heads n"]:
    """The inverse of `_by_band`, whose rows may have been split further."""
    by_band = x.reshape(heads, -1, batch_band // BAND, BAND, x.shape[-1])
    return by_band.transpose(2, 1, 3, 0, 4).reshape(batch_band // BAND, -1, heads, x.shape[-1])[:, :rows]


def _of_bands(
    vectors: Float[Array, "distances heads head_dim"], rows: int, columns: int
) -> Float[Array, "heads_bands width head_dim"]:
    """The vectors of each band: as many as there are columns, and one more for each of its rows."""
    starts = vectors.shape[0] - columns - BAND * (1 + jnp.arange(-(-rows // BAND)))
    windows = jax.vmap(lambda start: lax.dynamic_slice_in_dim(vectors, start, BAND + columns))(starts)
    return windows.transpose(2, 0, 1, 3).reshape(-1, BAND + columns, vectors.shape[-1])


def _ranges(x: Float[Array, "rest band _"], starts: Int[Array, " band"], size: int) -> Float[Array, "rest band size"]:
    """A range of each row, from its own start on. (As rows to be copied, XLA is fast at it.)"""
    take = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, size, axis=-1), (1, 0), 1)
    return take(x, starts)


def _product(pattern: str, left: Array, right: Array) -> Array:
    # One batch dimension, which XLA's CPU backend has fast products for; the barriers keep transposes out of them.
    return lax.optimization_barrier(jnp.einsum(pattern, *lax.optimization_barrier((left, right)), precision="highest"))
