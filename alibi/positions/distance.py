"""A bias that depends on the distance alone: one function of it, evaluated once a distance."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from alibi.positions.bias import Bias, Blocks, KnownPositions, MissingFunctionError, Part, per_head, shared, static


class DistanceBias(Bias):
    """A bias that depends on the distance alone: a subclass gives `at`, and nothing else is needed.

    However expensive `at` is, attention evaluates it once for each distance, not for each
    pair of query and key. If the bias never grows with distance, `bounded = True` lets attention
    skip keys that are too far to matter; if it grows in places, `envelope` must be given too.
    """

    def at(self, distance: Integer[Array | np.ndarray, "*shape"]) -> Float[Array, "heads ..."]:
        """The bias of a key at each distance, which is in tokens and as `counted` gives it; float32.

        A table is made of distances in NumPy, which are known when the call is traced.
        """
        raise MissingFunctionError(f"{type(self).__name__} needs at(distance)")

    def counted(self, distance: Any) -> Any:
        """The distance as `at` takes it, from query position minus key position, a NumPy or JAX array.

        By default it is |i - j| if `symmetric`, else 0 for keys after the query. A bias that tells
        keys before and after a query apart returns its argument.
        """
        return abs(distance) if self.symmetric else distance * (distance > 0)

    def envelope(self, distance: Integer[Array, "*shape"]) -> Float[Array, "heads ..."]:
        """The largest bias of all keys at each distance and beyond; it is asked for if `bounded`.

        Distances are as `counted` gives them; where it tells sides apart, beyond is on the same side.
        """
        return self.at(distance)

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*#batch heads q k"]:
        check_integers("query", query_positions)
        check_integers("key", key_positions)
        return self.between(*rows_and_columns(query_positions, key_positions))

    def between(
        self, rows: Integer[Array, "*#batch q 1"], columns: Integer[Array, "*#batch 1 k"]
    ) -> Float[Array, "*#batch heads q k"]:
        """The bias of each query and key, computed for each pair by itself, without a table."""
        return jnp.moveaxis(self.at(self.counted(rows - columns)).astype(jnp.float32), 0, -3)

    def upper_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        # The distance of the nearest pair: behind if all keys stand before all queries, ahead if after, else 0.
        nearest = jnp.maximum(blocks.behind, 0) - jnp.maximum(blocks.ahead, 0)
        return jnp.moveaxis(self.envelope(self.counted(nearest)), 0, 1)

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        q_length, k_length = query_positions.shape[-1], key_positions.shape[-1]
        longest = max(q_length, k_length)
        known = [isinstance(side, np.ndarray) and side.ndim == 1 for side in (query_positions, key_positions)]
        # One query needs no table: it has each distance once. Decoding would also cut the keys alone out of it, and a
        # table, which begins at the first distance of its queries and keys, would then be read at the wrong distances.
        consecutive = all(known) and all((np.diff(side) == 1).all() for side in (query_positions, key_positions))
        if consecutive and q_length > 1:
            lowest = int(query_positions[0]) - int(key_positions[-1])
            highest = int(query_positions[-1]) - int(key_positions[0])
            distinct, places = np.unique(self.counted(np.arange(lowest, highest + 1)), return_inverse=True)
            values = self.at(distinct.astype(np.int32)).astype(jnp.float32)[:, places]
            return DistanceTable(
                values, self, lowest, int(query_positions[0] - key_positions[0]), self.bounded, self.adds_values
            )
        return self if q_length * k_length <= 4 * longest else self.up_to(longest - 1)

    def up_to(self, farthest: int) -> Bias:
        distinct = np.unique(self.counted(np.arange(-farthest, farthest + 1)))
        values = self.at(distinct.astype(np.int32)).astype(jnp.float32)
        return DistanceTable(values, self, int(distinct[0]), None, self.bounded, self.adds_values)


class DistanceTable(Bias):
    """A `DistanceBias` as a table with a value for each distance, from which each tile takes its own.

    Attributes:
      values: the bias at the distances `lowest`, `lowest` + 1, ..., float32.
      function: the bias itself, for distances that the table lacks.
      lowest: the first distance in the table.
      first_distance: position of the first query minus that of the first key, if queries and keys both
        stand at consecutive positions; a tile's rows are then ranges of the table. Else None, and
        each value is looked up by the positions of its query and key.
      bounded, adds_values: those of `function`.
    """

    values: Float[Array, "heads distances"] = per_head()
    function: DistanceBias = shared()
    lowest: int = static()
    first_distance: int | None = static()
    bounded: bool = static()
    adds_values: bool = static()

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> "DistanceTable":
        del query_positions, key_positions
        return self

    def upper_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        return self.function.upper_bound(blocks)

    def log_sum_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        return self.function.log_sum_bound(blocks)

    def of_values(
        self,
        weights: Float[Array, "*batch heads q k"],
        query_positions: Integer[Array, "*#batch q"],
        key_positions: Integer[Array, "*#batch k"],
    ) -> Float[Array, "*batch heads q value_dim"]:
        return self.function.of_values(weights, query_positions, key_positions)

    def spans(self, field: dataclasses.Field, part: Part) -> dict[int, tuple[Any, int]]:
        spans = super().spans(field, part)
        if field.name == "values" and self.first_distance is not None and part.queries and part.keys:
            (query, queries), (key, keys) = part.queries, part.keys
            spans[1] = (self.first_distance + query - key - (keys - 1) - self.lowest, queries + keys - 1)
        return spans

    def padded(self, queries: int, keys: int) -> "DistanceTable":
        if self.first_distance is None:
            return self
        values = jnp.pad(self.values, ((0, 0), (keys, queries)), mode="edge")
        return self.replace(values=values, lowest=self.lowest - keys)

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*#batch heads q k"]:
        if self.first_distance is not None:
            return self._by_rows(query_positions.shape[-1], key_positions.shape[-1])
        rows, columns = rows_and_columns(query_positions, key_positions)
        # As `at` counts them, free slots of a cache, which stand after all tokens, are like any later key.
        places = self.function.counted(rows - columns) - self.lowest
        inside = (places >= 0) & (places < self.values.shape[1])
        return jax.lax.cond(
            inside.all(),
            lambda: jnp.moveaxis(self.values[:, places], 0, -3),
            lambda: self.function.between(rows, columns),
        )

    def _by_rows(self, queries: int, keys: int) -> Float[Array, "heads q k"]:
        """The bias of a tile from the `queries + keys - 1` values that it has been cut to: each row is a range of them.

        To copy ranges takes a quarter of the time of gathering single values, and a sixth in the backward pass.
        """
        descending = self.values[:, ::-1]
        rows = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(descending, start, keys, axis=1), out_axes=1)
        return rows(jnp.arange(queries - 1, -1, -1))


def rows_and_columns(
    of_queries: Integer[Array, "*#batch q"], of_keys: Integer[Array, "*#batch k"]
) -> tuple[Integer[Array, "*#batch q 1"], Integer[Array, "*#batch 1 k"]]:
    """Positions of queries as a column and of keys as a row, so that both broadcast to `[*batch, q, k]`.

    Either may lack batch dimensions.
    """
    rank = max(of_queries.ndim, of_keys.ndim)
    # Signed, since differences of unsigned positions wrap around.
    rows, columns = (
        jnp.asarray(x, jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype) for x in (of_queries, of_keys)
    )
    rows, columns = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (rows, columns))
    return jnp.expand_dims(rows, -1), jnp.expand_dims(columns, -2)


def check_integers(name: str, positions: Array | np.ndarray) -> None:
    """Raises ValueError if positions are not an array of integers."""
    if not isinstance(positions, jax.Array | np.ndarray | np.generic):
        raise ValueError(f"{name}_positions={positions!r:.60} must be an array of integers, such as jnp.arange(8)")
    dtype = jnp.result_type(positions)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"{name}_positions have dtype {dtype}; they must be integers, "
            "since floating-point positions make neighbouring keys equal at long lengths"
        )
