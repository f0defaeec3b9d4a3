"""One call of attention as every backend gets it: all arguments are given, with their defaults filled in."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from alibi.attention.reference import dropout_factors, reference_attention
from alibi.positions.bias import Bias, KnownPositions
from alibi.positions.distance import rows_and_columns

_TARGET: contextvars.ContextVar[tuple[str, int] | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def traced_for(platform: str, devices: int) -> Iterator[None]:
    """Traces programs inside for this many devices of `platform`; the devices may be absent, so nothing can run."""
    token = _TARGET.set((platform, devices))
    try:
        yield
    finally:
        _TARGET.reset(token)


def current_platform() -> str:
    """Returns the platform of traced programs, "cpu", "gpu" or "tpu"; by default the platform JAX computes on."""
    if target := _TARGET.get():
        return target[0]
    platform = jax.default_backend()
    return platform if platform in ("cpu", "tpu") else "gpu"  # "cuda" and "rocm" are GPUs too


def current_devices() -> int:
    """Returns the number of devices of traced programs; by default the number of devices JAX has."""
    target = _TARGET.get()
    return target[1] if target else jax.device_count()


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed and how far it reaches; `attend` checks the values.

    Attributes:
      window, skip_epsilon, sharding, backend: see `alibi.attention.attend`.
      block: the largest tile of `blocked`, in queries and in keys, and the number of keys `decoding` reads at a time;
        None: the fastest sizes measured.
      platform: the platform the program is compiled for: "cpu", "gpu" or "tpu".
    """

    window: int | None = None
    skip_epsilon: float | None = 0.0
    sharding: NamedSharding | None = None
    backend: str = "auto"
    block: int | None = None
    platform: str = dataclasses.field(default_factory=current_platform)


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The arguments of `alibi.attention.attend`, which explains them.

    Attributes:
      ascending: positions that are known only at run time rise from token to token in each sequence, and the queries
        stand at the last keys.
      devices: the number of devices the compiler may split the arrays over; 1 inside `jax.shard_map`.
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
    mask: Shaped[Array, "*#batch #heads #q k"] | None = None
    dropout_rate: float = 0.0
    dropout_rng: PRNGKeyArray | None = None
    broadcast_dropout: bool = True
    precision: jax.lax.PrecisionLike = None
    weights_einsum: Callable[..., Array] | None = None
    values_einsum: Callable[..., Array] | None = None
    sow: Callable[[Array], None] | None = None
    key_norm: Float[Array, "*batch kv_heads"] | None = None
    ascending: bool = False
    options: AttentionOptions = dataclasses.field(default_factory=AttentionOptions)
    devices: int = dataclasses.field(default_factory=current_devices)

    def with_own_heads(self) -> "AttentionCall":
        """Returns the call with keys and values repeated until each query head has its own (grouped queries)."""
        heads, kv_heads = self.query.shape[-2], self.key.shape[-2]
        if heads == kv_heads:
            return self
        key, value = (jnp.repeat(x, heads // kv_heads, axis=-2) for x in (self.key, self.value))
        return dataclasses.replace(self, key=key, value=value, key_norm=None)

    @functools.cached_property
    def known_slopes(self) -> np.ndarray | None:
        """The slopes of a bias linear in distance, if they are known at tracing, else None."""
        slopes = None if self.bias is None else self.bias.slopes
        return None if slopes is None or isinstance(slopes, jax.core.Tracer) else np.asarray(slopes)

    @property
    def known_positions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Positions of queries and keys, int64 `[q]` and `[k]`, if all sequences share NumPy arrays, else None."""
        sides = self.query_positions, self.key_positions
        if not all(isinstance(side, np.ndarray) and side.ndim == 1 for side in sides):
            return None
        queries, keys = (np.asarray(side, np.int64) for side in sides)
        return queries, keys

    @property
    def drops(self) -> bool:
        """Whether dropout acts."""
        return self.dropout_rng is not None and self.dropout_rate > 0.0

    @property
    def features(self) -> set[str]:
        """The features in use that not every backend has: "weights", "dropout", "masks", "added values"."""
        used = {
            "weights": self.sow is not None or self.weights_einsum is not None or self.values_einsum is not None,
            "dropout": self.drops,
            "masks": any(x is not None for x in (self.mask, self.query_segments, self.key_segments)),
            "added values": self.bias is not None and self.bias.adds_values,
        }
        return {feature for feature, is_used in used.items() if is_used}

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """`[*batch, heads, q, k]`."""
        return (*self.query.shape[:-3], self.query.shape[-2], self.query.shape[-3], self.key.shape[-3])


def dense(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """Computes the call by `reference_attention`."""
    keep = None
    if call.drops:
        assert call.dropout_rng is not None
        keep = dropout_factors(call.dropout_rng, call.dropout_rate, call.weights_shape, call.broadcast_dropout)
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
    """Returns a mask, True if a query sees a key, for each condition in use: causality, the window, the segments."""
    rows, columns = rows_and_columns(jnp.asarray(query_positions), jnp.asarray(key_positions))
    masks = [rows >= columns] if causal else []
    if window is not None:
        masks.append(jnp.abs(rows - columns) < window)
    if query_segments is not None and key_segments is not None:
        rows, columns = rows_and_columns(query_segments, key_segments)
        masks.append(rows == columns)
    return masks


def visible_keys(call: AttentionCall) -> Bool[Array, "*#batch #heads #q k"] | None:
    """Returns a mask, True if a query sees a key by mask, causality, window and segments; None if all keys are seen."""
    masks = [] if call.mask is None else [call.mask.astype(bool)]
    sides = call.query_positions, call.key_positions, call.query_segments, call.key_segments
    pairs = visible_pairs(*sides, causal=call.causal, window=call.options.window)
    masks += [jnp.expand_dims(mask, -3) for mask in pairs]
    if not masks:
        return None
    rank = max(mask.ndim for mask in masks)
    return functools.reduce(jnp.logical_and, (mask.reshape((1,) * (rank - mask.ndim) + mask.shape) for mask in masks))
