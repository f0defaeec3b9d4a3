"""A call of attention as every backend gets it: its arguments, with defaults filled in, and their
checks.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, Shaped

from alibi.attention.reference import dropout_factors, reference_attention
from alibi.numerics.target import current_target
from alibi.positions.bias import Bias, KnownPositions, Part
from alibi.positions.distance import check_integers, rows_and_columns
from alibi.positions.shapes import LAYOUT, PerHead

ADDED = -1e3  # an additive mask hides a key by a value of at most this


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed and how far it reaches; `attend` checks the values.

    Attributes:
      window, skip_epsilon, sharding, backend: see `alibi.attention.attend`.
      block: the largest tile of `blocked` and `fused`, in queries and in keys; defaults to the
        fastest sizes measured.
      platform: the platform the program is compiled for: "cpu", "gpu" or "tpu".
      logit_cap: see `alibi.attention.attend`.
    """

    window: int | None = None
    skip_epsilon: float | None = 0.0
    sharding: NamedSharding | None = None
    backend: str = "auto"
    block: int | None = None
    platform: str = dataclasses.field(default_factory=lambda: current_target()[0])
    logit_cap: float | None = None


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The arguments of `alibi.attention.attend`, which explains them.

    Attributes:
      ascending: positions known only at run time rise from token to token in each sequence, and the
        queries stand at the last keys.
      slots_last: keys and values are views of arrays `[batch, kv_heads, features, k]`, as
        `alibi.attention.cache.KeyValues` holds them.
      devices: the number of devices the compiler may split the arrays over; 1 inside
        `jax.shard_map`.
    """

    query: Float[Array, "*batch q heads head_dim"]
    key: Float[Array, "*batch k kv_heads head_dim"]
    value: Float[Array, "*batch k kv_heads value_dim"]
    bias: Bias | None
    causal: bool
    query_positions: KnownPositions
    key_positions: KnownPositions
    query_segments: Int[Array, "*#batch q"] | None = None
    key_segments: Int[Array, "*#batch k"] | None = None
    mask: Bool[Array, "*#batch #heads #q k"] | None = None
    dropout_rate: float = 0.0
    dropout_rng: PRNGKeyArray | None = None
    broadcast_dropout: bool = True
    precision: jax.lax.PrecisionLike = None
    weights_einsum: Callable[..., Array] | None = None
    values_einsum: Callable[..., Array] | None = None
    sow: Callable[[Array], None] | None = None
    sink: PerHead | None = None
    ascending: bool = False
    slots_last: bool = False
    options: AttentionOptions = dataclasses.field(default_factory=AttentionOptions)
    devices: int = dataclasses.field(default_factory=lambda: current_target()[1])

    def with_own_heads(self) -> "AttentionCall":
        """Returns the call with keys and values repeated until each query head has its own (grouped
        queries).
        """
        heads, kv_heads = self.query.shape[-2], self.key.shape[-2]
        if heads == kv_heads:
            return self
        key, value = (jnp.repeat(x, heads // kv_heads, axis=-2) for x in (self.key, self.value))
        return dataclasses.replace(self, key=key, value=value, slots_last=False)

    @functools.cached_property
    def known_slopes(self) -> np.ndarray | None:
        """The slopes of a bias linear in distance, if they are known at tracing, else None."""
        slopes = None if self.bias is None else self.bias.slopes
        return None if slopes is None or isinstance(slopes, jax.core.Tracer) else np.asarray(slopes)

    @property
    def known_positions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Positions of queries and keys, int64 `[q]` and `[k]`, if all sequences share NumPy
        arrays, else None.
        """
        sides = self.query_positions, self.key_positions
        if not all(isinstance(side, np.ndarray) and side.ndim == 1 for side in sides):
            return None
        queries, keys = (np.asarray(side, np.int64) for side in sides)
        return queries, keys

    @property
    def features(self) -> set[str]:
        """The features in use among those some backends lack: "weights", "dropout", "masks", "added
        values", "sink", "logit cap".
        """
        used = {
            "weights": self.sow is not None
            or self.weights_einsum is not None
            or self.values_einsum is not None,
            "dropout": self.dropout_rng is not None and self.dropout_rate > 0.0,
            "masks": any(
                x is not None for x in (self.mask, self.query_segments, self.key_segments)
            ),
            "added values": self.bias is not None and self.bias.adds_values,
            "sink": self.sink is not None,
            "logit cap": self.options.logit_cap is not None,
        }
        return {feature for feature, is_used in used.items() if is_used}

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """`[*batch, heads, q, k]`."""
        return (
            *self.query.shape[:-3],
            self.query.shape[-2],
            self.query.shape[-3],
            self.key.shape[-3],
        )


def visible_by(mask: Shaped[ArrayLike, "*shape"]) -> Bool[Array, "*shape"]:
    """Returns True where a mask shows a key; takes booleans, zeros and ones, and additive masks.

    A mask of floats without a value above zero is additive: zeros show, and values below zero, such
    as -1e9 and -inf, hide. A mask of integers is additive if a value is below zero; zeros alone hide
    all keys.

    Raises:
      ValueError: values known here that are neither, such as a bias of the logits.
    """
    if jnp.asarray(mask).dtype == bool:
        return jnp.asarray(mask)
    if not isinstance(mask, jax.core.Tracer):
        values = np.asarray(mask)
        below = values[values < 0]
        if (wrong := below if (values > 0).any() else below[below > ADDED]).size:
            raise ValueError(
                f"mask holds {wrong[0]}; it must be of booleans, of zeros and ones, or of zeros where a key is seen "
                f"and {ADDED:g} or less where it is hidden; give a bias of the logits as bias="
            )
    mask = jnp.asarray(mask)
    whole = jnp.issubdtype(mask.dtype, jnp.integer)
    return jnp.where((mask < 0).any() if whole else ~(mask > 0).any(), mask == 0, mask > 0)


def validate(call: AttentionCall) -> None:
    """Raises ValueError, which names the argument, if arguments of a call are out of range or don't
    fit together.
    """
    query, key, value = call.query, call.key, call.value
    shapes = f"got query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"query, key and value must be [*batch, length, heads, head_dim], all of one rank; {shapes}"
        )
    dtypes = [x.dtype for x in (query, key, value)]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise ValueError(
            f"query, key and value have dtypes {', '.join(map(str, dtypes))}; they must be floats: "
            "use x.astype(jnp.float32)"
        )
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"batch dimensions of query, key and value, and lengths of key and value, must agree; {shapes}"
        )
    if query.shape[-1] != key.shape[-1] or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"query and key need one head_dim, and key heads that divide the query heads; {shapes}; "
            f"{LAYOUT}"
        )
    _check_options(call.options)
    _check_bias(call)
    _check_sides(call)
    if call.mask is not None and not _broadcasts(call.mask.shape, call.weights_shape):
        raise ValueError(
            f"mask has shape {call.mask.shape}; it must broadcast to [*batch, heads, q, k] = {call.weights_shape}; "
            f"{LAYOUT}"
        )
    heads = query.shape[-2:-1]
    if call.sink is not None and call.sink.shape != heads:
        raise ValueError(f"sink has shape {call.sink.shape}; it must be {heads}; {LAYOUT}")


def _check_options(options: AttentionOptions) -> None:
    window, epsilon, sharding = options.window, options.skip_epsilon, options.sharding
    if options.logit_cap is not None and not 0 < options.logit_cap < math.inf:
        raise ValueError(
            f"logit_cap={options.logit_cap!r} must be above 0 and finite, such as 50, or None for no cap"
        )
    is_whole = isinstance(window, int | np.integer) and not isinstance(window, bool)
    if window is not None and not (is_whole and 1 <= window < 2**31):
        raise ValueError(
            f"window={window!r} must be a whole number of positions, known when the call is traced, of at least 1 "
            "(a query sees its own), or None for no window"
        )
    is_number = isinstance(epsilon, numbers.Real) and not isinstance(epsilon, bool)
    if epsilon is not None and not (is_number and 0 <= epsilon < 1):
        raise ValueError(
            f"skip_epsilon={epsilon!r} must be a number from 0 to below 1, or None to skip nothing"
        )
    if sharding is None:
        return
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"sharding is {sharding}; it must be a jax.sharding.NamedSharding(mesh, P(...)), or None on one device"
        )
    batch, length, heads, features = (*sharding.spec, None, None, None, None)[:4]
    if len(sharding.spec) > 4 or length is not None or features is not None:
        raise ValueError(
            f"sharding has spec {sharding.spec}; of [batch, length, heads, head_dim] it may split batch and heads "
            f"alone: P({batch!r}, None, {heads!r})"
        )


def _check_bias(call: AttentionCall) -> None:
    if call.bias is None:
        return
    if not isinstance(call.bias, Bias):
        got = type(call.bias).__name__
        got = f"an array of shape {call.bias.shape}" if hasattr(call.bias, "shape") else got
        raise ValueError(
            f"bias is {got}; it must be an alibi.positions.Bias, such as alibi.make_position(...).bias(params), or "
            "give slopes=alibi.alibi_slopes(num_heads) for ALiBi"
        )
    # Without this check a tile at a head that the bias lacks would silently get the last head.
    position, first = jax.ShapeDtypeStruct((1,), jnp.int32), Part(queries=(0, 1), keys=(0, 1))
    block = jax.eval_shape(
        lambda bias, *sides: bias.cut(first)(*sides), call.bias, position, position
    )
    if block.shape[-3] != call.query.shape[-2]:
        raise ValueError(
            f"the bias has {block.shape[-3]} heads and the query {call.query.shape[-2]}; they must be the same; "
            f"{LAYOUT}"
        )
    epsilon, slopes = call.options.skip_epsilon, call.known_slopes
    # With epsilon 0 such a slope is allowed: its head skips nothing, and training may lead a slope
    # through zero.
    if epsilon and slopes is not None and np.any(slopes < 0):
        raise ValueError(
            f"slopes={slopes.tolist()} have a value below zero, which favours far keys; skip_epsilon={epsilon} needs "
            "slopes of at least 0: use skip_epsilon=0, which skips nothing for such a head"
        )


def _check_sides(call: AttentionCall) -> None:
    if (call.query_segments is None) != (call.key_segments is None):
        raise ValueError(
            "segment_ids were given for one side alone; give (queries', keys'), or one array for both"
        )
    for name, x, positions, segments in (
        ("query", call.query, call.query_positions, call.query_segments),
        ("key", call.key, call.key_positions, call.key_segments),
    ):
        check_integers(name, positions)
        for argument, side in ((f"{name}_positions", positions), ("segment_ids", segments)):
            length = x.shape[-3]
            if side is not None and not (
                side.shape[-1:] == (length,) and _broadcasts(side.shape, x.shape[:-2])
            ):
                raise ValueError(
                    f"{argument} have shape {side.shape}; {name} needs {[length]} or {[*x.shape[:-3], length]}; "
                    f"{LAYOUT}"
                )


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Returns whether an array of `shape` broadcasts to the shape `whole`."""
    sizes = zip(shape[::-1], whole[::-1], strict=False)
    return len(shape) <= len(whole) and all(size in (1, full) for size, full in sizes)


def dense(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """Computes the call by `reference_attention`."""
    keep = None
    if call.dropout_rng is not None and call.dropout_rate > 0.0:
        keep = dropout_factors(
            call.dropout_rng, call.dropout_rate, call.weights_shape, call.broadcast_dropout
        )
    return reference_attention(
        call.query,
        call.key,
        call.value,
        bias=call.bias,
        visible=visible_keys(call),
        query_positions=jnp.asarray(call.query_positions),
        key_positions=jnp.asarray(call.key_positions),
        keep=keep,
        precision=call.precision,
        weights_einsum=call.weights_einsum,
        values_einsum=call.values_einsum,
        sow=call.sow,
        sink=call.sink,
        logit_cap=call.options.logit_cap,
    )


def visible_pairs(
    query_positions: KnownPositions,
    key_positions: KnownPositions,
    query_segments: Int[Array, "*#batch q"] | None,
    key_segments: Int[Array, "*#batch k"] | None,
    *,
    causal: bool,
    window: int | None,
) -> list[Bool[Array, "*#batch q k"]]:
    """Returns a mask, True if a query sees a key, for each condition in use: causality, the window,
    the segments.
    """
    rows, columns = rows_and_columns(jnp.asarray(query_positions), jnp.asarray(key_positions))
    masks = [rows >= columns] if causal else []
    if window is not None:
        masks.append(jnp.abs(rows - columns) < window)
    if query_segments is not None and key_segments is not None:
        rows, columns = rows_and_columns(query_segments, key_segments)
        masks.append(rows == columns)
    return masks


def visible_keys(call: AttentionCall) -> Bool[Array, "*#batch #heads #q k"] | None:
    """Returns a mask, True if a query sees a key by mask, causality, window and segments; None if
    all keys are seen.
    """
    masks = [] if call.mask is None else [call.mask]
    sides = call.query_positions, call.key_positions, call.query_segments, call.key_segments
    pairs = visible_pairs(*sides, causal=call.causal, window=call.options.window)
    masks += [jnp.expand_dims(mask, -3) for mask in pairs]
    if not masks:
        return None
    rank = max(mask.ndim for mask in masks)
    return functools.reduce(
        jnp.logical_and, (mask.reshape((1,) * (rank - mask.ndim) + mask.shape) for mask in masks)
    )
