"""Products with a vector for each distance, looked up for pairs of tokens: Shaw's and DeBERTa's biases are such."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from alibi.positions.bias import Bias, KnownPositions, Part, per_head, per_key, per_query, static
from alibi.positions.distance import rows_and_columns

BAND = 64  # rows whose products are computed together


class QueryProducts(Bias):
    """The product of each query with the vector of its distance to each key, key position minus query position.

    Attributes:
      tokens: the queries, scaled, float32.
      vectors: of the distances `lowest`, `lowest` + 1, ...; the first and the last serve beyond them.
      in_order: queries and keys stand at consecutive positions.
      laid_out_for: how many tokens are in the call whose distances the vectors are, all in order, after `BAND` - 1
        that no token needs; each tile then takes a range of them. 0: they are those of the method.
    """

    tokens: Float[Array, "*batch q heads head_dim"] = per_query()
    vectors: Float[Array, "distances heads head_dim"] = per_head(axis=1)
    lowest: int = static()
    in_order: bool = static(default=False)
    laid_out_for: int = static(default=0)

    of_keys = False

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*batch heads q k"]:
        rows, columns = self._sides(query_positions, key_positions)
        if self.laid_out_for:
            return _in_bands(self.tokens, self.vectors, columns.shape[-1], self.of_keys)
        products = self._products(rows, columns)
        return products.swapaxes(-1, -2) if self.of_keys else products

    def _sides(self, of_queries: Any, of_keys: Any) -> tuple[Any, Any]:
        """What belongs to the tokens, which make rows, and to their partners, which make columns."""
        return (of_keys, of_queries) if self.of_keys else (of_queries, of_keys)

    def _products(
        self, row_positions: Integer[Array, "*#batch rows"], column_positions: Integer[Array, "*#batch columns"]
    ) -> Float[Array, "*batch heads rows columns"]:
        """The product of each token with the vector of its distance to each column."""
        if column_positions.shape[-1] == 1:
            row, column = rows_and_columns(row_positions, column_positions)
            places = jnp.clip(column - row - self.lowest, 0, self.vectors.shape[0] - 1)[..., 0]
            taken = jnp.broadcast_to(self.vectors[places], self.tokens.shape)
            return jnp.swapaxes(jnp.vecdot(self.tokens, taken, precision="highest"), -1, -2)[..., None]
        products = jnp.einsum("...rhd,nhd->...rhn", self.tokens, self.vectors, precision="highest")
        return looked_up(products, self.lowest, row_positions, column_positions, in_order=self.in_order)

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        if not in_order(query_positions, key_positions):
            return self
        rows, columns = self._sides(query_positions, key_positions)
        if self.vectors.shape[0] <= BAND or min(rows.size, columns.size) == 1:
            return self.replace(in_order=True)
        first = int(columns[0]) - int(rows[-1]) - (BAND - 1)
        places = np.arange(first, first + BAND + rows.size + columns.size - 1) - self.lowest
        vectors = self.vectors[np.clip(places, 0, self.vectors.shape[0] - 1)]
        return self.replace(vectors=vectors, in_order=True, laid_out_for=rows.size)

    def padded(self, queries: int, keys: int) -> Bias:
        padded = super().padded(queries, keys)
        if not self.laid_out_for:
            return padded
        rows, columns = self._sides(queries, keys)
        vectors = jnp.pad(self.vectors, ((rows, columns), (0, 0), (0, 0)), mode="edge")
        return padded.replace(vectors=vectors, laid_out_for=self.laid_out_for + rows)

    def spans(self, field: dataclasses.Field, part: Part) -> dict[int, tuple[Any, int]]:
        spans = super().spans(field, part)
        if field.name == "vectors" and self.laid_out_for and part.queries and part.keys:
            (row, rows), (column, columns) = self._sides(part.queries, part.keys)
            filled = _bands(rows) * BAND
            spans[0] = (self.laid_out_for + BAND - 1 - filled + column - row, filled + columns)
        return spans


class KeyProducts(QueryProducts):
    """The same of each key, by query position minus key position."""

    tokens: Float[Array, "*batch k heads head_dim"] = per_key()

    of_keys = True


def _bands(rows: int) -> int:
    return -(-rows // BAND)


def _in_bands(
    tokens: Float[Array, "*batch rows heads head_dim"],
    vectors: Float[Array, "distances heads head_dim"],
    columns: int,
    swapped: bool,
) -> Float[Array, "*batch heads _ _"]:
    """The product of each row with a vector for each column, which is that of the row above and the column before.

    Each band of rows is multiplied with the vectors of its own distances, which are few more than there are columns,
    so no product with all vectors is ever held. The columns of a row are a range of its band's products, which begins
    one place before that of the row above. Differentiable once, in reverse mode.

    Args:
      vectors: the last `columns` belong to the first row of a whole number of bands; any before all rows' are left out.
      swapped: columns become rows of the result.
    """
    *batch, rows, heads, head_dim = tokens.shape
    of_tile = vectors[-(_bands(rows) * BAND + columns) :]
    found = _band_products(tokens.reshape(-1, rows, heads, head_dim), of_tile, columns, swapped)
    return found.reshape(*batch, *found.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _band_products(
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
    return _band_products(tokens, vectors, columns, swapped), (tokens, vectors)


def _backward(columns: int, swapped: bool, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    tokens, vectors = saved
    batch, rows, heads, head_dim = tokens.shape
    bands, width = _bands(rows), BAND + columns

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


_band_products.defvjp(_saving, _backward)


def _by_band(tokens: Float[Array, "batch rows heads head_dim"]) -> Float[Array, "heads_bands batch_band head_dim"]:
    batch, rows, heads, head_dim = tokens.shape
    filled = jnp.pad(tokens, ((0, 0), (0, _bands(rows) * BAND - rows), (0, 0), (0, 0)))
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
    """The function of x, computed by itself.

    On CPUs XLA would otherwise compute it once for each use, and with strides, four times as slowly each. It fuses
    through barriers, but not into a branch, which it takes here always: nothing is above infinity.
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


def in_order(query_positions: KnownPositions, key_positions: KnownPositions) -> bool:
    """Whether both stand at consecutive positions, as known when a call is traced."""
    sides = query_positions, key_positions
    return all(isinstance(side, np.ndarray) and side.ndim == 1 and bool((np.diff(side) == 1).all()) for side in sides)


def looked_up(
    products: Float[Array, "*batch rows heads distances"],
    lowest: int,
    row_positions: Integer[Array, "*#batch rows"],
    column_positions: Integer[Array, "*#batch columns"],
    *,
    in_order: bool = False,
) -> Float[Array, "*batch heads rows columns"]:
    """For each row and column the row's product of their distance, here the column's position minus the row's.

    Args:
      products: of each row at the distances `lowest`, `lowest` + 1, ...; the first and the last serve beyond them.
      in_order: both sides stand at consecutive positions. The gradient is then gathered, which takes a tenth of the
        time of adding each pair's to where it was looked up; it can be had in reverse mode alone.
    """
    of_rows = jnp.swapaxes(products, -3, -2)
    row, column = rows_and_columns(row_positions, column_positions)
    if in_order:
        return _spread(of_rows, column - row - lowest, products.shape[-1])
    # To cut rows of consecutive positions as ranges out of longer ones, by a reshape, takes twice as long (measured on
    # a CPU, forward and backward, at 2,048 tokens).
    places = jnp.expand_dims(jnp.clip(column - row - lowest, 0, products.shape[-1] - 1), -3)
    places = places.reshape((1,) * (of_rows.ndim - places.ndim) + places.shape)
    return _taken(of_rows, places)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _spread(
    products: Float[Array, "*batch rows distances"], places: Int[Array, "rows columns"], distances: int
) -> Float[Array, "*batch rows columns"]:
    """For each row and column the row's product at their place; the first and the last serve beyond them."""
    return _taken(products, jnp.clip(places, 0, distances - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gathered(
    of_pairs: Float[Array, "*batch rows columns"], places: Int[Array, "rows columns"], distances: int
) -> Float[Array, "*batch rows distances"]:
    """For each row and distance the sum over the columns to which `_spread` gives that product: its transpose."""
    if distances == 1:
        return of_pairs.sum(axis=-1, keepdims=True)
    ends = (_like(end, of_pairs) for end in (places <= 0, places >= distances - 1))
    lowest, highest = (jnp.where(end, of_pairs, 0.0).sum(axis=-1, keepdims=True) for end in ends)
    # Between the ends there is one column for a product, or none.
    rows, columns = places.shape
    column = jnp.arange(1, distances - 1)[None] + jnp.arange(rows)[:, None] - places[0, 0]
    column = jnp.where((column >= 0) & (column < columns), column, columns)
    inner = _taken(of_pairs, column, mode="fill", fill_value=0.0)
    return jnp.concatenate([lowest, inner, highest], axis=-1)


def _and_places(function: Callable[..., Array], x: Array, places: Array, distances: int) -> tuple[Array, Array]:
    return function(x, places, distances), places


def _turned(function: Callable[..., Array], distances: int, places: Array, gradient: Array) -> tuple[Array, None]:
    return function(gradient, places, distances), None


# Both are linear, and the gradient of each is the other.
_spread.defvjp(functools.partial(_and_places, _spread), functools.partial(_turned, _gathered))
_gathered.defvjp(functools.partial(_and_places, _gathered), functools.partial(_turned, _spread))


def _taken(
    x: Float[Array, "*batch rows n"], places: Int[Array, "*#batch rows m"], **how: Any
) -> Float[Array, "*batch rows m"]:
    """The numbers of each row at its places."""
    places = jnp.broadcast_to(_like(places, x), (*x.shape[:-1], places.shape[-1]))
    return jnp.take_along_axis(x, places, axis=-1, **how)


def _like(x: Array, like: Array) -> Array:
    return x.reshape((1,) * (like.ndim - x.ndim) + x.shape)
