"""A bias that is a function of the distance, evaluated once for each distance."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from alibi.positions.bias import (
    Bias,
    Blocks,
    Part,
    consecutive,
    per_head,
    shared,
    static,
)
from alibi.positions.shapes import (
    AtDistances,
    BlockBounds,
    Distances,
    KeyPositions,
    KnownPositions,
    QueryPositions,
    Tile,
)


class DistanceBias(Bias):
    """A bias that depends on the distance alone. A subclass defines `at`, and nothing else is needed.

    Attention evaluates `at` once for each distance, not for each query and key. If the bias never
    grows with distance, `bounded = True` lets attention skip keys too far to matter. If it grows in
    places, define `envelope` too.

    Attributes:
      signed: `at` gets i - j, query position minus key position. Otherwise it gets |i - j| if
        `symmetric`, else max(i - j, 0).
      in_table: values are computed once and looked up, unless the bias adds to the layer's values.
        False if `at` costs less than a look-up.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> class Root(DistanceBias):
      ...     bounded = True
      ...     scale: jax.Array = per_head()
      ...     def at(self, distance):
      ...         return -jnp.multiply.outer(self.scale, jnp.sqrt(distance))
      >>> Root(jnp.ones(2))(jnp.arange(4, 5), jnp.arange(5))[0].tolist()
      [[-2.0, -1.7320507764816284, -1.4142135381698608, -1.0, 0.0]]
    """

    signed = cast(Any, False)
    in_table = cast(Any, True)

    def at(self, distance: Distances) -> AtDistances:
        """Returns the bias at each distance, in tokens as `counted` returns them, float32. NumPy
        distances are known when the call is traced.
        """
        raise ValueError(f"{type(self).__name__} needs at(distance)")

    def counted(self, distance: Any) -> Any:
        """Returns the argument for `at`, from query position minus key position."""
        if self.symmetric:
            return abs(distance)
        return distance if self.signed else distance.clip(0)

    def envelope(self, distance: Integer[Array, "*shape"]) -> AtDistances:
        """Returns the largest bias at each distance and beyond, on the same side if `signed`."""
        return self.at(distance)

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        check_integers("query_positions", query_positions)
        check_integers("key_positions", key_positions)
        return self.between(*rows_and_columns(query_positions, key_positions))

    def between(
        self, rows: Integer[Array, "*#batch q 1"], columns: Integer[Array, "*#batch 1 k"]
    ) -> Tile:
        """Returns the bias for each query and key, without a table."""
        return jnp.moveaxis(self.at(self.counted(rows - columns)).astype(jnp.float32), 0, -3)

    def upper_bound(self, blocks: Blocks) -> BlockBounds:
        # The distance of the nearest pair: behind if all keys stand before all queries, ahead if
        # after, else 0.
        nearest = jnp.maximum(blocks.behind, 0) - jnp.maximum(blocks.ahead, 0)
        return jnp.moveaxis(self.envelope(self.counted(nearest)), 0, 1)

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        q_length, k_length = query_positions.shape[-1], key_positions.shape[-1]
        longest, looked_up = max(q_length, k_length), self.in_table and not self.adds_values
        # One query needs no table: it has each distance once. Decoding would also cut the table along
        # keys alone, and so read it at wrong distances.
        if looked_up and q_length > 1 and consecutive(query_positions, key_positions):
            lowest = int(query_positions[0]) - int(key_positions[-1])
            highest = int(query_positions[-1]) - int(key_positions[0])
            distinct, places = np.unique(
                self.counted(np.arange(lowest, highest + 1)), return_inverse=True
            )
            values = self.at(distinct.astype(np.int32)).astype(jnp.float32)[:, places]
            first_distance = int(query_positions[0] - key_positions[0])
            return DistanceTable(values, self, lowest, first_distance, self.bounded)
        return self if q_length * k_length <= 4 * longest else self.up_to(longest - 1)

    def up_to(self, farthest: int) -> Bias:
        if not self.in_table or self.adds_values:
            return self
        distinct = np.unique(self.counted(np.arange(-farthest, farthest + 1)))
        values = self.at(distinct.astype(np.int32)).astype(jnp.float32)
        return DistanceTable(values, self, int(distinct[0]), None, self.bounded)


class DistanceTable(Bias):
    """A `DistanceBias` as a table with a value for each distance. Each tile reads its range.

    Attributes:
      values: the bias at the distances `lowest`, `lowest` + 1, ..., float32.
      function: the bias itself, for distances outside the table.
      lowest: the first distance in the table.
      first_distance: first query position minus first key position if all positions are consecutive,
        so that the rows in a tile are ranges of the table. None if each pair looks up its value.
      bounded: as in `function`.
    """

    values: Float[Array, "heads distances"] = per_head()
    function: DistanceBias = shared()
    lowest: int = static()
    first_distance: int | None = static()
    bounded: bool = static()

    def tabulated(
        self, query_positions: KnownPositions, key_positions: KnownPositions
    ) -> "DistanceTable":
        return self

    @property
    def diagonals(self) -> Float[Array, "heads distances"] | None:
        return None if self.first_distance is None else self.values

    @property
    def level_from(self) -> int | None:
        return self.function.level_from

    def upper_bound(self, blocks: Blocks) -> BlockBounds:
        return self.function.upper_bound(blocks)

    def log_sum_bound(self, blocks: Blocks) -> BlockBounds:
        return self.function.log_sum_bound(blocks)

    def spans(self, field: dataclasses.Field, part: Part) -> dict[int, tuple[Any, int]]:
        spans = super().spans(field, part)
        if (
            field.name == "values"
            and self.first_distance is not None
            and part.queries
            and part.keys
        ):
            (query, queries), (key, keys) = part.queries, part.keys
            spans[1] = (
                self.first_distance + query - key - (keys - 1) - self.lowest,
                queries + keys - 1,
            )
        return spans

    def padded(self, queries: int, keys: int) -> "DistanceTable":
        if self.first_distance is None:
            return self
        values = jnp.pad(self.values, ((0, 0), (keys, queries)), mode="edge")
        return self.replace(values=values, lowest=self.lowest - keys)

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        if self.first_distance is not None:
            # Each row of the tile is a range of the table's `q + k - 1` values. Copying ranges takes a
            # quarter of the time for gathering single values, and a sixth in the backward pass.
            queries, keys = query_positions.shape[-1], key_positions.shape[-1]
            descending = self.values[:, ::-1]
            take = jax.vmap(
                lambda start: jax.lax.dynamic_slice_in_dim(descending, start, keys, axis=1),
                out_axes=1,
            )
            return take(jnp.arange(queries - 1, -1, -1))
        rows, columns = rows_and_columns(query_positions, key_positions)
        # Free slots in a cache stand after all tokens, as any later key.
        places = self.function.counted(rows - columns) - self.lowest
        inside = (places >= 0) & (places < self.values.shape[1])
        return jax.lax.cond(
            inside.all(),
            lambda: jnp.moveaxis(self.values[:, places], 0, -3),
            lambda: self.function.between(rows, columns),
        )


def rows_and_columns(
    of_queries: Integer[Array, "*#batch q"], of_keys: Integer[Array, "*#batch k"]
) -> tuple[Integer[Array, "*#batch q 1"], Integer[Array, "*#batch 1 k"]]:
    """Returns query positions as a column and key positions as a row, which broadcast to `[*batch, q,
    k]`. Either may lack batch dimensions.
    """
    rank = max(of_queries.ndim, of_keys.ndim)
    # Signed, since differences of unsigned positions wrap around.
    rows, columns = (
        jnp.asarray(x, jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype)
        for x in (of_queries, of_keys)
    )
    rows, columns = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (rows, columns))
    return jnp.expand_dims(rows, -1), jnp.expand_dims(columns, -2)


def as_array(x: Any) -> Any:
    """Returns a list as a NumPy array, or as a JAX array if it holds JAX arrays. Arrays and None stay.

    Raises:
      ValueError: rows with several lengths, texts or other objects.
    """
    if x is None or hasattr(x, "shape"):
        return x
    of = jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)) else np
    try:
        array = of.asarray(x)
    except ValueError as error:
        raise ValueError(
            f"a list has rows of several lengths ({x!r:.60}); an array needs one length: pad the shorter rows"
        ) from error
    if array.dtype.kind in "USO":
        raise ValueError(f"{x!r:.60} is no array of numbers; give an array or a list")
    return array


def check_integers(name: str, numbers: Array | np.ndarray) -> None:
    """Raises ValueError unless positions or segments are an array of integers."""
    if not isinstance(numbers, jax.Array | np.ndarray | np.generic):
        raise ValueError(
            f"{name}={numbers!r:.60} must be an array of integers, such as jnp.arange(8)"
        )
    dtype = jnp.result_type(numbers)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"{name} have dtype {dtype}; they must be integers, since floating-point numbers make neighbours equal: "
            "positions at long lengths, segments when they are rounded"
        )
