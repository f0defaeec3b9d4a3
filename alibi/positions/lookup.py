"""Products with a vector for each distance, looked up for pairs of tokens: Shaw's and DeBERTa's biases are such."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from alibi.positions.bands import BAND, products_in_bands
from alibi.positions.bias import Bias, KnownPositions, Part, consecutive, per_head, per_key, per_query, static
from alibi.positions.distance import rows_and_columns


class QueryProducts(Bias):
    """The product of each query with the vector of its distance to each key, key position minus query position.

    Attributes:
      tokens: the queries, scaled, float32.
      vectors: of the distances `lowest`, `lowest` + 1, ...; the first and the last serve beyond them.
      in_order: queries and keys stand at consecutive positions.
      laid_out: the vectors have been laid out for a call whose tokens and partners are in order: that of token i
        and partner j has number `BAND` - 2 + n - i + j, where n is the number of tokens. `lowest` and positions are
        not read then.
    """

    tokens: Float[Array, "*batch q heads head_dim"] = per_query()
    vectors: Float[Array, "distances heads head_dim"] = per_head(axis=1)
    lowest: int = static()
    in_order: bool = static(default=False)
    laid_out: bool = static(default=False)

    of_keys = False

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*batch heads q k"]:
        rows, columns = self._sides(query_positions, key_positions)
        if self.laid_out:
            return products_in_bands(self.tokens, self.vectors, columns.shape[-1], self.of_keys)
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
        if self.laid_out or not consecutive(query_positions, key_positions):
            return self
        rows, columns = self._sides(query_positions, key_positions)
        if self.vectors.shape[0] <= BAND or min(rows.size, columns.size) == 1:
            return self.replace(in_order=True)
        first = int(columns[0]) - int(rows[-1]) - (BAND - 1)
        places = np.arange(first, first + BAND + rows.size + columns.size - 1) - self.lowest
        vectors = self.vectors[np.clip(places, 0, self.vectors.shape[0] - 1)]
        return self.replace(vectors=vectors, in_order=True, laid_out=True)

    def padded(self, queries: int, keys: int) -> Bias:
        padded = super().padded(queries, keys)
        if not self.laid_out:
            return padded
        return padded.replace(vectors=jnp.pad(self.vectors, (self._sides(queries, keys), (0, 0), (0, 0)), mode="edge"))

    def spans(self, field: dataclasses.Field, part: Part) -> dict[int, tuple[Any, int]]:
        spans = super().spans(field, part)
        if field.name == "vectors" and self.laid_out and (part.queries or part.keys):
            tokens = self.tokens.shape[-3]
            of_rows, of_columns = self._sides(part.queries, part.keys)
            row, rows = of_rows or (0, tokens)
            column, columns = of_columns or (0, self.vectors.shape[0] - (BAND - 1) - tokens)
            spans[0] = (tokens - row - rows + column, BAND - 1 + rows + columns)
        return spans


class KeyProducts(QueryProducts):
    """The same of each key, by query position minus key position."""

    tokens: Float[Array, "*batch k heads head_dim"] = per_key()

    of_keys = True


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
