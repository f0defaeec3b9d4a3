"""Products of tokens with a vector for each distance: the biases in Shaw et al. and DeBERTa."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from alibi.positions.bias import Bias, consecutive, like, per_head, per_key, per_query, static
from alibi.positions.distance import rows_and_columns
from alibi.positions.shapes import KeyPositions, KnownPositions, QueryPositions, Tile

SELECTED = 64  # distances, at most, that are compared one by one on a TPU: the cost grows with them


class QueryProducts(Bias):
    """The product of each query with the vector for its distance to each key, j - i.

    Attributes:
      tokens: scaled queries, float32.
      vectors: for the distances `lowest`, `lowest` + 1, ... Farther distances use the first or last
        vector.
      in_order: queries and keys stand at consecutive positions.
    """

    tokens: Float[Array, "*batch q heads head_dim"] = per_query()
    vectors: Float[Array, "distances heads head_dim"] = per_head(axis=1)
    lowest: int = static()
    in_order: bool = static(default=False)

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        return self._products(query_positions, key_positions)

    def _products(
        self,
        row_positions: Integer[Array, "*#batch rows"],
        column_positions: Integer[Array, "*#batch columns"],
    ) -> Float[Array, "*batch heads rows columns"]:
        """Returns each token's product, a row, with the vector for its distance to each column."""
        if column_positions.shape[-1] == 1:
            row, column = rows_and_columns(row_positions, column_positions)
            places = jnp.clip(column - row - self.lowest, 0, self.vectors.shape[0] - 1)[..., 0]
            taken = jnp.broadcast_to(self.vectors[places], self.tokens.shape)
            products = jnp.vecdot(self.tokens, taken, precision="highest")
            return jnp.swapaxes(products, -1, -2)[..., None]
        products = jnp.einsum("...rhd,nhd->...rhn", self.tokens, self.vectors, precision="highest")
        sides = row_positions, column_positions
        return looked_up(products, self.lowest, *sides, in_order=self.in_order)

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        return self.replace(in_order=consecutive(query_positions, key_positions))


class KeyProducts(QueryProducts):
    """The product of each key with the vector for its distance to each query, i - j."""

    tokens: Float[Array, "*batch k heads head_dim"] = per_key()

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        return self._products(key_positions, query_positions).swapaxes(-1, -2)


def looked_up(
    products: Float[Array, "*batch rows heads distances"],
    lowest: int,
    row_positions: Integer[Array, "*#batch rows"],
    column_positions: Integer[Array, "*#batch columns"],
    *,
    in_order: bool = False,
) -> Float[Array, "*batch heads rows columns"]:
    """Returns each row's product for its distance to each column, column minus row position.

    Args:
      products: for the distances `lowest`, `lowest` + 1, ... Farther distances use the first or last.
      in_order: both sides stand at consecutive positions. The gradient, in reverse mode alone, is then
        gathered in a tenth of the time for scattered additions.
    """
    of_rows = jnp.swapaxes(products, -3, -2)
    row, column = rows_and_columns(row_positions, column_positions)
    if in_order:
        spread = functools.partial(spread_products, distances=products.shape[-1])
        on_tpu = {"tpu": selected_products} if products.shape[-1] <= SELECTED else {}
        return lax.platform_dependent(of_rows, column - row - lowest, default=spread, **on_tpu)
    places = jnp.expand_dims(jnp.clip(column - row - lowest, 0, products.shape[-1] - 1), -3)
    places = places.reshape((1,) * (of_rows.ndim - places.ndim) + places.shape)
    return _taken(of_rows, places)


@jax.custom_vjp
def selected_products(
    products: Float[Array, "*batch rows distances"], places: Int[Array, "rows columns"]
) -> Float[Array, "*batch rows columns"]:
    """Returns what `spread_products` does, with a comparison for each distance.

    With 17 distances, the compiler for TPUs estimates 0.7 of the cycles for gathering in attention, and
    a thirteenth of the bytes in a training step. (A reshape that cuts ranges from longer rows takes
    five times as many cycles.)
    """
    selected = jnp.broadcast_to(products[..., :1], (*products.shape[:-1], places.shape[1]))
    for index in range(1, products.shape[-1]):
        selected = jnp.where(places >= index, products[..., index, None], selected)
    return selected


def _selected_forward(products: Array, places: Array) -> tuple[Array, tuple[Array, Array]]:
    return selected_products(products, places), (products, places)


def _selected_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    products, places = saved  # products for their shape alone
    last = products.shape[-1] - 1
    places = jnp.clip(places, 0, last)
    sums = [jnp.where(places == n, gradient, 0.0).sum(axis=-1) for n in range(last + 1)]
    return jnp.stack(sums, axis=-1), None


selected_products.defvjp(_selected_forward, _selected_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread_products(
    products: Float[Array, "*batch rows distances"],
    places: Int[Array, "rows columns"],
    distances: int,
) -> Float[Array, "*batch rows columns"]:
    """Returns each row's products at the places of its columns, clipped to the first and last."""
    return _taken(products, jnp.clip(places, 0, distances - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gathered(
    of_pairs: Float[Array, "*batch rows columns"],
    places: Int[Array, "rows columns"],
    distances: int,
) -> Float[Array, "*batch rows distances"]:
    """Returns the transpose of `spread_products`: for each product the sum over the columns that read it."""
    if distances == 1:
        return of_pairs.sum(axis=-1, keepdims=True)
    ends = (like(end, of_pairs) for end in (places <= 0, places >= distances - 1))
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
spread_products.defvjp(
    functools.partial(_and_places, spread_products), functools.partial(_turned, _gathered)
)
_gathered.defvjp(
    functools.partial(_and_places, _gathered), functools.partial(_turned, spread_products)
)


def _taken(
    x: Float[Array, "*batch rows n"], places: Int[Array, "*#batch rows m"], **how: Any
) -> Float[Array, "*batch rows m"]:
    """Returns each row's numbers at its places."""
    places = jnp.broadcast_to(like(places, x), (*x.shape[:-1], places.shape[-1]))
    return jnp.take_along_axis(x, places, axis=-1, **how)
