"""The contract of a position method, and of the bias that it adds to the logits of attention.

The methods that the paper compares differ only in where position enters a transformer. A
method is a frozen dataclass without arrays. Its fields are its options, and each of its functions
is one place where position can enter: `place`, `embed`, `queries`, `keys`, `bias`, and for
biases that depend on content `keep` and `content_bias`. A method overrides those that it uses.
Its parameters are made by `init`, for those that all layers share, and by `init_layer`, for
those of each layer; the other functions get both in one mapping, `params`. All are plain
functions of arrays, so that a method serves Linen, NNX and bare JAX alike.

Positions are always given, never counted inside, so that a key-value cache, padding and
packed documents work for every method.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Integer, PRNGKeyArray, PyTree

Params = Mapping[str, Any]
Positions = Integer[Array, "*#batch length"]
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
    """

    # Without annotations, which would make them fields of dataclasses.
    bounded = False
    slopes = cast(Any, None)
    symmetric = False

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*#batch heads q k"]:
        """The bias of each query and key, float32; it is added to the logits after their scaling by 1/sqrt(head_dim).

        The positions are those of the queries and keys to which the bias has been cut.
        """
        raise NotImplementedError(f"{type(self).__name__} needs __call__(query_positions, key_positions)")

    def upper_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        """For each pair of blocks a number that no bias in it exceeds; keys that the causal mask hides don't count."""
        raise NotImplementedError(f"{type(self).__name__} is bounded and needs upper_bound(blocks)")

    def log_sum_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        """For each pair of blocks a bound of log(sum of exp(bias) over the block's keys), for any one query.

        No two keys have the same position. By default each of them counts with the `upper_bound`.
        """
        return self.upper_bound(blocks) + jnp.log(jnp.asarray(blocks.key_count, jnp.float32))

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> "Bias":
        """The same bias for a call with these positions, after computing once what all tiles would compute again."""
        del query_positions, key_positions
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
            more = {axes[of]: count for of, count in (("queries", queries), ("keys", keys)) if of in axes and count}
            return _edge_padded(value, more)

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


class DistanceBias(Bias):
    """A bias that depends on the distance alone: a subclass gives `at`, and nothing else is needed.

    However expensive `at` is, attention evaluates it once for each distance, not for each
    pair of query and key. If the bias never grows with distance, `bounded = True` lets attention
    skip keys that are too far to matter; if it grows in places, `envelope` must be given too.
    """

    def at(self, distance: Integer[Array | np.ndarray, "*shape"]) -> Float[Array, "heads ..."]:
        """The bias of a key at each distance, which is in tokens and as `counted` gives it; float32."""
        raise NotImplementedError(f"{type(self).__name__} needs at(distance)")

    def counted(self, distance: Any) -> Any:
        """The distance as `at` takes it, from query position minus key position, a NumPy or JAX array.

        By default it is |i - j| if `symmetric`, else 0 for keys after the query. A bias that tells
        keys before and after a query apart returns its argument.
        """
        return abs(distance) if self.symmetric else distance * (distance > 0)

    def envelope(self, distance: Integer[Array, "*shape"]) -> Float[Array, "heads ..."]:
        """The largest bias of all keys at each distance and beyond; it is asked for if `bounded`."""
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
        nearest = jnp.maximum(blocks.behind, blocks.ahead) if self.symmetric else blocks.behind
        return jnp.moveaxis(self.envelope(jnp.maximum(nearest, 0)), 0, 1)

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> Bias:
        q_length, k_length = query_positions.shape[-1], key_positions.shape[-1]
        lowest, highest = 1 - max(q_length, k_length), max(q_length, k_length) - 1
        known = [isinstance(side, np.ndarray) and side.ndim == 1 for side in (query_positions, key_positions)]
        consecutive = all(known) and all((np.diff(side) == 1).all() for side in (query_positions, key_positions))
        if consecutive:
            lowest = int(query_positions[0]) - int(key_positions[-1])
            highest = int(query_positions[-1]) - int(key_positions[0])
        elif q_length * k_length <= 2 * (highest - lowest):
            return self
        distinct, places = np.unique(self.counted(np.arange(lowest, highest + 1)), return_inverse=True)
        values = self.at(jnp.asarray(distinct, jnp.int32)).astype(jnp.float32)[:, places]
        return DistanceTable(values, self, lowest, int(query_positions[0] - key_positions[0]) if consecutive else None)


class DistanceTable(Bias):
    """A `DistanceBias` as a table with a value for each distance, from which each tile takes its own.

    Attributes:
      values: the bias at the distances `lowest`, `lowest` + 1, ..., float32.
      function: the bias itself, for distances that the table lacks.
      lowest: the first distance in the table.
      first_distance: position of the first query minus that of the first key, if queries and keys both
        stand at consecutive positions; a tile's rows are then ranges of the table. Else None, and
        each value is looked up by the positions of its query and key.
    """

    values: Float[Array, "heads distances"] = per_head()
    function: DistanceBias = shared()
    lowest: int = static()
    first_distance: int | None = static()

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.function.bounded

    def upper_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        return self.function.upper_bound(blocks)

    def log_sum_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        return self.function.log_sum_bound(blocks)

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
        places = rows - columns - self.lowest
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
    """Raises ValueError if positions are not integers."""
    dtype = jnp.result_type(positions)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"{name}_positions have dtype {dtype}; they must be integers, "
            "since floating-point positions make neighbouring keys equal at long lengths"
        )


def _starts(value: Array, spans: dict[int, tuple[Any, int]]) -> list[Any]:
    return [spans[axis][0] if axis in spans else 0 for axis in range(value.ndim)]


def _cut(value: Array, spans: dict[int, tuple[Any, int]]) -> Array:
    if not spans:
        return value
    sizes = [spans[axis][1] if axis in spans else size for axis, size in enumerate(value.shape)]
    return jax.lax.dynamic_slice(value, _starts(value, spans), sizes)


def _edge_padded(value: Array, more: dict[int, int]) -> Array:
    if not more:
        return value
    return jnp.pad(value, [(0, more.get(axis, 0)) for axis in range(value.ndim)], mode="edge")


@dataclasses.dataclass(frozen=True)
class PositionMethod:
    """A position method that adds nothing; subclasses override the functions that they use.

    Attributes:
      num_heads: attention heads.
      head_dim: features of a head.
      width: features of the residual stream.
      train_length: tokens of a training sequence.
      causal: whether a token sees only those before it; else it sees both sides.
      length: tokens of the sequences that are computed: an evaluation's windows, or all tokens
        that generation will come to. 0 stands for the training length; see `at_length`.
    """

    # Whether adding one number to the positions of all tokens leaves the result as it is.
    shift_invariant = False

    num_heads: int
    head_dim: int
    width: int
    train_length: int
    causal: bool = dataclasses.field(default=True, kw_only=True)
    length: int = dataclasses.field(default=0, kw_only=True)

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The fields that the method adds, with their defaults."""
        common = {field.name for field in dataclasses.fields(PositionMethod)}
        return {field.name: field.default for field in dataclasses.fields(cls) if field.name not in common}

    def at_length(self, length: int) -> "PositionMethod":
        """The method for sequences of `length` tokens; what depends on it reads `self.length` or `self.scale`."""
        return self if length == (self.length or self.train_length) else dataclasses.replace(self, length=length)

    @property
    def scale(self) -> float:
        """How many times as long as the training sequences the computed ones are."""
        return (self.length or self.train_length) / self.train_length

    @property
    def learns(self) -> bool:
        """Whether `init` makes parameters."""
        return bool(jax.tree.leaves(jax.eval_shape(self.init, jax.eval_shape(lambda: jax.random.key(0)))))

    @property
    def learns_by_layer(self) -> bool:
        """Whether `init_layer` makes parameters."""
        return bool(jax.tree.leaves(jax.eval_shape(self.init_layer, jax.eval_shape(lambda: jax.random.key(0)))))

    @property
    def max_length(self) -> int | None:
        """The longest sequence, in tokens, that the method is defined for; None: any."""
        return None

    def check_length(self, length: int) -> None:
        """Raises ValueError if the method is not defined for `length` tokens."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"position method {type(self).__name__} has {self.max_length} positions and got a sequence of "
                f"{length} tokens; evaluate at {self.max_length} or less, or train with a longer length"
            )

    def init(self, key: PRNGKeyArray) -> Params:
        """Initial parameters that all layers share, float32."""
        del key
        return {}

    def init_layer(self, key: PRNGKeyArray) -> Params:
        """Initial parameters of one layer, float32; by other names than those of `init`."""
        del key
        return {}

    def place(self, positions: KnownPositions, batch: int, key: PRNGKeyArray | None) -> KnownPositions:
        """The positions that the functions below get, for tokens of `batch` sequences at `positions`.

        By default they are the same. Randomised positions draw them.

        Args:
          key: in training a random key, else None.
        """
        del batch, key
        return positions

    def embed(
        self, params: Params, x: Float[Array, "*batch length width"], positions: Positions
    ) -> Float[Array, "*batch length width"]:
        """The token embeddings `x` with position added to them."""
        del params, positions
        return x

    def queries(
        self, params: Params, query: Float[Array, "*batch q heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch q heads head_dim"]:
        """The queries after position has entered them, rotated or scaled for example; in the dtype that they had."""
        del params, positions
        return query

    def keys(
        self, params: Params, key: Float[Array, "*batch k heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch k heads head_dim"]:
        """The keys after position has entered them; a cache holds these, so that no key is rotated twice."""
        del params, positions
        return key

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length heads head_dim"],
        before: PyTree[Float[Array, "batch heads ..."]] | None,
    ) -> PyTree[Float[Array, "batch length heads ..."]]:
        """What `content_bias` will need of each token besides its position.

        It is computed once, when a token is read, and a cache keeps it beside the token's key.

        Args:
          x: the attention layer's input.
          key: the keys as the layer projects them, before `keys`.
          before: what was kept of the token before the first of `x`; if there is none, None, or zeros from an empty
            cache.
        """
        del params, x, key, before
        return None

    def bias(self, params: Params) -> Bias | None:
        """The bias of the logits, or None, where it depends on positions and parameters alone."""
        del params
        return None

    def content_bias(
        self,
        params: Params,
        query: Float[Array, "batch q heads head_dim"],
        of_queries: PyTree[Float[Array, "batch q heads ..."]],
        of_keys: PyTree[Float[Array, "batch k heads ..."]],
    ) -> Bias | None:
        """The bias of the logits, where it depends on the content of tokens; by default it is that of `bias`.

        Args:
          query: what `queries` returned.
          of_queries, of_keys: what `keep` returned for the tokens of the queries, and for those of all keys.
        """
        del query, of_queries, of_keys
        return self.bias(params)
