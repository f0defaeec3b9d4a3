"""Attention with any position method as modules of Flax NNX."""

from collections.abc import Mapping
from typing import Any, cast

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from alibi.attention import AttentionOptions, position_params
from alibi.attention.cross import Cross, check_source
from alibi.attention.named import (
    TRAIN_LENGTH,
    check_heads,
    check_in_attention,
    check_no_cache,
    check_own_attention,
    layer_attention_fn,
)
from alibi.positions import PositionMethod, make_position


class SelfAttention(nnx.MultiHeadAttention):
    """Flax's `nnx.MultiHeadAttention` as self-attention with a position method.

    The layer has the method's parameters as `position_params`. It is causal by default. A call takes
    `segment_ids`, integers `[*batch, length]`: tokens see those of their own document alone.

    Args:
      num_heads, in_features, rngs: as in Flax's layer.
      position, causal, train_length, options, window, skip_epsilon, backend: as in
        `alibi.attention_fn`.
      layer: further arguments for Flax's layer, such as dtype or dropout_rate.

    Raises:
      ValueError: as `alibi.attention_fn`; when it is called, for `decode=True` with a method that
        keeps data for each token (fox, deberta, asentmax, selective_rope, repo), which Flax's cache
        doesn't hold.

    Example:
      >>> import jax
      >>> from flax.nnx import Rngs
      >>> layer = nnx.SelfAttention(num_heads=8, in_features=64, position="t5", rngs=Rngs(0))
      >>> layer(jax.random.normal(jax.random.key(0), (2, 16, 64))).shape  # batch, length, width
      (2, 16, 64)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        position: str | type[PositionMethod] = "alibi",
        causal: bool = True,
        train_length: int = TRAIN_LENGTH,
        options: Mapping[str, Any] | None = None,
        window: int | None = None,
        skip_epsilon: float | None = 0.0,
        backend: str = "auto",
        rngs: nnx.Rngs,
        **layer: Any,
    ):
        check_own_attention(layer.get("attention_fn"))
        check_heads(num_heads, layer.get("qkv_features") or in_features)
        super().__init__(num_heads, in_features, rngs=rngs, **{"decode": False, **layer})
        self.position_method = make_position(
            position,
            num_heads=num_heads,
            head_dim=self.head_dim,
            width=in_features,
            train_length=train_length,
            causal=causal,
            options=options,
        )
        check_in_attention(position, type(self.position_method))
        self.position_params = nnx.Dict(
            jax.tree.map(nnx.Param, position_params(self.position_method, rngs.params()))
        )
        self.attention_options = AttentionOptions(window, skip_epsilon, backend=backend)

    def __call__(  # type: ignore[override]  # Flax has other arguments
        self,
        x: Float[Array, "*batch length width"],
        *,
        mask: Shaped[Array, "*#batch #heads #q #k"] | None = None,
        segment_ids: Int[Array, "*#batch length"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
    ) -> Float[Array, "*batch length out_features"]:
        """Returns the layer's result for tokens `x`.

        Args:
          mask: True where a query may see a key, besides `causal` and `window`, as in `alibi.attend`.
          segment_ids: integers, the same for all tokens of a document. A query sees only its own.
          deterministic, rngs, sow_weights, decode: as in Flax's layer.
        """
        if self.decode if decode is None else decode:
            check_no_cache(self.position_method, type(self.position_method), segment_ids)
        params = nnx.to_pure_dict(nnx.state(self.position_params))
        attention = layer_attention_fn(
            self.position_method, params, x, self.attention_options, segment_ids=segment_ids
        )
        return nnx.MultiHeadAttention.__call__(
            cast(Any, _WithAttention(self, attention)),
            x,
            mask=mask,
            deterministic=deterministic,
            rngs=rngs,
            sow_weights=sow_weights,
            decode=decode,
        )


class CrossAttention(nnx.MultiHeadAttention):
    """Flax's `nnx.MultiHeadAttention` from a target to a source: queries in one sequence, keys and values
    in another.

    `alibi.linen.CrossAttention` says how positions enter. With `decode=True` the layer keeps the
    source's keys and values: give the source in the first call alone. `layer.source = nnx.data(None)`
    empties the cache.

    Args:
      num_heads, in_features, rngs: as in Flax's layer.
      sides, position, train_length, options, rate, window, skip_epsilon, backend: as in
        `alibi.linen.CrossAttention`.
      layer: further arguments for Flax's layer, such as in_kv_features, the source's width.

    Raises:
      ValueError: as `alibi.linen.CrossAttention`.

    Example:
      >>> import jax
      >>> from flax.nnx import Rngs
      >>> layer = nnx.CrossAttention(num_heads=8, in_features=64, sides="two_sided", rngs=Rngs(0))
      >>> target, source = jax.random.normal(jax.random.key(0), (2, 2, 16, 64))  # batch, length, width
      >>> layer(target[:, :5], source).shape
      (2, 5, 64)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        sides: str = "none",
        position: str | type[PositionMethod] | None = None,
        train_length: int = TRAIN_LENGTH,
        options: Mapping[str, Any] | None = None,
        rate: float = 1.0,
        window: int | None = None,
        skip_epsilon: float | None = 0.0,
        backend: str = "auto",
        rngs: nnx.Rngs,
        **layer: Any,
    ):
        check_own_attention(layer.get("attention_fn"), "CrossAttention", "sides")
        check_heads(num_heads, layer.get("qkv_features") or in_features)
        super().__init__(num_heads, in_features, rngs=rngs, **{"decode": False, **layer})
        self.cross = Cross.make(
            *(sides, rate, position, options),
            AttentionOptions(window, skip_epsilon, backend=backend),
            num_heads=num_heads,
            head_dim=self.head_dim,
            width=in_features,
            train_length=train_length,
        )
        self.position_params = nnx.Dict(jax.tree.map(nnx.Param, self.cross.init(rngs.params())))
        self.source: nnx.Cache | None = nnx.data(None)

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
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
    ) -> Float[Array, "*batch q out_features"]:
        """Returns the layer's result for target tokens.

        Args:
          source, target_mask, source_mask, query_positions, mask: as in
            `alibi.linen.CrossAttention`.
          deterministic, rngs, sow_weights: as in Flax's layer.
          decode: keep the source, or read the one kept. Defaults to the layer's.
        """
        decode = bool(self.decode if decode is None else decode)
        held, filled = None, list[Any]()
        if decode and self.source is not None:
            held = self.source.get_value()
        stands = self.cross.method is None or query_positions is not None
        check_source(source, held, decode=decode, stands=stands)
        held = held if source is None else None
        if source is None:  # no token, for the layer's projections
            source = jnp.zeros((*target.shape[:-2], 0, self.in_kv_features), target.dtype)
        attention = self.cross.attention_fn(
            nnx.to_pure_dict(nnx.state(self.position_params)),
            *(self.num_heads, query_positions, target_mask, source_mask, held, filled),
        )
        result = nnx.MultiHeadAttention.__call__(
            cast(Any, _WithAttention(self, attention)),
            target,
            source,
            mask=mask,
            deterministic=deterministic,
            rngs=rngs,
            sow_weights=sow_weights,
            decode=False,
        )
        if decode and self.source is None:
            self.source = nnx.Cache(filled[0])
        elif decode and self.source is not None:
            self.source.set_value(filled[0])
        return result


class _WithAttention:
    """A layer with another `attention_fn` for one call. As an attribute of the layer it would outlive
    the call.
    """

    def __init__(self, layer: nnx.MultiHeadAttention, attention_fn: Any):
        self._layer, self.attention_fn = layer, attention_fn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
