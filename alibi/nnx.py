"""Self-attention with any position method as a module of Flax NNX."""

from collections.abc import Mapping
from typing import Any, cast

import flax.nnx as nnx
import jax
from jaxtyping import Array, Float, Shaped

from alibi.attention import AttentionOptions, position_params
from alibi.attention.named import (
    TRAIN_LENGTH,
    check_in_attention,
    check_no_cache,
    check_own_attention,
    layer_attention_fn,
)
from alibi.positions import PositionMethod, make_position


class SelfAttention(nnx.MultiHeadAttention):
    """Flax's `nnx.MultiHeadAttention` as self-attention with a position method.

    The layer has the method's parameters as `position_params`. It is causal by default.

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
        check_in_attention(str(position), type(self.position_method))
        params = position_params(self.position_method, rngs.params())
        self.position_params = nnx.Dict(jax.tree.map(nnx.Param, params))
        self.attention_options = AttentionOptions(window, skip_epsilon, backend=backend)

    def __call__(  # type: ignore[override]
        self,
        x: Float[Array, "*batch length width"],
        *,
        mask: Shaped[Array, "*#batch #heads #q k"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
    ) -> Float[Array, "*batch length out_features"]:
        """Returns the layer's result for tokens `x`.

        Args:
          mask: True where a query may see a key, besides `causal` and `window`, as in `alibi.attend`.
          deterministic, rngs, sow_weights, decode: as in Flax's layer.
        """
        if self.decode if decode is None else decode:
            check_no_cache(type(self.position_method).__name__, type(self.position_method))
        params = nnx.to_pure_dict(nnx.state(self.position_params))
        attention = layer_attention_fn(self.position_method, params, x, self.attention_options)
        return nnx.MultiHeadAttention.__call__(
            cast(Any, _WithAttention(self, attention)),
            x,
            mask=mask,
            deterministic=deterministic,
            rngs=rngs,
            sow_weights=sow_weights,
            decode=decode,
        )


class _WithAttention:
    """A layer with another `attention_fn` for one call; as an attribute of the layer it would outlive
    the call.
    """

    def __init__(self, layer: nnx.MultiHeadAttention, attention_fn: Any):
        self._layer, self.attention_fn = layer, attention_fn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
