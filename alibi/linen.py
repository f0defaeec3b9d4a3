"""Attention with any position method as modules of Flax Linen."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict, meta
from jaxtyping import Array, Bool, Float, Int, Shaped

from alibi.attention import AttentionOptions, position_params
from alibi.attention.cross import Cross, check_source
from alibi.attention.flax import AttentionFn
from alibi.attention.named import (
    TRAIN_LENGTH,
    check_heads,
    check_in_attention,
    check_no_cache,
    check_own_attention,
    layer_attention_fn,
)
from alibi.config.fields import without_lists
from alibi.positions import PositionMethod, make_position


class SelfAttention(nn.MultiHeadDotProductAttention):
    """Flax's `MultiHeadDotProductAttention` as self-attention with a position method.

    It has all fields and parameters of Flax's layer, and the method's parameters as
    `position_params`. It is causal by default. A call takes `segment_ids`, integers
    `[*batch, length]`: tokens see those of their own document alone.

    Attributes:
      position, causal, train_length, options, window, skip_epsilon, backend: as in
        `alibi.attention_fn`.

    Raises:
      ValueError: when it is called, as `alibi.attention_fn`; for `decode=True` with a method that
        keeps data for each token (fox, deberta, asentmax, selective_rope, repo), which Flax's cache
        doesn't hold.

    Example:
      >>> import jax
      >>> layer = linen.SelfAttention(num_heads=8, position="t5")
      >>> x = jax.random.normal(jax.random.key(0), (2, 16, 64))  # batch, length, width
      >>> params = layer.init(jax.random.key(1), x)
      >>> layer.apply(params, x).shape
      (2, 16, 64)
    """

    attention_fn: Any = None  # made by `position`
    position: str | type[PositionMethod] = "alibi"
    causal: bool = True
    train_length: int = TRAIN_LENGTH
    options: Mapping[str, Any] | None = None
    window: int | None = None
    skip_epsilon: float | None = 0.0
    backend: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.options, Mapping):  # so that a layer with options has a hash, as Flax's
            self.options = FrozenDict(without_lists(dict(self.options)))
        super().__post_init__()

    @nn.compact
    def __call__(  # type: ignore[override]  # Flax has other arguments
        self,
        x: Float[Array, "*batch length width"],
        *,
        mask: Shaped[Array, "*#batch #heads #q #k"] | None = None,
        segment_ids: Int[Array, "*#batch length"] | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*batch length out_features"]:
        """Returns the layer's result for tokens `x`.

        Args:
          mask: True where a query may see a key, besides `causal` and `window`, as in `alibi.attend`.
          segment_ids: integers, the same for all tokens of a document. A query sees only its own.
          deterministic, dropout_rng, sow_weights: as in Flax's layer.
        """
        check_own_attention(self.attention_fn)
        method = self.position_method(x.shape[-1])
        check_in_attention(self.position, type(method))
        if self.decode:
            check_no_cache(self.position, type(method), segment_ids)
        params = {}
        if jax.eval_shape(lambda: position_params(method, jax.random.key(0))):
            params = self.param("position_params", lambda key: position_params(method, key))
        options = AttentionOptions(self.window, self.skip_epsilon, backend=self.backend)
        attention = layer_attention_fn(method, params, x, options, segment_ids=segment_ids)
        return _flax_layer(self, attention)(
            x,
            mask=mask,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            sow_weights=sow_weights,
        )

    def position_method(self, width: int) -> PositionMethod:
        """Returns the position method for inputs with `width` features."""
        return make_position(
            self.position, causal=self.causal, options=self.options, **_sizes(self, width)
        )


class CrossAttention(nn.MultiHeadDotProductAttention):
    """Flax's `MultiHeadDotProductAttention` from a target to a source: queries in one sequence, keys and
    values in another.

    It has all fields and parameters of Flax's layer, and the method's parameters as
    `position_params`. Source token j stands at position j, target token i at `rate` times i, rounded
    to a whole source token. With `decode=True` the layer keeps the source's keys and values: give the
    source in the first call alone, with `mutable="cache"`.

    Attributes:
      sides: how position enters. "none" adds no bias, as the paper's authors advise. The others add a
        bias at the distance from the target token's position to each source token. "symmetric": the
        same on both sides. "two_sided": each head has a second bias after the position, that of
        slopes_after, T5's own, or else head H - 1 - h's. "half": half of the heads see source tokens up
        to the position, the others from it on, and options are those of half of the heads.
      position, train_length, options: as in `alibi.attention_fn`, for methods with a bias of the
        distance alone. `position` defaults to "alibi", if `sides` is not "none".
      rate: source tokens for each target token, such as 6.5 frames for each letter, from 0.001 to
        1,000. It is taken as a fraction with a denominator of at most 1,000.
      window: hides source tokens at this distance or farther.
      skip_epsilon, backend: as in `alibi.attention_fn`.

    Raises:
      ValueError: when it is called: unknown sides, a method that is no distance bias, a rate out of
        range, an odd number of heads for "half", no source, and as `alibi.attend`.

    Example:
      >>> import jax
      >>> layer = linen.CrossAttention(num_heads=8, sides="two_sided")
      >>> target, source = jax.random.normal(jax.random.key(0), (2, 2, 16, 64))  # batch, length, width
      >>> params = layer.init(jax.random.key(1), target, source)
      >>> layer.apply(params, target[:, :5], source).shape
      (2, 5, 64)
    """

    attention_fn: Any = None  # made by `sides`
    sides: str = "none"
    position: str | type[PositionMethod] | None = None
    train_length: int = TRAIN_LENGTH
    options: Mapping[str, Any] | None = None
    rate: float = 1.0
    window: int | None = None
    skip_epsilon: float | None = 0.0
    backend: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.options, Mapping):
            self.options = FrozenDict(without_lists(dict(self.options)))
        super().__post_init__()

    @nn.compact
    def __call__(  # type: ignore[override]  # Flax has other arguments
        self,
        target: Float[Array, "*batch q width"],
        source: Float[Array, "*batch k source_width"] | None = None,
        *,
        target_mask: Bool[Array, "*#batch q"] | None = None,
        source_mask: Bool[Array, "*#batch k"] | None = None,
        query_positions: Int[Array, "*#batch q"] | None = None,
        mask: Shaped[Array, "*#batch #heads #q #k"] | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*batch q out_features"]:
        """Returns the layer's result for target tokens.

        Args:
          source: what the target attends to. None, in decoding, is the source in the cache.
          target_mask, source_mask: False for padding. Padding of the target attends to nothing. The
            cache keeps the source's, until another is given.
          query_positions: the target tokens' positions in the target, before `rate`. Defaults to 0, 1,
            ..., and in decoding to those after the tokens decoded so far.
          mask: True where a target token may see a source token, as in `alibi.attend`.
          deterministic, dropout_rng, sow_weights: as in Flax's layer.
        """
        check_own_attention(self.attention_fn, "CrossAttention", "sides")
        cross = Cross.make(
            *(self.sides, self.rate, self.position, self.options),
            AttentionOptions(self.window, self.skip_epsilon, backend=self.backend),
            **_sizes(self, target.shape[-1]),
        )
        params, held, filled = {}, None, list[Any]()
        if jax.eval_shape(lambda: cross.init(jax.random.key(0))):
            params = self.param("position_params", cross.init)
        if self.decode:
            cache = self.variable("cache", "source", lambda: None)
            held = cache.value
        stands = self.sides == "none" or query_positions is not None
        check_source(source, held, decode=self.decode, stands=stands)
        held = held if source is None else None
        if source is None:  # no token, for the layer's projections
            width = meta.unbox(self.get_variable("params", "key"))["kernel"].shape[0]
            source = jnp.zeros((*target.shape[:-2], 0, width), target.dtype)
        attention = cross.attention_fn(
            *(params, self.num_heads, query_positions, target_mask, source_mask, held, filled)
        )
        result = _flax_layer(self, attention, decode=False)(
            target,
            source,
            mask=mask,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            sow_weights=sow_weights,
        )
        if self.decode and not self.is_initializing():
            (cache.value,) = filled
        return result


def _flax_layer(
    layer: nn.MultiHeadDotProductAttention, attention_fn: AttentionFn, **changes: Any
) -> nn.MultiHeadDotProductAttention:
    """Returns Flax's own layer with the fields, the parameters and the scope of a layer here."""
    names = {field.name for field in dataclasses.fields(nn.MultiHeadDotProductAttention)}
    fields = {name: getattr(layer, name) for name in names - {"attention_fn", "parent", "name"}}
    twin = nn.MultiHeadDotProductAttention(**{**fields, **changes}, attention_fn=attention_fn)
    nn.share_scope(layer, twin)
    return twin


def _sizes(layer: Any, width: int) -> dict[str, Any]:
    """Returns a position method's sizes for inputs with `width` features."""
    features = layer.qkv_features or width
    check_heads(layer.num_heads, features)
    return {
        "num_heads": layer.num_heads,
        "head_dim": features // layer.num_heads,
        "width": width,
        "train_length": layer.train_length,
    }
