"""Self-attention with any position method as a module of Flax Linen."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import FrozenDict
from jaxtyping import Array, Float, Shaped

from alibi.attention import AttentionOptions, position_params
from alibi.attention.named import (
    TRAIN_LENGTH,
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
    `position_params`. It is causal by default.

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
    def __call__(  # type: ignore[override]
        self,
        x: Float[Array, "*batch length width"],
        *,
        mask: Shaped[Array, "*#batch #heads #q k"] | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*batch length out_features"]:
        """Returns the layer's result for tokens `x`.

        Args:
          mask: True where a query may see a key, besides `causal` and `window`, as in `alibi.attend`.
          deterministic, dropout_rng, sow_weights: as in Flax's layer.
        """
        check_own_attention(self.attention_fn)
        method = self.position_method(x.shape[-1])
        check_in_attention(str(self.position), type(method))
        if self.decode:
            check_no_cache(str(self.position), type(method))
        params = {}
        if jax.eval_shape(lambda: position_params(method, jax.random.key(0))):
            params = self.param("position_params", lambda key: position_params(method, key))
        options = AttentionOptions(self.window, self.skip_epsilon, backend=self.backend)
        attention = layer_attention_fn(method, params, x, options)
        names = {field.name for field in dataclasses.fields(nn.MultiHeadDotProductAttention)}
        fields = {name: getattr(self, name) for name in names - {"attention_fn", "parent", "name"}}
        layer = nn.MultiHeadDotProductAttention(**fields, attention_fn=attention)
        nn.share_scope(self, layer)
        return layer(
            x,
            mask=mask,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            sow_weights=sow_weights,
        )

    def position_method(self, width: int) -> PositionMethod:
        """Returns the position method for inputs with `width` features."""
        features = self.qkv_features or width
        if features % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide the {features} features of the layer; change num_heads, "
                "or give qkv_features"
            )
        return make_position(
            self.position,
            num_heads=self.num_heads,
            head_dim=features // self.num_heads,
            width=width,
            train_length=self.train_length,
            causal=self.causal,
            options=self.options,
        )
