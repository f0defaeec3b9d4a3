"""Products with a vector for each distance, looked up for pairs of tokens: Shaw's and DeBERTa's biases are such."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from alibi.positions.bias import Bias, KnownPositions, per_head, per_key, per_query, static
from alibi.positions.distance import rows_and_columns

BAND = 64  # rows whose products are computed together


class QueryProducts(Bias):
    """The product of each query with the vector of its distance to each key, key position minus query position.

    Attributes:
      tokens: the queries, scaled, float32.
      vectors: of the distances `lowest`, `lowest` + 1, ...; the first and the last serve beyond them.
      in_order: queries and keys stand at consecutive positions.
    """

    tokens: Float[Array, "*batch q heads head_dim"] = per_query()
    vectors: Float[Array, "distances heads head_dim"] = per_head(axis=1)
    lowest: int = static()
    in_order: bool = static(default=False)

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*batch heads q k"]:
        return self.products(query_positions, key_positions)

    def products(
        self, row_positions: Integer[Array, "*#batch rows"], column_positions: Integer[Array, "*#batch columns"]
    ) -> Float[Array, "*batch heads rows columns"]:
        """The product of each token, which makes a row, with the vector of its distance to each column."""
        columns = column_positions.shape[-1]
        if self.in_order and self.vectors.shape[0] > BAND and columns > 1:
            first = column_positions[0] - row_positions[0] - self.lowest
            return _in_bands(self.tokens, self.vectors, first, columns)
        if columns == 1:
            row, column = rows_and_columns(row_positions, column_positions)
            places = jnp.clip(column - row - self.lowest, 0, self.vectors.shape[0] - 1)[..., 0]
            taken = jnp.broadcast_to(self.vectors[places], self.tokens.shape)
            return jnp.swapaxes(jnp.vecdot(self.tokens, taken, precision="highest"), -1, -2)[..., None]
        products = jnp.einsum("...rhd,nhd->...rhn", self.tokens, self.vectors, precision="highest")
        return looked_up(products, self.lowest, row_positions, column_positions, in_order=self.in_order)

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        return self.replace(in_order=in_order(query_positions, key_positions))


class KeyProducts(QueryProducts):
    """The same of each key, by query position minus key position."""

    tokens: Float[Array, "*batch k heads head_dim"] = per_key()

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*batch heads q k"]:
        return self.products(key_positions, query_positions).swapaxes(-1, -2)


def _in_bands(
    tokens: Float[Array, "*batch rows heads head_dim"],
    vectors: Float[Array, "distances heads head_dim"],
    first: Int[Array, ""],
    columns: int,
) -> Float[Array, "*batch heads rows columns"]:
    """The product of each row with the vector at place `first` + column - row, for each column.

    Each band of rows is multiplied with the vectors of its own distances, which are few more than there are columns,
    so no product with all vectors is ever held. The columns of a row are a range of its band's products, which begins
    one place before that of the row above.
    """
    *batch, rows, heads, head_dim = tokens.shape
    bands = -(-rows // BAND)
    width, filled = BAND + columns, bands * BAND
    places = jnp.clip(first - (filled - 1) + jnp.arange(filled + columns), 0, vectors.shape[0] - 1)
    of_tile = vectors[places].swapaxes(0, 1)
    starts = range(filled - BAND, -1, -BAND)
    of_bands = jnp.stack([of_tile[:, start : start + width] for start in starts], axis=1)
    tokens = jnp.pad(tokens.reshape(-1, rows, heads, head_dim), ((0, 0), (0, filled - rows), (0, 0), (0, 0)))
    by_band = tokens.reshape(-1, bands, BAND, heads, head_dim).transpose(3, 1, 0, 2, 4)
    # One batch dimension, which XLA's CPU backend has fast products for; the barriers keep transposes out of them.
    of_bands = of_bands.reshape(heads * bands, width, head_dim)
    by_band = by_band.reshape(heads * bands, -1, head_dim)
    products = jnp.einsum("brd,bnd->brn", *lax.optimization_barrier((by_band, of_bands)), precision="highest")
    products = lax.optimization_barrier(products).reshape(heads, bands, -1, BAND, width)

    def columns_of(row: Array, start: Array) -> Array:
        return lax.dynamic_slice_in_dim(row, start, columns, axis=-1)

    of_rows = jax.vmap(columns_of, in_axes=(3, 0), out_axes=3)(products, jnp.arange(BAND - 1, -1, -1))
    of_rows = of_rows.transpose(2, 0, 1, 3, 4)
    return of_rows.reshape(-1, heads, filled, columns)[:, :, :rows].reshape(*batch, heads, rows, columns)


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
