"""Products with a vector for each distance, looked up for pairs of tokens: Shaw's and DeBERTa's biases are such."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from alibi.positions.distance import rows_and_columns


def looked_up(
    products: Float[Array, "*batch rows heads distances"],
    lowest: int,
    row_positions: Integer[Array, "*#batch rows"],
    column_positions: Integer[Array, "*#batch columns"],
) -> Float[Array, "*batch heads rows columns"]:
    """For each row and column the row's product of their distance, here the column's position minus the row's.

    Args:
      products: of each row at the distances `lowest`, `lowest` + 1, ...; the first and the last serve beyond them.
    """
    # To cut rows of consecutive positions as ranges out of longer ones, by a reshape, takes twice as long (measured on
    # a CPU, forward and backward, at 2,048 tokens).
    of_rows = jnp.swapaxes(products, -3, -2)
    row, column = rows_and_columns(row_positions, column_positions)
    places = jnp.expand_dims(jnp.clip(column - row - lowest, 0, products.shape[-1] - 1), -3)
    places = places.reshape((1,) * (of_rows.ndim - places.ndim) + places.shape)
    places = jnp.broadcast_to(places, (*of_rows.shape[:-1], column.shape[-1]))
    return jnp.take_along_axis(of_rows, places, axis=-1)
