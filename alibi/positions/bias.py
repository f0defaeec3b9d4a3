"""The contract for a bias, which a position method adds to the logits.

Attention cuts a bias into tiles along the axes that its fields declare, and reads its properties,
such as bounded or linear in distance. It never asks for a class.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from alibi.positions.shapes import (
    BlockBounds,
    KeyPositions,
    KnownPositions,
    QueryPositions,
    Tile,
    Visible,
    Weights,
)

# start, which may be traced, and size of a range in a dimension, or None for the whole dimension
Span = tuple[Any, int] | None


def consecutive(*sides: KnownPositions) -> bool:
    """Returns whether all positions `[length]` are consecutive and known when a call is traced."""
    return all(
        isinstance(side, np.ndarray) and side.ndim == 1 and bool((np.diff(side) == 1).all())
        for side in sides
    )


class Part(NamedTuple):
    """A range of batch entries, heads, queries and keys in a call of attention, such as a tile."""

    batch: Span = None
    heads: Span = None
    queries: Span = None
    keys: Span = None


class Blocks(NamedTuple):
    """Pairs of a query block and a key block, for which a bias gives bounds.

    Attributes:
      behind: least query position minus key position in each pair, negative if a key stands after a
        query.
      ahead: least key position minus query position in each pair.
      q_blocks, k_blocks: how many blocks there are.
      key_count: most keys in each block that a query can see.
      first_query: least query position in each query block.
    """

    behind: Integer[Array, "#batch q_blocks k_blocks"]
    ahead: Integer[Array, "#batch q_blocks k_blocks"]
    q_blocks: int
    k_blocks: int
    key_count: Integer[Array | np.ndarray, "#batch #heads #q_blocks #k_blocks"]
    first_query: Integer[Array | np.ndarray, "#batch q_blocks"]


def per_head(axis: int = 0) -> Any:
    """Declares a `Bias` field with heads along the dimension `axis`."""
    return flax.struct.field(metadata={"axes": {"heads": axis}})


def per_query() -> Any:
    """Declares a `Bias` field with data for each query and head, `[batch, q, heads, ...]`."""
    return flax.struct.field(metadata={"axes": {"batch": 0, "queries": 1, "heads": 2}})


def per_key() -> Any:
    """Declares a `Bias` field with data for each key and head, `[batch, k, heads, ...]`."""
    return flax.struct.field(metadata={"axes": {"batch": 0, "keys": 1, "heads": 2}})


def shared() -> Any:
    """Declares a `Bias` field that all tiles share: a float array, or another bias, which cuts
    itself.
    """
    return flax.struct.field()


def static(**default: Any) -> Any:
    """Declares a `Bias` field that is no array, so it is known when attention is traced."""
    return flax.struct.field(pytree_node=False, **default)


# The logit of a hidden key. It is finite, so that 0 / 0 appears nowhere, not even in the gradient
# of a query that sees no key.
MASKED = -1e30
UNDERFLOW = 104.0  # exp(-104) is below half of the smallest float32 above zero


class Bias(flax.struct.PyTreeNode):
    """A term in the scaled logits, computed for any tile.

    A subclass defines `__call__` and declares its fields as `per_head`, `per_query`, `per_key`,
    `shared` or `static`. It is a pytree without a decorator. For each tile attention cuts the fields
    along their axes and calls the cut bias with the tile's positions. Gradients reach all arrays.

    Attributes:
      bounded: `upper_bound` exists, so attention may skip keys out of reach.
      slopes: each head's m, `[heads]`, if the bias is -m (i - j), or -m |i - j| if `symmetric`.
      symmetric: the bias depends on |i - j| in place of i - j.
      metric: the distance that slopes multiply, if it is not i - j (`alibi.positions.metric.Metric`).
      query_term, key_term: `[batch, q, heads]` and `[batch, k, heads]`, if the bias is their sum.
        Attention may add `key_term` alone, since softmax without a sink ignores a term that all keys
        share.
      diagonals: `[heads, q + k - 1]` if the bias depends on i - j alone. Query number i and key
        number j read index k - 1 + i - j.
      level_from: the distance i - j from which on the bias is one parameter of each head, or None.
      adds_values: `of_values` exists and adds to the result of each query.
      reads_rows: `of_rows` exists, and attention calls it in place of `__call__`, with the logits of
        all keys.
      gives_weights: `of_rows` returns weights, after which no softmax comes.
      carried: how many numbers each query carries from tile to tile, from right to left, if `of_tile`
        exists and makes rows from tiles. 0 means whole rows.
      mixes_heads: `of_rows` needs the logits of all heads together.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> class Constant(Bias):
      ...     numbers: jax.Array = per_head()
      ...     def __call__(self, query_positions, key_positions):
      ...         ones = jnp.ones((query_positions.size, key_positions.size))
      ...         return jnp.multiply.outer(self.numbers, ones)
      >>> bias = Constant(jnp.asarray([0.5, 2.0]))
      >>> bias.cut(Part(heads=(1, 1)))(jnp.arange(2), jnp.arange(2)).tolist()
      [[[2.0, 2.0], [2.0, 2.0]]]
    """

    # Without annotations, which would make them dataclass fields.
    bounded = cast(Any, False)
    adds_values = cast(Any, False)
    reads_rows = cast(Any, False)
    gives_weights = cast(Any, False)
    carried = cast(Any, 0)
    mixes_heads = cast(Any, False)
    slopes = cast(Any, None)
    symmetric = cast(Any, False)
    metric = cast(Any, None)
    query_term = cast(Any, None)
    key_term = cast(Any, None)
    diagonals = cast(Any, None)
    level_from = cast(Any, None)

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        """Returns the bias for each query and key, float32, added to logits after their scaling by
        1/sqrt(head_dim).

        The positions belong to the queries and keys that the bias has been cut to.
        """
        raise ValueError(f"{type(self).__name__} needs __call__(query_positions, key_positions)")

    def upper_bound(self, blocks: Blocks) -> BlockBounds:
        """Returns an upper bound for the bias in each pair of blocks, without keys that the causal
        mask hides.
        """
        raise ValueError(f"{type(self).__name__} is bounded and needs upper_bound(blocks)")

    def log_sum_bound(self, blocks: Blocks) -> BlockBounds:
        """Returns a bound for log(sum(exp(bias))) over each key block, for any query in the query
        block.

        No two keys have the same position. The default counts each key with the `upper_bound`.
        """
        return self.upper_bound(blocks) + jnp.log(jnp.asarray(blocks.key_count, jnp.float32))

    def of_values(
        self, weights: Weights, query_positions: QueryPositions, key_positions: KeyPositions
    ) -> Float[Array, "*batch heads q value_dim"]:
        """Returns what to add to each query's result: the sum over keys of weight times a vector for
        the pair.

        It is linear in the weights, float32. Attention calls it if `adds_values`.
        """
        raise ValueError(f"{type(self).__name__} adds values and needs of_values(weights, ...)")

    def of_rows(
        self,
        logits: Tile,
        visible: Visible,
        query_positions: QueryPositions,
        key_positions: KeyPositions,
    ) -> Tile:
        """Returns new logits from those of whole rows, or each key's weight if `gives_weights`, float32.

        Attention gives hidden keys no weight, whatever is returned for them. Weights are at least 0, and
        a query's sum is at most 1. With `carried` the default calls `of_tile`.

        Args:
          logits: scaled and in float32. That of a hidden key is `MASKED`, so exponentials, softplus
            and sigmoids of it are 0. All keys are there, and those that a query sees stand in the
            order of their positions.
          visible: True where the causal mask, window, segments, padding and masks show a query a
            key.
          query_positions, key_positions: as in `__call__`.
        """
        if self.carried:
            start = jnp.zeros((*logits.shape[:-1], self.carried), jnp.float32)
            return self.of_tile(logits, visible, query_positions, key_positions, start)[0]
        raise ValueError(
            f"{type(self).__name__} reads rows and needs of_rows(logits, visible, query_positions, key_positions)"
        )

    def of_tile(
        self,
        logits: Tile,
        visible: Visible,
        query_positions: QueryPositions,
        key_positions: KeyPositions,
        carry: Float[Array, "*batch heads q carried"],
    ) -> tuple[Tile, Float[Array, "*batch heads q carried"]]:
        """Returns what `of_rows` does for a tile of keys, and the carry for the tile on its left.

        Args:
          carry: what came from the tile on the right, or zeros for the last keys.
        """
        raise ValueError(
            f"{type(self).__name__} declares a carry and needs of_tile(logits, visible, query_positions, "
            "key_positions, carry)"
        )

    def finished(self, carry: Float[Array, "*batch heads q carried"]) -> Bool[Array, ""]:
        """Returns whether all queries give keys further left no weight, so that their tiles are left out.
        Defaults to False.
        """
        return jnp.zeros((), bool)

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> "Bias":
        """Returns the same bias for a call with these positions, with work that all tiles share done
        once. The default tabulates the biases among its fields.
        """
        sides = query_positions, key_positions
        return self._with_fields(lambda value, field: value, lambda bias: bias.tabulated(*sides))

    def up_to(self, farthest: int) -> "Bias":
        """Returns the same bias for positions known only at run time, at most `farthest` apart. It may
        compute each distance once.
        """
        return self

    def spans(self, field: dataclasses.Field, part: Part) -> dict[int, tuple[Any, int]]:
        """Returns the range of `part` for each dimension that it cuts in a field."""
        return {
            axis: span
            for of, axis in field.metadata.get("axes", {}).items()
            if (span := getattr(part, of)) is not None
        }

    def cut(self, part: Part) -> "Bias":
        """Returns the bias for `part` of the call."""
        return self._with_fields(
            lambda value, field: _cut(value, self.spans(field, part)), lambda bias: bias.cut(part)
        )

    def with_added(self, gradient: "Bias", part: Part) -> "Bias":
        """Returns this gradient plus the gradient for a part that `cut` returned, in its place."""
        changed: dict[str, Any] = {}
        for field, value in self._arrays():
            spans, of_part = self.spans(field, part), getattr(gradient, field.name)
            if isinstance(value, Bias):
                changed[field.name] = value.with_added(of_part, part)
            else:
                whole = _cut(value, spans) + of_part
                changed[field.name] = (
                    jax.lax.dynamic_update_slice(value, whole, _starts(value, spans))
                    if spans
                    else whole
                )
        return self.replace(**changed)

    def folded(self, batch_dims: int) -> "Bias":
        """Returns the bias with the first `batch_dims` dimensions merged, in fields with a batch."""

        def fold(value: Array, field: dataclasses.Field) -> Array:
            return (
                value.reshape(-1, *value.shape[batch_dims:])
                if "batch" in field.metadata.get("axes", {})
                else value
            )

        return self._with_fields(fold, lambda bias: bias.folded(batch_dims))

    def padded(self, queries: int, keys: int) -> "Bias":
        """Returns the bias for so many more queries and keys, with any values, to fill up blocks."""

        def pad(value: Array, field: dataclasses.Field) -> Array:
            axes = field.metadata.get("axes", {})
            more = {
                axes[of]: count
                for of, count in (("queries", queries), ("keys", keys))
                if of in axes
            }
            widths = [(0, more.get(axis, 0)) for axis in range(value.ndim)]
            return jnp.pad(value, widths, mode="edge") if any(more.values()) else value

        return self._with_fields(pad, lambda bias: bias.padded(queries, keys))

    def with_reversed_heads(self) -> "Bias":
        """Returns the bias with its heads in the opposite order."""

        def reverse(value: Array, field: dataclasses.Field) -> Array:
            axes = field.metadata.get("axes", {})
            return jnp.flip(value, axes["heads"]) if "heads" in axes else value

        return self._with_fields(reverse, lambda bias: bias.with_reversed_heads())

    def layouts(self, axes: Mapping[str, Any]) -> list[PartitionSpec]:
        """Returns the layout of each leaf. `axes` maps "batch" and "heads" to mesh axes."""
        specs: list[PartitionSpec] = []
        for field, value in self._arrays():
            if isinstance(value, Bias):
                specs += value.layouts(axes)
                continue
            along = {axis: axes.get(of) for of, axis in field.metadata.get("axes", {}).items()}
            specs += [
                PartitionSpec(*(along.get(axis) for axis in range(leaf.ndim)))
                for leaf in jax.tree.leaves(value)
            ]
        return specs

    def _arrays(self) -> list[tuple[dataclasses.Field, Any]]:
        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [
            (field, value)
            for field, value in fields
            if value is not None and field.metadata.get("pytree_node", True)
        ]

    def _with_fields(self, of_array: Any, of_bias: Any) -> "Bias":
        return self.replace(
            **{
                field.name: of_bias(x) if isinstance(x, Bias) else of_array(x, field)
                for field, x in self._arrays()
            }
        )


def misfits(
    bias: Bias, sizes: Mapping[str, int]
) -> Iterator[tuple[Bias, dataclasses.Field, tuple[int, ...] | None, list[str]]]:
    """Yields each field that is no array, or has another size along a declared axis: its bias (`bias` or one
    of its fields), the field, its shape (None if it has none) and the sizes that it needs, in words.

    Args:
      sizes: maps the axes "batch", "heads", "queries" and "keys" to sizes. Other axes are not compared.
    """
    for field in dataclasses.fields(bias):
        value, axes = getattr(bias, field.name), field.metadata.get("axes", {})
        if value is None or not field.metadata.get("pytree_node", True):
            continue
        if isinstance(value, Bias):
            yield from misfits(value, sizes)
            continue
        shape = getattr(value, "shape", None)
        needed = [
            f"{sizes[of]} {of} along axis {axis}"
            for of, axis in axes.items()
            if of in sizes and (shape is None or axis >= len(shape) or shape[axis] != sizes[of])
        ]
        if needed or not all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value)):
            yield bias, field, shape, needed


def like(tile: Array, logits: Array) -> Array:
    """Returns a tile with as many dimensions as the logits, so that both broadcast."""
    return tile.reshape((1,) * (logits.ndim - tile.ndim) + tile.shape)


def _starts(value: Array, spans: dict[int, tuple[Any, int]]) -> list[Any]:
    starts = [spans[axis][0] if axis in spans else 0 for axis in range(value.ndim)]
    # of one type, also with 64 bits
    return [np.int32(x) if isinstance(x, int) else x.astype(np.int32) for x in starts]


def _cut(value: Array, spans: dict[int, tuple[Any, int]]) -> Array:
    if not spans:
        return value
    sizes = [spans[axis][1] if axis in spans else size for axis, size in enumerate(value.shape)]
    return jax.lax.dynamic_slice(value, _starts(value, spans), sizes)
