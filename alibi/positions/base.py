"""The contract of a position method, and of the bias that it adds to the logits of attention.

All that the paper compares differs only in where position enters a transformer. A method
is a frozen dataclass without arrays: its fields are its options, and each of its functions
is one of these places. What it learns it makes in `init` (shared by the layers) and
`init_layer` (for each layer), and gets back as `params`, both in one mapping. The functions
are plain functions of arrays, so that a method serves Linen, NNX and bare JAX alike.

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
# What attention takes: NumPy's are known when it is traced, so that it can skip what they hide.
KnownPositions = Integer[Array | np.ndarray, "*#batch _"]
# Where a part of a dimension begins, which may be traced, and its size; None: the whole dimension.
Span = tuple[Any, int] | None


class Part(NamedTuple):
    """Which part of a call of attention is computed: of its batch entries, heads, queries and keys."""

    batch: Span = None
    heads: Span = None
    queries: Span = None
    keys: Span = None


class Blocks(NamedTuple):
    """Blocks of queries against blocks of keys, as a bias is asked for the most that it adds in each pair of them.

    Attributes:
      behind: the least distance, query minus key, in each pair of blocks; negative where a
        key stands after a query.
      ahead: the least distance, key minus query.
      q_blocks, k_blocks: how many there are.
      key_count: the keys of each block that a query may see.
    """

    behind: Integer[Array, "#batch q_blocks k_blocks"]
    ahead: Integer[Array, "#batch q_blocks k_blocks"]
    q_blocks: int
    k_blocks: int
    key_count: Integer[Array | np.ndarray, "#batch #heads #q_blocks #k_blocks"]

    def largest_of_queries(self, x: Float[Array, "batch q heads"]) -> Float[Array, "batch heads q_blocks 1"]:
        """The largest value in each block of queries, of one that is given for each query and head."""
        blocks = x.reshape(x.shape[0], self.q_blocks, -1, x.shape[2]).max(axis=2)
        return blocks.swapaxes(1, 2)[..., None]

    def least_of_keys(self, x: Float[Array, "batch k heads"]) -> Float[Array, "batch heads 1 k_blocks"]:
        """The least value in each block of keys, of one that is given for each key and head."""
        blocks = x.reshape(x.shape[0], self.k_blocks, -1, x.shape[2]).min(axis=2)
        return blocks.swapaxes(1, 2)[..., None, :]


def per_head(axis: int = 0) -> Any:
    """A field of a `Bias` with an entry for each head, along `axis`."""
    return flax.struct.field(metadata={"axes": {"heads": axis}})


def per_query() -> Any:
    """A field of a `Bias` of shape `[*batch, q, heads]`, or with more dimensions for each query and head behind."""
    return flax.struct.field(metadata={"axes": {"batch": 0, "queries": 1, "heads": 2}})


def per_key() -> Any:
    """A field of a `Bias` of shape `[*batch, k, heads]`, or with more dimensions for each key and head behind."""
    return flax.struct.field(metadata={"axes": {"batch": 0, "keys": 1, "heads": 2}})


def shared() -> Any:
    """A field of a `Bias` that all parts share: a float array of any shape, or another bias, which is cut by itself."""
    return flax.struct.field()


def static(**default: Any) -> Any:
    """A field of a `Bias` that is no array and known when it is traced."""
    return flax.struct.field(pytree_node=False, **default)


class Bias(flax.struct.PyTreeNode):
    """What is added to the scaled logits, for any part of them; subclasses are pytrees by themselves.

    Its fields are float arrays, declared by `per_head`, `per_query` and `per_key`, or of other
    shapes that all parts share; other biases; and what is `static`. Attention cuts them as it
    cuts heads, queries and keys, and gradients reach all of them. What attention asks of a
    bias are the properties below, never its class.

    Attributes:
      bounded: whether `upper_bound` is given, so that keys out of reach can be skipped.
      slopes: m of each head `[heads]`, where the bias is linear: -m (i - j), or -m |i - j| if `symmetric`; else None.
      symmetric: whether the bias counts |i - j| in place of i - j.
    """

    # Without annotations, which would make them fields of dataclasses.
    bounded = False
    slopes = cast(Any, None)
    symmetric = False

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*#batch heads q k"]:
        """What is added to the logits after their scaling by 1/sqrt(head_dim), float32.

        The positions are those of all queries and keys that the bias has been cut to.
        """
        raise NotImplementedError(f"{type(self).__name__} needs __call__(query_positions, key_positions)")

    def upper_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        """No bias of a pair of blocks is greater than this, as far as the causal mask shows its keys."""
        raise NotImplementedError(f"{type(self).__name__} is bounded and needs upper_bound(blocks)")

    def log_sum_bound(self, blocks: Blocks) -> Float[Array, "#batch heads q_blocks k_blocks"]:
        """For any one query the logarithm of the sum of exp(bias) over the keys of a block is no greater than this.

        The positions of the keys differ. By default each key counts as the nearest does.
        """
        return self.upper_bound(blocks) + jnp.log(jnp.asarray(blocks.key_count, jnp.float32))

    def tabulated(self, query_positions: KnownPositions, key_positions: KnownPositions) -> "Bias":
        """The same bias for a call with these positions, with what its tiles share computed once."""
        del query_positions, key_positions
        return self

    def spans(self, field: dataclasses.Field, part: Part) -> dict[int, tuple[Any, int]]:
        """Of one field: where a part of the call lies along each of its dimensions that is cut."""
        axes = field.metadata.get("axes", {})
        spans = {axis: getattr(part, of) for of, axis in axes.items()}
        return {axis: span for axis, span in spans.items() if span is not None}

    def cut(self, part: Part) -> "Bias":
        """The bias of one part of the call."""
        return self._with_fields(lambda value, field: _cut(value, self.spans(field, part)), lambda bias: bias.cut(part))

    def with_added(self, gradient: "Bias", part: Part) -> "Bias":
        """This gradient of a bias, with that of one part, made by `cut`, added in its place."""
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
        """With the first `batch_dims` dimensions of what is given for each query or key taken together."""

        def fold(value: Array, field: dataclasses.Field) -> Array:
            return value.reshape(-1, *value.shape[batch_dims:]) if "batch" in field.metadata.get("axes", {}) else value

        return self._with_fields(fold, lambda bias: bias.folded(batch_dims))

    def padded(self, queries: int, keys: int) -> "Bias":
        """Filled up for as many queries and keys more, whose bias is finite and otherwise doesn't matter."""

        def pad(value: Array, field: dataclasses.Field) -> Array:
            axes = field.metadata.get("axes", {})
            more = {axes[of]: count for of, count in (("queries", queries), ("keys", keys)) if of in axes and count}
            return _edge_padded(value, more)

        return self._with_fields(pad, lambda bias: bias.padded(queries, keys))

    def layouts(self, axes: Mapping[str, Any]) -> list[PartitionSpec]:
        """How its leaves lie on devices whose mesh splits what `axes` names, "batch" or "heads", over these axes."""
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

    However expensive it is, attention evaluates it once a distance. If it never grows with
    the distance, `bounded = True` lets far keys be skipped where nothing of them is left; if it
    grows in places, `envelope` must say how far.
    """

    def at(self, distance: Integer[Array | np.ndarray, "*shape"]) -> Float[Array, "heads ..."]:
        """The bias of a key at this distance, in tokens, as `counted` gives it; float32."""
        raise NotImplementedError(f"{type(self).__name__} needs at(distance)")

    def counted(self, distance: Any) -> Any:
        """The distance, query minus key, as `at` takes it: |i - j| if `symmetric`, else 0 for keys after the query.

        A method that tells the two sides apart gives the distance as it is. Of NumPy arrays it gives those.
        """
        return abs(distance) if self.symmetric else distance * (distance > 0)

    def envelope(self, distance: Integer[Array, "*shape"]) -> Float[Array, "heads ..."]:
        """If `bounded`, no key at this distance or beyond has a greater bias."""
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
        """The bias of each pair of positions, each evaluated by itself."""
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
    """A bias of distance as a table of its values, which each tile takes its own from.

    Attributes:
      values: of the distances from `lowest` on, float32.
      function: that the values are of, for distances beyond them.
      lowest: the first distance.
      first_distance: of the first query from the first key, where queries and keys both stand
        at consecutive positions; None: their positions tell.
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
        """The block that the values, of `queries + keys - 1` distances, have been cut to: each row is a range of them.

        A copy of ranges takes a quarter of the time of a gather of single values, and a sixth in the backward pass.
        """
        descending = self.values[:, ::-1]
        rows = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(descending, start, keys, axis=1), out_axes=1)
        return rows(jnp.arange(queries - 1, -1, -1))


def rows_and_columns(
    of_queries: Integer[Array, "*#batch q"], of_keys: Integer[Array, "*#batch k"]
) -> tuple[Integer[Array, "*#batch q 1"], Integer[Array, "*#batch 1 k"]]:
    """Both as the sides of `[*batch, q, k]` blocks, of one rank; either may lack batch dimensions."""
    rank = max(of_queries.ndim, of_keys.ndim)
    # Signed, since differences of unsigned positions wrap around.
    rows, columns = (
        jnp.asarray(x, jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype) for x in (of_queries, of_keys)
    )
    rows, columns = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (rows, columns))
    return jnp.expand_dims(rows, -1), jnp.expand_dims(columns, -2)


def check_integers(name: str, positions: Array | np.ndarray) -> None:
    """Raises ValueError where positions are no integers."""
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
    """A method that adds nothing; subclasses override what they use.

    Attributes:
      num_heads: attention heads.
      head_dim: features of a head.
      width: features of the residual stream.
      train_length: tokens of a training sequence.
      causal: whether a token sees only those before it; else it sees both sides.
      length: tokens of the sequences at hand, where they are not those of training: of an
        evaluation's windows, or all that generation will come to (see `at_length`).
    """

    # Whether the same tokens at positions that are all greater by one number give the same result.
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
        """The method as it works on sequences of `length` tokens."""
        return self if length == (self.length or self.train_length) else dataclasses.replace(self, length=length)

    @property
    def scale(self) -> float:
        """How many times as long the sequences at hand are as those of training."""
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
        """Where the tokens of `batch` sequences are taken to stand, by which everything below goes.

        By default they stand at the positions that they have.

        Args:
          key: in training, for positions that are drawn; else None.
        """
        del batch, key
        return positions

    def embed(
        self, params: Params, x: Float[Array, "*batch length width"], positions: Positions
    ) -> Float[Array, "*batch length width"]:
        """Token embeddings `x` with position added."""
        del params, positions
        return x

    def queries(
        self, params: Params, query: Float[Array, "*batch q heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch q heads head_dim"]:
        """Queries with position turned into them, or scaled by it; of the dtype that they had."""
        del params, positions
        return query

    def keys(
        self, params: Params, key: Float[Array, "*batch k heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch k heads head_dim"]:
        """Keys with position turned into them; a cache holds what this gives."""
        del params, positions
        return key

    def keep(
        self,
        params: Params,
        x: Float[Array, "batch length width"],
        key: Float[Array, "batch length heads head_dim"],
        before: PyTree[Float[Array, "batch heads ..."]] | None,
    ) -> PyTree[Float[Array, "batch length heads ..."]]:
        """What the bias will need of each token besides its position, from the layer's input and the token's key.

        It is computed once, when the token is read, and a cache keeps it beside the key.

        Args:
          x: the attention layer's input.
          key: as it comes out of its projection.
          before: what was kept of the token before the first one; None, or zeros in an empty cache, if there is none.
        """
        del params, x, key, before
        return None

    def bias(self, params: Params) -> Bias | None:
        """The bias of the logits, or None."""
        del params
        return None

    def content_bias(
        self,
        params: Params,
        query: Float[Array, "batch q heads head_dim"],
        of_queries: PyTree[Float[Array, "batch q heads ..."]],
        of_keys: PyTree[Float[Array, "batch k heads ..."]],
    ) -> Bias | None:
        """The bias of the logits where it depends on the content of tokens; by default that of `bias`.

        Args:
          query: what `queries` gave.
          of_queries, of_keys: what `keep` gave of the tokens of the queries, and of all keys.
        """
        del query, of_queries, of_keys
        return self.bias(params)
