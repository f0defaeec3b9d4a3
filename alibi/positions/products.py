"""Products of tokens with a vector for each distance: the biases of Shaw et al. and DeBERTa.

Two ways are fast for tokens at consecutive positions. `looked_up` takes each pair's product from
the products of a token with all vectors. `products_in_bands` never holds these: a row is a token, a
column is a partner of it, and a band of rows is multiplied with the vectors of its own distances,
few more than columns. The columns of a row are then a range of its band's products, which begins
one place before the range of the row above.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from alibi.numerics.kernels import in_own_kernel
from alibi.positions.bias import Bias, Part, consecutive, per_head, per_key, per_query, static
from alibi.positions.distance import rows_and_columns
from alibi.positions.shapes import KeyPositions, KnownPositions, QueryPositions, Weights

BAND = 64  # rows that are multiplied together
SELECTED = 64  # distances, at most, that are compared one by one on a TPU: the cost grows with them


class QueryProducts(Bias):
    """The product of each query with the vector of its distance to each key, key position minus
    query position.

    Attributes:
      tokens: the queries, scaled, float32.
      vectors: for the distances `lowest`, `lowest` + 1, ...; farther distances use the first or
        last vector.
      in_order: queries and keys stand at consecutive positions.
      laid_out: the vectors are in the order of a call with tokens and partners at consecutive
        positions: token i of n and partner j use vector number `BAND` - 2 + n - i + j. `lowest` and
        positions are then ignored.
    """

    tokens: Float[Array, "*batch q heads head_dim"] = per_query()
    vectors: Float[Array, "distances heads head_dim"] = per_head(axis=1)
    lowest: int = static()
    in_order: bool = static(default=False)
    laid_out: bool = static(default=False)

    of_keys = False

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Weights:
        rows, columns = self._sides(query_positions, key_positions)
        if self.laid_out:
            return products_in_bands(self.tokens, self.vectors, columns.shape[-1], self.of_keys)
        products = self._products(rows, columns)
        return products.swapaxes(-1, -2) if self.of_keys else products

    def _sides(self, of_queries: Any, of_keys: Any) -> tuple[Any, Any]:
        """Returns the argument for the rows, which are tokens, and for the columns, their partners."""
        return (of_keys, of_queries) if self.of_keys else (of_queries, of_keys)

    def _products(
        self,
        row_positions: Integer[Array, "*#batch rows"],
        column_positions: Integer[Array, "*#batch columns"],
    ) -> Float[Array, "*batch heads rows columns"]:
        """Returns the product of each token with the vector of its distance to each column."""
        if column_positions.shape[-1] == 1:
            row, column = rows_and_columns(row_positions, column_positions)
            places = jnp.clip(column - row - self.lowest, 0, self.vectors.shape[0] - 1)[..., 0]
            taken = jnp.broadcast_to(self.vectors[places], self.tokens.shape)
            return jnp.swapaxes(jnp.vecdot(self.tokens, taken, precision="highest"), -1, -2)[
                ..., None
            ]
        products = jnp.einsum("...rhd,nhd->...rhn", self.tokens, self.vectors, precision="highest")
        return looked_up(
            products, self.lowest, row_positions, column_positions, in_order=self.in_order
        )

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
        return padded.replace(
            vectors=jnp.pad(self.vectors, (self._sides(queries, keys), (0, 0), (0, 0)), mode="edge")
        )

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
    """The product of each key with the vector of its distance to each query, query position minus
    key position.
    """

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
    """Returns for each row and column the row's product for their distance, column position minus
    row position.

    Args:
      products: of each row for the distances `lowest`, `lowest` + 1, ...; farther distances use the
        first or last.
      in_order: both sides stand at consecutive positions. The gradient is then gathered, which
        takes a tenth of the time of scattered additions, and only in reverse mode.
    """
    of_rows = jnp.swapaxes(products, -3, -2)
    row, column = rows_and_columns(row_positions, column_positions)
    if in_order:
        spread = functools.partial(_spread, distances=products.shape[-1])
        on_tpu = {"tpu": _selected} if products.shape[-1] <= SELECTED else {}
        return lax.platform_dependent(of_rows, column - row - lowest, default=spread, **on_tpu)
    places = jnp.expand_dims(jnp.clip(column - row - lowest, 0, products.shape[-1] - 1), -3)
    places = places.reshape((1,) * (of_rows.ndim - places.ndim) + places.shape)
    return _taken(of_rows, places)


@jax.custom_vjp
def _selected(
    products: Float[Array, "*batch rows distances"], places: Int[Array, "rows columns"]
) -> Float[Array, "*batch rows columns"]:
    """Returns the same as `_spread`, by a comparison for each distance.

    With 17 distances, attention takes 0.7 of the cycles of gathering by the estimate of the compiler
    for TPUs, and a training step a thirteenth of the bytes. (To cut ranges of longer rows by a
    reshape takes five times as many cycles.)
    """
    found = jnp.broadcast_to(products[..., :1], (*products.shape[:-1], places.shape[1]))
    for number in range(1, products.shape[-1]):
        found = jnp.where(places >= number, products[..., number, None], found)
    return found


def _selected_forward(products: Array, places: Array) -> tuple[Array, tuple[Array, Array]]:
    return _selected(products, places), (products, places)


def _selected_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    products, places = saved  # products for their number alone
    last = products.shape[-1] - 1
    places = jnp.clip(places, 0, last)
    sums = [jnp.where(places == n, gradient, 0.0).sum(axis=-1) for n in range(last + 1)]
    return jnp.stack(sums, axis=-1), None


_selected.defvjp(_selected_forward, _selected_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _spread(
    products: Float[Array, "*batch rows distances"],
    places: Int[Array, "rows columns"],
    distances: int,
) -> Float[Array, "*batch rows columns"]:
    """Returns for each row and column the row's product at their place, clipped to the first and
    last.
    """
    return _taken(products, jnp.clip(places, 0, distances - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gathered(
    of_pairs: Float[Array, "*batch rows columns"],
    places: Int[Array, "rows columns"],
    distances: int,
) -> Float[Array, "*batch rows distances"]:
    """Returns the transpose of `_spread`: the sum of the columns that read a product, for each row
    and product.
    """
    if distances == 1:
        return of_pairs.sum(axis=-1, keepdims=True)
    ends = (_like(end, of_pairs) for end in (places <= 0, places >= distances - 1))
    lowest, highest = (jnp.where(end, of_pairs, 0.0).sum(axis=-1, keepdims=True) for end in ends)
    # Between the ends a product is read by at most a single column.
    rows, columns = places.shape
    column = jnp.arange(1, distances - 1)[None] + jnp.arange(rows)[:, None] - places[0, 0]
    column = jnp.where((column >= 0) & (column < columns), column, columns)
    inner = _taken(of_pairs, column, mode="fill", fill_value=0.0)
    return jnp.concatenate([lowest, inner, highest], axis=-1)


def _and_places(
    function: Callable[..., Array], x: Array, places: Array, distances: int
) -> tuple[Array, Array]:
    return function(x, places, distances), places


def _turned(
    function: Callable[..., Array], distances: int, places: Array, gradient: Array
) -> tuple[Array, None]:
    return function(gradient, places, distances), None


# Both are linear, and each is the gradient of the other.
_spread.defvjp(functools.partial(_and_places, _spread), functools.partial(_turned, _gathered))
_gathered.defvjp(functools.partial(_and_places, _gathered), functools.partial(_turned, _spread))


def _taken(
    x: Float[Array, "*batch rows n"], places: Int[Array, "*#batch rows m"], **how: Any
) -> Float[Array, "*batch rows m"]:
    """Returns the numbers of each row at its places."""
    places = jnp.broadcast_to(_like(places, x), (*x.shape[:-1], places.shape[-1]))
    return jnp.take_along_axis(x, places, axis=-1, **how)


def _like(x: Array, like: Array) -> Array:
    return x.reshape((1,) * (like.ndim - x.ndim) + x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def products_in_bands(
    tokens: Float[Array, "*batch rows heads head_dim"],
    vectors: Float[Array, "distances heads head_dim"],
    columns: int,
    swapped: bool,
) -> Float[Array, "*batch heads _ _"]:
    """Returns the product of each token with the vector of its distance to each of so many columns.

    Differentiable once, in reverse mode.

    Args:
      tokens: the rows.
      vectors: of the distances, in order. Row i and column j use vector n - 1 - `columns` - i + j
        of n; at least `BAND` - 1 vectors stand before that of the last row and first column.
      swapped: the result is `[*batch, heads, columns, rows]`, otherwise `[*batch, heads, rows,
        columns]`.
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


def _saving(
    tokens: Array, vectors: Array, columns: int, swapped: bool
) -> tuple[Array, tuple[Array, Array]]:
    return products_in_bands(tokens, vectors, columns, swapped), (tokens, vectors)


def _backward(
    columns: int, swapped: bool, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    tokens, vectors = saved
    rows, heads, _ = tokens.shape[-3:]
    by_band, of_bands = _by_band(tokens), _of_bands(vectors, rows, columns)

    def gradient_by_band(gradient: Array) -> Array:
        of_all = gradient.reshape(-1, *gradient.shape[-3:])
        return _by_band(of_all.transpose((0, 3, 1, 2) if swapped else (0, 2, 1, 3)))

    def shifted_back(of_rows: Array) -> Array:
        wide = jnp.pad(of_rows.reshape(-1, BAND, columns), ((0, 0), (0, 0), (BAND, BAND)))
        return _ranges(wide, jnp.arange(1, BAND + 1), BAND + columns).reshape(
            *by_band.shape[:2], -1
        )

    # The transpose is inside: otherwise XLA lays the gradient out for one of its uses, and copies
    # it for the others.
    of_products = in_own_kernel(shifted_back, in_own_kernel(gradient_by_band, gradient))
    of_tokens = _by_row(
        _product("brn,bnd->brd", of_products, of_bands), heads, rows, by_band.shape[1]
    )
    # The small operand first and transposed: see the backward pass of `blocked`.
    of_vectors = _product("bdr,brn->bdn", by_band.swapaxes(1, 2), of_products).swapaxes(1, 2)
    add_up = jax.linear_transpose(lambda vectors: _of_bands(vectors, rows, columns), vectors)
    return of_tokens.reshape(tokens.shape), add_up(of_vectors)[0]


products_in_bands.defvjp(_saving, _backward)


def _by_band(x: Float[Array, "*batch rows heads n"]) -> Float[Array, "heads_bands batch_band n"]:
    """Returns the rows of each head and band, of all batch entries; zeros fill up the last band."""
    *_, rows, heads, n = x.shape
    filled = jnp.pad(x.reshape(-1, rows, heads, n), ((0, 0), (0, -rows % BAND), (0, 0), (0, 0)))
    by_band = filled.reshape(filled.shape[0], -1, BAND, heads, n).transpose(3, 1, 0, 2, 4)
    return by_band.reshape(by_band.shape[0] * by_band.shape[1], -1, n)


def _by_row(
    x: Float[Array, "..."], heads: int, rows: int, batch_band: int
) -> Float[Array, "batch rows heads n"]:
    """Returns the inverse of `_by_band`, for rows that may have been split further."""
    by_band = x.reshape(heads, -1, batch_band // BAND, BAND, x.shape[-1])
    return by_band.transpose(2, 1, 3, 0, 4).reshape(batch_band // BAND, -1, heads, x.shape[-1])[
        :, :rows
    ]


def _of_bands(
    vectors: Float[Array, "distances heads head_dim"], rows: int, columns: int
) -> Float[Array, "heads_bands width head_dim"]:
    """Returns the vectors of each band: as many as columns, and one more for each of its rows."""
    starts = vectors.shape[0] - columns - BAND * (1 + jnp.arange(-(-rows // BAND)))
    windows = jax.vmap(lambda start: lax.dynamic_slice_in_dim(vectors, start, BAND + columns))(
        starts
    )
    return windows.transpose(2, 0, 1, 3).reshape(-1, BAND + columns, vectors.shape[-1])


def _ranges(
    x: Float[Array, "rest band _"], starts: Int[Array, " band"], size: int
) -> Float[Array, "rest band size"]:
    """Returns a range of each row, from its own start on, as copies of rows, at which XLA is fast."""
    take = jax.vmap(
        lambda row, start: lax.dynamic_slice_in_dim(row, start, size, axis=-1), (1, 0), 1
    )
    return take(x, starts)


def _product(pattern: str, left: Array, right: Array) -> Array:
    # XLA's CPU backend has fast products for a single batch dimension; barriers keep transposes out
    # of them.
    return lax.optimization_barrier(
        jnp.einsum(pattern, *lax.optimization_barrier((left, right)), precision="highest")
    )
