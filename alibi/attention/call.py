"""One call of attention, as every backend gets it: with all arguments checked and positions given."""

import contextlib
import contextvars
import dataclasses
import functools
import numbers
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
    """Inside, programs are traced as for so many devices of `platform`, which need not be here; none can be run."""
    token = _TARGET.set((platform, devices))
    try:
        yield
    finally:
        _TARGET.reset(token)


def current_platform() -> str:
    """What programs are traced for: "cpu", "gpu" or "tpu"; by default the platform that JAX computes on."""
    if target := _TARGET.get():
        return target[0]
    platform = jax.default_backend()
    return platform if platform in ("cpu", "tpu") else "gpu"  # "cuda" and "rocm" are GPUs too


def current_devices() -> int:
    """How many devices programs are traced for; by default all that there are."""
    target = _TARGET.get()
    return target[1] if target else jax.device_count()


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed and how far it reaches.

    Attributes:
      window, skip_epsilon, sharding, backend: as in `alibi.attention.attend`.
      block: the most queries and keys that a tile of `blocked` has, and keys that `decoding` reads at one time; None:
        as many as was measured to be fastest.
      platform: what the program is compiled for: "cpu", "gpu" or "tpu".

    Raises:
      ValueError: a window below 1, or a skip_epsilon out of range.
    """

    window: int | None = None
    skip_epsilon: float | None = 0.0
    sharding: NamedSharding | None = None
    backend: str = "auto"
    block: int | None = None
    platform: str = dataclasses.field(default_factory=current_platform)

    def __post_init__(self) -> None:
        whole = isinstance(self.window, (int, np.integer)) and not isinstance(self.window, bool)
        if self.window is not None and not (whole and 1 <= self.window < 2**31):
            raise ValueError(
                f"window={self.window!r} must be a whole number of positions, known when the call is traced, of at "
                "least 1 (a query sees its own), or None for no window"
            )
        number = isinstance(self.skip_epsilon, numbers.Real) and not isinstance(self.skip_epsilon, bool)
        if self.skip_epsilon is not None and not (number and 0 <= self.skip_epsilon < 1):
            raise ValueError(
                f"skip_epsilon={self.skip_epsilon!r} must be a number from 0 to below 1, or None to skip nothing"
            )


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The arguments of `alibi.attention.attend`, which explains them, with defaults filled in.

    Attributes:
      ascending: positions that are known only when the program runs rise from token to token in each sequence, and
        the queries are those of the last keys.
      devices: over how many devices the compiler may split the arrays; 1 inside `jax.shard_map`.

    Raises:
      ValueError: a known negative slope with a skip_epsilon above 0.
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
        """The same call with key and value heads repeated until each query head has its own (grouped queries)."""
        heads, kv_heads = self.query.shape[-2], self.key.shape[-2]
        if heads == kv_heads:
            return self
        key, value = (jnp.repeat(x, heads // kv_heads, axis=-2) for x in (self.key, self.value))
        return dataclasses.replace(self, key=key, value=value, key_norm=None)

    def __post_init__(self) -> None:
        epsilon = self.options.skip_epsilon
        # With epsilon 0 such a slope is allowed: it skips nothing, and training may lead a slope through it.
        if epsilon and self.known_slopes is not None and np.any(self.known_slopes < 0):
            raise ValueError(
                f"slopes={self.known_slopes.tolist()} have one below zero, which favours far keys; "
                f"skip_epsilon={epsilon} needs slopes of at least 0: use skip_epsilon=0, which skips nothing for such "
                "a head"
            )

    @property
    def window(self) -> int | None:
        return self.options.window

    @functools.cached_property
    def known_slopes(self) -> np.ndarray | None:
        """The slopes of a bias that is linear in distance, where they are known when the call is traced."""
        slopes = None if self.bias is None else self.bias.slopes
        return None if slopes is None or isinstance(slopes, jax.core.Tracer) else np.asarray(slopes)

    @property
    def known_positions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Positions of queries and keys, int64 `[q]` and `[k]`, if NumPy gives them for all sequences, else None."""
        sides = self.query_positions, self.key_positions
        if not all(isinstance(side, np.ndarray) and side.ndim == 1 for side in sides):
            return None
        queries, keys = (np.asarray(side, np.int64) for side in sides)
        return queries, keys

    @property
    def wants_weights(self) -> str:
        """Why a backend that never has all weights can't do the call; empty if it can."""
        wants = self.sow is not None or self.weights_einsum is not None or self.values_einsum is not None
        return "it gives no weights and takes no einsum" if wants else ""

    @property
    def adds_values(self) -> str:
        """Why a backend that knows no values but the layer's can't do the call; empty if it can."""
        return "its bias adds to the values" if self.bias is not None and self.bias.adds_values else ""

    @property
    def hides_or_drops(self) -> str:
        """Why a backend without masks, segments and dropout can't do the call; empty if it can."""
        segments = self.query_segments is not None or self.key_segments is not None
        return "it has no dropout, masks or segments" if self.drops or self.mask is not None or segments else ""

    @property
    def drops(self) -> bool:
        """Whether dropout acts."""
        return self.dropout_rng is not None and self.dropout_rate > 0.0

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """`[*batch, heads, q, k]`."""
        return (*self.query.shape[:-3], self.query.shape[-2], self.query.shape[-3], self.key.shape[-3])


def at_once(count: int, fitting: int, devices: int) -> int:
    """How many of `count` batch entries or heads to compute together: a divisor of it, at most `fitting`.

    If several devices share them it is all, since a loop over what is split over devices would gather it.
    """
    if devices > 1:
        return count
    return max(n for n in range(1, count + 1) if count % n == 0 and n <= max(1, fitting))


def dense(call: AttentionCall) -> Float[Array, "*batch q heads value_dim"]:
    """The call by `reference_attention`."""
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


def within(
    rows: Int[Array, "*#batch q 1"], columns: Int[Array, "*#batch 1 k"], window: int
) -> Bool[Array, "*#batch q k"]:
    """True where keys at positions `columns` are less than `window` from queries at `rows`."""
    return jnp.abs(rows - columns) < window


def shown_to(
    query_positions: KnownPositions,
    key_positions: KnownPositions,
    query_segments: Int[Array, "*#batch q"] | None,
    key_segments: Int[Array, "*#batch k"] | None,
    *,
    causal: bool,
    window: int | None,
) -> list[Bool[Array, "*#batch q k"]]:
    """True where queries see keys: arrays for the causal mask, the window and segments, as there are such."""
    rows, columns = rows_and_columns(jnp.asarray(query_positions), jnp.asarray(key_positions))
    shown = []
    if causal:
        shown.append(rows >= columns)
    if window is not None:
        shown.append(within(rows, columns, window))
    if query_segments is not None and key_segments is not None:
        rows, columns = rows_and_columns(query_segments, key_segments)
        shown.append(rows == columns)
    return shown


def visible_keys(call: AttentionCall) -> Bool[Array, "*#batch #heads #q k"] | None:
    """True where a query sees a key by the mask, causality, window and segments; None if nothing hides any."""
    conditions = [] if call.mask is None else [call.mask.astype(bool)]
    sides = call.query_positions, call.key_positions, call.query_segments, call.key_segments
    conditions += [jnp.expand_dims(shown, -3) for shown in shown_to(*sides, causal=call.causal, window=call.window)]
    visible = None
    for condition in conditions:
        if visible is None:
            visible = condition
        else:
            rank = max(visible.ndim, condition.ndim)
            visible = jnp.logical_and(*(x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (visible, condition)))
    return visible
