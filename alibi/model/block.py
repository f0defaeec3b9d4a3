"""One layer of the decoder, on Flax's own attention layer, for any position method."""

from typing import Any

import flax.linen as nn
import flax.struct
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from alibi.attention import method_attention_fn
from alibi.attention.cache import Reading
from alibi.attention.flax import AttentionFn, Cached
from alibi.config import ModelConfig
from alibi.cpu.products import Products
from alibi.model.config import ACTIVATIONS, DTYPES, attention_options
from alibi.model.initialization import INITIALIZATIONS
from alibi.parallel.sharding import heads_sharding
from alibi.positions import PositionMethod
from alibi.positions.base import Params
from alibi.positions.bias import KnownPositions


@flax.struct.dataclass
class BlockCall:
    """What all layers of one forward pass get.

    Attributes:
      positions: of the tokens; None: 0, 1, ..., known when the program is traced.
      segment_ids: of the tokens; None: all are of one segment.
      reading: these tokens as the key-value cache takes them in; None: there is no cache.
      ascending: positions that are given rise from token to token.
    """

    positions: KnownPositions | None
    segment_ids: Int[Array, "batch length"] | None
    reading: Reading | None
    ascending: bool = flax.struct.field(pytree_node=False, default=False)


class Block(nn.Module):
    """A pre-layer-norm decoder layer: attention, then feed-forward, each on a residual branch.

    Attributes:
      config: of the model.
      sharding: how the batch dimension of activations lies on the devices; None: as the compiler chooses.
    """

    config: ModelConfig
    sharding: NamedSharding | None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length width"],
        position: PositionMethod,
        position_params: Params,
        call: BlockCall,
        deterministic: bool,
        last: int,
    ) -> Float[Array, "batch last width"]:
        """The layer's output for the last `last` tokens, of the dtype of `x`; its keys and values are of all.

        Args:
          position_params: what the position method shares between layers.
        """
        config, products = self.config, Products.of(self.config.products)
        # Layer norm runs in float32 whatever the compute dtype; the products cast its result.
        y = products.norm(nn.LayerNorm(config.norm_epsilon, name="attention_norm"), x)
        if position.learns_by_layer:
            position_params = {**position_params, **self.param("position", position.init_layer)}
        attention_fn = self._attention_fn(y, position, position_params, call, last)
        attention = self._attention(attention_fn, products)
        y = attention(y[:, -last:], y, deterministic=deterministic)
        x = x[:, -last:] + nn.Dropout(config.dropout)(y, deterministic)
        y = products.norm(nn.LayerNorm(config.norm_epsilon, name="feed_forward_norm"), x)
        y = self._dense(config.width, config.feed_forward, "up", products)(y)
        y = nn.Dropout(config.activation_dropout)(ACTIVATIONS[config.activation](y), deterministic)
        y = self._dense(config.feed_forward, config.width, "down", products)(y)
        return x + nn.Dropout(config.dropout)(y, deterministic)

    def _attention_fn(
        self,
        y: Float[Array, "batch length width"],
        position: PositionMethod,
        position_params: Params,
        call: BlockCall,
        last: int,
    ) -> AttentionFn:
        """What the position method and the cache make of attention in this layer, whose input is `y`."""
        positions = np.arange(y.shape[1]) if call.positions is None else call.positions
        # One array for queries and keys where all are queries: by that, skipping sees that they are the same.
        segments: Any = call.segment_ids
        if segments is not None and last < y.shape[1]:
            segments = segments[..., -last:], segments
        cached = None
        if call.reading is not None:
            cached = Cached(self.variable("cache", "held", lambda: None), call.reading)
        return method_attention_fn(
            position,
            position_params,
            y,
            query_positions=positions[..., -last:],
            key_positions=positions,
            segment_ids=segments,
            ascending=call.ascending,
            options=attention_options(self.config, heads_sharding(self.sharding)),
            cache=cached,
        )

    def _attention(self, attention_fn: AttentionFn, products: Products) -> nn.MultiHeadDotProductAttention:
        """Flax's own layer, into which `attention_fn` is injected."""
        config, initialization = self.config, INITIALIZATIONS[self.config.initialization]
        return nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads,
            dtype=DTYPES[config.dtype],
            dropout_rate=config.attention_dropout,
            broadcast_dropout=False,
            attention_fn=attention_fn,
            qkv_dot_general=products.dot_general,
            out_dot_general=products.dot_general,
            kernel_init=initialization.attention_in,
            bias_init=initialization.bias(config.width),
            out_kernel_init=initialization.attention_out,
            out_bias_init=nn.initializers.zeros,
            name="attention",
        )

    def _dense(self, inputs: int, features: int, name: str, products: Products) -> nn.Dense:
        initialization = INITIALIZATIONS[self.config.initialization]
        return nn.Dense(
            features,
            dtype=DTYPES[self.config.dtype],
            kernel_init=initialization.feed_forward,
            bias_init=initialization.bias(inputs),
            dot_general=products.dot_general,
            name=name,
        )
