"""A call as every backend gets it: its arguments, with defaults filled in."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from alibi.attention.visible import Sight
from alibi.numerics.target import current_target
from alibi.positions.bias import Bias, KnownPositions
from alibi.positions.shapes import PerHead

ATTENDED = "attention"  # names a call's result and lse, which its backward pass reads


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed and how far it reaches. `attend` checks the values.

    Attributes:
      window, skip_epsilon, sharding, backend, logit_cap: as in `alibi.attention.attend`.
      block: in queries and in keys, the largest tile of `blocked` (rounded up to a multiple of 8) and
        the tile of `fused` (a power of two). Defaults to the fastest sizes measured.
      platform: the platform for which the program is compiled: "cpu", "gpu" or "tpu".
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
    """The arguments for `alibi.attention.attend`, which explains them.

    Attributes:
      query_reach: the last position that each query sees under the causal mask, at least its own.
        Defaults to its own.
      ascending: True if traced positions increase and the queries are the keys' last tokens.
      slots_last: True if keys and values are views on arrays `[batch, kv_heads, features, k]`, as in
        `alibi.attention.cache.KeyValues`.
      devices: how many devices the compiler may use, 1 inside `jax.shard_map`.
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
    query_reach: Int[Array, "*#batch q"] | None = None
    mask: Bool[Array, "*#batch #heads #q #k"] | None = None
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
        """Returns the call with keys and values repeated for each query head (grouped queries)."""
        heads, kv_heads = self.query.shape[-2], self.key.shape[-2]
        if heads == kv_heads:
            return self
        key, value = (jnp.repeat(x, heads // kv_heads, axis=-2) for x in (self.key, self.value))
        return dataclasses.replace(self, key=key, value=value, slots_last=False)

    def with_mask_in_segments(self) -> "AttentionCall":
        """Returns the call with a mask of keys alone, for all heads and queries, as segments: data of keys
        in place of pairs. Other masks stay.
        """
        if self.mask is None:
            return self
        mask = self.mask.reshape((1,) * (self.query.ndim - self.mask.ndim) + self.mask.shape)
        if mask.shape[-3:-1] != (1, 1):
            return self
        shown, sides = mask[..., 0, 0, :], []
        for segments, x in ((self.query_segments, self.query), (self.key_segments, self.key)):
            ones = jnp.ones(x.shape[-3], jnp.int32)
            segments = ones if segments is None else jnp.asarray(segments, jnp.int32)
            sides.append(segments.reshape((1,) * (shown.ndim - segments.ndim) + segments.shape))
        of_keys = jnp.where(shown, sides[1], -(2**31))  # a segment that no query is in
        return dataclasses.replace(self, mask=None, query_segments=sides[0], key_segments=of_keys)

    @functools.cached_property
    def known_slopes(self) -> np.ndarray | None:
        """A linear bias's slopes if they are known when the call is traced, else None."""
        slopes = None if self.bias is None else self.bias.slopes
        return None if slopes is None or isinstance(slopes, jax.core.Tracer) else np.asarray(slopes)

    @property
    def known_positions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Query and key positions, int64 `[q]` and `[k]`, if all sequences share NumPy arrays,
        else None.
        """
        sides = self.query_positions, self.key_positions
        if not all(isinstance(side, np.ndarray) and side.ndim == 1 for side in sides):
            return None
        queries, keys = (np.asarray(side, np.int64) for side in sides)
        return queries, keys

    @property
    def sight(self) -> Sight:
        """How far queries see."""
        return Sight(self.causal, self.options.window)

    def visible(self) -> Bool[Array, "*#batch #heads #q #k"] | None:
        """Returns a mask, True where a query sees a key, or None if all keys are seen."""
        masks = [] if self.mask is None else [self.mask]
        pairs = self.sight.of_sides(
            lambda name: None if (x := getattr(self, name)) is None else jnp.asarray(x)
        )
        masks += [jnp.expand_dims(mask, -3) for mask in pairs]
        rank = max((mask.ndim for mask in masks), default=0)
        masks = [mask.reshape((1,) * (rank - mask.ndim) + mask.shape) for mask in masks]
        return functools.reduce(jnp.logical_and, masks) if masks else None

    @property
    def features(self) -> set[str]:
        """The features in use that not every backend has: "weights", "dropout", "masks", "added
        values", "rows", "sink", "logit cap", "reach".
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
            "rows": self.bias is not None and self.bias.reads_rows,
            "sink": self.sink is not None,
            "reach": self.query_reach is not None,
            "logit cap": self.options.logit_cap is not None,
        }
        return {feature for feature, is_used in used.items() if is_used}

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """`[*batch, heads, q, k]`."""
        *batch, q_length, heads, _ = self.query.shape
        return (*batch, heads, q_length, self.key.shape[-3])
