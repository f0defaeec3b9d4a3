"""Which keys a query sees: the causal mask, a window, segments and a user's mask.

All backends decide it here, for pairs of a query and a key and for whole tiles.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Shaped

from alibi.positions.distance import rows_and_columns

ADDED = -1e3  # an additive mask hides a key by a value of at most this


class Sight(NamedTuple):
    """How far queries see.

    Attributes:
      causal: keys at greater positions than the query's are hidden.
      window: keys at this distance or farther are hidden, or None for no window.
    """

    causal: bool
    window: int | None

    def of_pairs(
        self, queries: Any, keys: Any, segments: Any = None, reach: Any = None
    ) -> Iterator[Any]:
        """Yields a mask for each condition in use, True where a query sees a key.

        Args:
          queries, keys: positions that broadcast against each other.
          segments: for queries and for keys, which broadcast too, or None for no segments.
          reach: the last position that each query sees under a causal mask, and the keys' positions, which
            broadcast too. Defaults to its own.
        """
        if self.causal:
            yield keys <= queries if reach is None else reach[1] <= reach[0]
        if self.window is not None:
            yield abs(queries - keys) < self.window
        if segments is not None:
            yield segments[0] == segments[1]

    def of_sides(self, side: Callable[[str], Any]) -> Iterator[Bool[Array, "*batch q k"]]:
        """Yields the masks of `of_pairs` for all queries and keys.

        Args:
          side: returns positions or segments from their name in the call, or None for no such field.
        """
        segments = reach = None
        positions = rows_and_columns(side("query_positions"), side("key_positions"))
        if (of_queries := side("query_segments")) is not None:
            segments = rows_and_columns(of_queries, side("key_segments"))
        if (last := side("query_reach")) is not None:
            reach = rows_and_columns(last, side("key_positions"))
        yield from self.of_pairs(*positions, segments, reach)

    def of_tiles(self, behind: Any, ahead: Any) -> Any:
        """Returns True for tiles in which a query may see a key.

        Args:
          behind: the least query position minus key position in a tile.
          ahead: the least key position minus query position.
        """
        seen = ahead <= 0 if self.causal else ahead == ahead
        return (
            seen if self.window is None else seen & (behind < self.window) & (ahead < self.window)
        )

    def of_whole_tile(self, seen: Any, least: Any, spread: int) -> Any:
        """Returns `seen`, made False unless positions show each query in a tile each key.

        Args:
          least: the least query position minus key position.
          spread: the greatest one minus the least.
        """
        if self.causal:
            seen &= least >= 0
        if self.window is not None:
            seen &= (least + spread < self.window) & (-least < self.window)
        return seen

    def whole_tiles(self, start: Any, rows: int, columns: int, *, by_keys: bool) -> tuple[Any, Any]:
        """Returns the first tile in which positions show all rows all columns, and the tile after the last,
        or a bound beyond all tiles.

        Args:
          start: the first row's position minus the position of the first tile's first column.
          rows, columns: how many of them a tile has. Columns are a power of two.
          by_keys: True if rows are keys and columns are queries.
        """
        first, after = jnp.int32(0), jnp.int32(2**30)
        before, behind = floor(start + 1, columns), floor(start + rows - 2, columns) + 1
        if self.causal:
            first, after = (behind, after) if by_keys else (first, before)
        if self.window is not None:
            first = jnp.maximum(first, floor(start + rows - 1 - self.window, columns) + 1)
            after = jnp.minimum(after, floor(start + self.window, columns))
        return first, after


def floor(x: Any, size: int) -> Any:
    """Returns the largest integer up to x / size, for a size that is a power of two."""
    return lax.shift_right_arithmetic(x, jnp.int32(size.bit_length() - 1))


def visible_by(mask: Shaped[ArrayLike, "*shape"]) -> Bool[Array, "*shape"]:
    """Returns True where a mask shows a key, from booleans, zeros and ones, or an additive mask.

    A mask of floats without a value above zero is additive: zeros show, and values below zero, such
    as -1e9 and -inf, hide. A mask of integers is additive if a value is below zero. Integers that are
    all zero hide all keys, floats none.

    Raises:
      ValueError: known values that are neither, such as a bias for the logits.
    """
    if jnp.asarray(mask).dtype == bool:
        return jnp.asarray(mask)
    if not isinstance(mask, jax.core.Tracer):
        values = np.asarray(mask)
        below, above = values[values < 0], values[values > 0]
        wrong = np.append(below if above.size else below[below > ADDED], above[above != 1])
        if wrong.size:
            raise ValueError(
                f"mask holds {wrong[0]}; it must be of booleans, of zeros and ones, or of zeros where a key is seen "
                f"and {ADDED:g} or less where it is hidden; give a bias of the logits as bias="
            )
    mask = jnp.asarray(mask)
    integers = jnp.issubdtype(mask.dtype, jnp.integer)
    return jnp.where((mask < 0).any() if integers else ~(mask > 0).any(), mask == 0, mask > 0)
