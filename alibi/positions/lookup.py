"""Products with a vector for each distance, looked up for pairs of tokens: Shaw's and DeBERTa's biases are such.

Where tokens stand at consecutive positions, each row of a tile is a range of one vector of distances, one step to the
left of the row above. Cut out of a longer row by a reshape, ranges cost a copy of the tile, forward and backward; to
gather single numbers costs many times that on CPUs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from alibi.positions.distance import rows_and_columns


def looked_up(
    products: Float[Array, "*batch rows heads distances"],
    lowest: int,
    row_positions: Integer[Array, "*#batch rows"],
    column_positions: Integer[Array, "*#batch columns"],
    *,
    consecutive: bool,
) -> Float[Array, "*batch heads rows columns"]:
    """For each row and column the row's product of their distance, here the column's position minus the row's.

    Args:
      products: of each row at the distances `lowest`, `lowest` + 1, ...; the first and the last serve beyond them.
      consecutive: rows and columns stand at consecutive positions, the same for all of the batch.
    """
    of_rows = jnp.swapaxes(products, -3, -2)
    rows, columns = of_rows.shape[-2], column_positions.shape[-1]
    if consecutive and rows > 1:
        # The place of the tile's least distance. (Its last positions may be those of what fills up a block.)
        first = column_positions[0] - row_positions[0] - (rows - 1) - lowest
        return _skewed(_range(of_rows, first, rows + columns - 1))
    row, column = rows_and_columns(row_positions, column_positions)
    places = jnp.expand_dims(jnp.clip(column - row - lowest, 0, products.shape[-1] - 1), -3)
    places = places.reshape((1,) * (of_rows.ndim - places.ndim) + places.shape)
    return jnp.take_along_axis(of_rows, jnp.broadcast_to(places, (*of_rows.shape[:-1], columns)), axis=-1)


def _range(x: Float[Array, "*rows n"], first: Integer[Array, ""], size: int) -> Float[Array, "*rows size"]:
    """The places `first`, ..., `first` + `size` - 1 of each row; beyond its ends its first and last numbers go on."""
    count = x.shape[-1]
    wide = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(size, size)], mode="edge")
    return jax.lax.dynamic_slice_in_dim(wide, jnp.clip(first, -size, count) + size, size, axis=-1)


def _skewed(wide: Float[Array, "*batch rows _"]) -> Float[Array, "*batch rows columns"]:
    """Row i from place rows - 1 - i on, as many places as there are columns, from rows of rows + columns - 1 places."""
    *batch, rows, size = wide.shape
    flat = wide.reshape(*batch, rows * size)[..., rows - 1 : -1]
    return flat.reshape(*batch, rows, size - 1)[..., : size - rows + 1]
