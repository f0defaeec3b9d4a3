"""The contract of a bias: what a position method adds to the logits of attention, and what may be known of it.

Attention cuts a bias as it cuts heads, queries and keys, by what its fields declare, and asks it
for its properties: whether it is bounded, whether it is linear in distance. It never asks for
its class.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Integer

# Attention takes either kind; NumPy's are known when it is traced, so that it can skip what they hide.
KnownPositions = Integer[Array | np.ndarray, "*#batch _"]
# A part of a dimension: where it begins, which may be traced, and its size. None is the whole dimension.
Span = tuple[Any, int] | None


class Part(NamedTuple):
    """A part of a call of attention, such as one tile: a range of its batch entries, heads, queries and keys."""

    batch: Span = None
    heads: Span = None
    queries: Span = None
    keys: Span = None


class Blocks(NamedTuple):
    """All blocks of queries against all blocks of keys, for which a bias gives bounds.

    Attributes:
      behind: for each pair of blocks the least of query position minus key position; it is negative
        where some key stands after some query.
      ahead: for each pair of blocks the least of key position minus query position.
      q_blocks, k_blocks: how many blocks there are.
      key_count: how many keys of each block a query can see at most.
    """

    behind: Integer[Array, "#batch q_blocks k_blocks"]
    ahead: Integer[Array, "#batch q_blocks k_blocks"]
    q_blocks: int
    k_blocks: int
    key_count: Integer[Array | np.ndarray, "#batch #heads #q_blocks #k_blocks"]

    def largest_of_queries(self, x: Float[Array, "batch q heads"]) -> Float[Array, "batch heads q_blocks 1"]:
        """The largest `x` in each block of queries, where `x` is a number for each query and head."""
        blocks = x.reshape(x.shape[0], self.q_blocks, -1, x.shape[2]).max(axis=2)
        return blocks.swapaxes(1, 2)[..., None]

    def least_of_keys(self, x: Float[Array, "batch k heads"]) -> Float[Array, "batch heads 1 k_blocks"]:
        """The least `x` in each block of keys, where `x` is a number for each key and head."""
        blocks = x.reshape(x.shape[0], self.k_blocks, -1, x.shape[2]).min(axis=2)
        return blocks.swapaxes(1, 2)[..., None, :]


def per_head(axis: int = 0) -> Any:
    """Declares a field of a `Bias` whose dimension `axis` is that of the heads."""
    return flax.struct.field(metadata={"axes": {"heads": axis}})


def per_query() -> Any:
    """Declares a field of a `Bias` of shape `[batch, q, heads, ...]`: something for each query and head."""
    return flax.struct.field(metadata={"axes": {"batch": 0, "queries": 1, "heads": 2}})


def per_key() -> Any:
    """Declares a field of a `Bias` of shape `[batch, k, heads, ...]`: something for each key and head."""
    return flax.struct.field(metadata={"axes": {"batch": 0, "keys": 1, "heads": 2}})


def shared() -> Any:
    """Declares a field of a `Bias` that tiles share whole: a float array, or another bias, which is cut by itself."""
    return flax.struct.field()


def static(**default: Any) -> Any:
    """Declares a field of a `Bias` that is no array, and so is known when attention is traced."""
    return flax.struct.field(pytree_node=False, **default)


class MissingFunctionError(NotImplementedError):
    """A bias lacks a function that it must have."""


class Bias(flax.struct.PyTreeNode):
    """What is added to the scaled logits of attention; it can be asked for any tile of them.

    A subclass gives `__call__` and declares its fields by `per_head`, `per_query`, `per_key`,
    `shared` or `static`. It is a pytree without a decorator. For each tile attention cuts the
    fields as it cuts heads, queries and keys, and calls the cut bias with the tile's positions;
    gradients reach all arrays. Attention asks for the properties below, never for a class.

    Attributes:
      bounded: whether `upper_bound` is given, by which attention skips keys out of reach.
      slopes: where the bias is -m (i - j), or -m |i - j| if `symmetric`, m of each head, `[heads]`; else None.
      symmetric: whether the bias depends on |i - j| in place of i - j.
      key_term: where the bias is a number of the query plus one of the key, that of each key, `[batch, k, heads]`;
        else None. Attention may add it alone, since softmax ignores what all keys of a query have in common.
      adds_values: whether `of_values` is given, by which each query sees other values than the layer's.
    """

    # Without annotations, which would make them fields of dataclasses.
    bounded = False
    adds_values = False
    slopes = cast(Any, None)
    symmetric = False
    key_term = cast(Any, None)

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*#batch heads q k"]:
        """The bias of each query and key, float32; it is added to the logits after their scaling by 1/sqrt(head_dim).

        The positions are those of the queries and keys to which the bias has been cut.
        """
        raise MissingFunctionError(f"{type(self).__name__} needs __call__(query_positions, key_positions)")

    def upper_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        """For each pair of blocks a number that no bias in it exceeds; keys that the causal mask hides don't count."""
        raise MissingFunctionError(f"{type(self).__name__} is bounded and needs upper_bound(blocks)")

    def log_sum_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        """For each pair of blocks a bound of log(sum of exp(bias) over the block's keys), for any one query.

        No two keys have the same position. By default each of them counts with the `upper_bound`.
        """
        return self.upper_bound(blocks) + jnp.log(jnp.asarray(blocks.key_count, jnp.float32))

    def of_values(
        self,
        weights: Float[Array, "*batch heads q k"],
        query_positions: Integer[Array, "*#batch q"],
        key_positions: Integer[Array, "*#batch k"],
    ) -> Float[Array, "*batch heads q value_dim"]:
        """What is added to each query's result: the sum over keys of its weight times a vector of query and key.

        It is linear in the weights, float32, and asked for if `adds_values`; the positions are as in `__call__`.
        """
        raise MissingFunctionError(f"{type(self).__name__} adds values and needs of_values(weights, ...)")

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> "Bias":
        """The same bias for a call with these positions, after computing once what all tiles would compute again.

        By default that is what the biases among its fields compute once.
        """
        sides = query_positions, key_positions
        return self._with_fields(lambda value, field: value, lambda bias: bias.tabulated(*sides))

    def up_to(self, farthest: int) -> "Bias":
        """The same bias, of which distances to `farthest` may be computed once, for positions known only at run time.

        By default itself.
        """
        del farthest
        return self

    def spans(self, field: dataclasses.Field, part: Part) -> dict[int, tuple[Any, int]]:
        """For each dimension of a field that is cut, the range of it that belongs to `part` of the call."""
        axes = field.metadata.get("axes", {})
        spans = {axis: getattr(part, of) for of, axis in axes.items()}
        return {axis: span for axis, span in spans.items() if span is not None}

    def cut(self, part: Part) -> "Bias":
        """The bias of `part` of the call."""
        return self._with_fields(lambda value, field: _cut(value, self.spans(field, part)), lambda bias: bias.cut(part))

    def with_added(self, gradient: "Bias", part: Part) -> "Bias":
        """This gradient of a bias plus the gradient of its part that `cut` gave, added where the part lies."""
        changed: dict[str, Any] = {}
        for field, value in self._arrays():
            spans, of_part = self.spans(field, part), getattr(gradient, field.name)
            if isinstance(value, Bias):
                changed[field.name] = value.with_added(of_part, part)
            else:
                whole = _cut(value, spans) + of_part
                changed[field.name] = (
                    jax.lax.dynamic_update_slice(value, whole, _starts(value, spans)) if spans else whole
                )
        return self.replace(**changed)

    def folded(self, batch_dims: int) -> "Bias":
        """The bias with its first `batch_dims` dimensions taken together, in fields for each query or key."""

        def fold(value: Array, field: dataclasses.Field) -> Array:
            return value.reshape(-1, *value.shape[batch_dims:]) if "batch" in field.metadata.get("axes", {}) else value

        return self._with_fields(fold, lambda bias: bias.folded(batch_dims))

    def padded(self, queries: int, keys: int) -> "Bias":
        """The bias for so many more queries and keys, which fill up the last blocks; theirs may be any finite value."""

        def pad(value: Array, field: dataclasses.Field) -> Array:
            axes = field.metadata.get("axes", {})
            more = {axes[of]: count for of, count in (("queries", queries), ("keys", keys)) if of in axes}
            widths = [(0, more.get(axis, 0)) for axis in range(value.ndim)]
            return jnp.pad(value, widths, mode="edge") if any(more.values()) else value

        return self._with_fields(pad, lambda bias: bias.padded(queries, keys))

    def layouts(self, axes: Mapping[str, Any]) -> list[PartitionSpec]:
        """How each leaf is split over devices, where `axes` names the mesh axes that split "batch" and "heads"."""
        specs: list[PartitionSpec] = []
        for field, value in self._arrays():
            if isinstance(value, Bias):
                specs += value.layouts(axes)
                continue
            along = {axis: axes.get(of) for of, axis in field.metadata.get("axes", {}).items()}
            specs += [PartitionSpec(*(along.get(axis) for axis in range(leaf.ndim))) for leaf in jax.tree.leaves(value)]
        return specs

    def _arrays(self) -> list[tuple[dataclasses.Field, Any]]:
        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [(field, value) for field, value in fields if field.metadata.get("pytree_node", True)]

    def _with_fields(self, of_array: Any, of_bias: Any) -> "Bias":
        arrays = self._arrays()
        return self.replace(
            **{field.name: of_bias(x) if isinstance(x, Bias) else of_array(x, field) for field, x in arrays}
        )


def _starts(value: Array, spans: dict[int, tuple[Any, int]]) -> list[Any]:
    return [spans[axis][0] if axis in spans else 0 for axis in range(value.ndim)]


def _cut(value: Array, spans: dict[int, tuple[Any, int]]) -> Array:
    if not spans:
        return value
    sizes = [spans[axis][1] if axis in spans else size for axis, size in enumerate(value.shape)]
    return jax.lax.dynamic_slice(value, _starts(value, spans), sizes)
