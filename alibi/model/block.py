"""A layer: attention with any position method, and a feed-forward layer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray

from alibi.attention.cache import EMPTY, Reading
from alibi.attention.call import AttentionOptions
from alibi.attention.flax import AttentionFn
from alibi.attention.methods import Cached, method_attention_fn
from alibi.config import ModelConfig
from alibi.model.attention import make_attention, sink_logits
from alibi.model.initialization import INITIALIZATIONS
from alibi.model.norms import make_norm
from alibi.model.positions import LayerKind, bias_scale, init_position, scaled_queries
from alibi.numerics.products import Products
from alibi.numerics.target import current_target
from alibi.parallel.sharding import heads_sharding
from alibi.positions.base import Params
from alibi.positions.shapes import KnownPositions

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,  # Flax's default, by tanh
    "gelu_exact": functools.partial(nn.gelu, approximate=False),
    "silu": nn.silu,
}
UP = "up"  # names the feed-forward layer's wide products


@flax.struct.dataclass
class BlockCall:
    """The arguments that all layers share in a forward pass.

    Attributes:
      positions: the tokens' positions. Defaults to 0, 1, ..., known when the program is traced.
      segment_ids: the tokens' segments. Defaults to a single one.
      reading: for each window, how its key-value cache reads the tokens, or None without a cache.
      ascending: `positions` rise from token to token.
      reach: the last position that each token sees under the causal mask. Defaults to its own.
      causal: a token sees no later ones, except those in `reach`. Defaults to the position method's.
    """

    positions: KnownPositions | None
    segment_ids: Int[Array, "batch length"] | None
    reading: dict[int, Reading] | None
    ascending: bool = flax.struct.field(pytree_node=False, default=False)
    reach: Int[Array, "batch length"] | None = None
    causal: bool | None = flax.struct.field(pytree_node=False, default=None)

    def placed(self, place: Callable[[Any], Array]) -> "BlockCall":
        """Returns the call with position p at place(p), also for the tokens in the cache."""
        reading = {}
        for window, each in (self.reading or {}).items():
            held = each.after.positions
            held = jnp.where(held == EMPTY, EMPTY, place(held))
            reading[window] = each.replace(after=each.after.replace(positions=held))
        return dataclasses.replace(self, positions=place(self.positions), reading=reading or None)


class Block(nn.Module):
    """A layer of attention and a feed-forward layer, each on a residual branch, with norms where
    `model.norms` says.

    Attributes:
      config: the model's config.
      sharding: how activations are split over devices. Defaults to the compiler's choice.
    """

    config: ModelConfig
    sharding: NamedSharding | None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length width"],
        kind: LayerKind,
        shared: Params,
        call: BlockCall,
        deterministic: bool,
        last: int,
    ) -> Float[Array, "batch last width"]:
        """Returns the layer's output for the `last` last tokens, in the dtype of `x`. Keys and values
        are computed for all tokens.

        Args:
          shared: parameters that the position method shares between layers.
        """
        config = self.config
        products = Products.of(config.products, jnp.dtype(config.dtype))

        def norm(name: str, x: Array) -> Array:
            # in float32 whatever the compute dtype; the products cast its result
            return products.norm(make_norm(config, name), x)

        normed = norm("attention_norm", x) if config.norms.startswith("before") else x
        of_layer = module_params(
            self, functools.partial(init_position, kind.position, kind.logit_scale)
        )
        attention_fn = self._attention_fn(normed, kind, {**shared, **of_layer}, call, last)
        queries = normed[:, -last:]
        y = make_attention(config, attention_fn, queries)(
            queries, normed, deterministic=deterministic
        )
        y = norm("attention_norm", y) if config.norms == "behind" else y
        before = x[:, -last:]
        x = before + nn.Dropout(config.dropout)(y, deterministic).astype(x.dtype)
        if config.norms == "after_twice":
            x = before + norm("attention_output_norm", x)
        if config.norms.startswith("after"):
            x = norm("attention_norm", x)
        if not config.parallel:
            queries = norm("feed_forward_norm", x) if config.norms == "before" else x
        elif config.norms == "before_each":
            queries = norm("feed_forward_norm", before)
        # The compiler for TPUs finds better loops for matrices (results/benchmarks/compiled.md).
        if current_target()[0] == "tpu":
            queries = queries.reshape(-1, queries.shape[-1])
        y = self._feed_forward(queries, products, deterministic).reshape(x.shape)
        y = norm("feed_forward_norm", y) if config.norms == "behind" else y
        x = x + nn.Dropout(config.dropout)(y, deterministic).astype(x.dtype)
        return norm("feed_forward_norm", x) if config.norms.startswith("after") else x

    def _feed_forward(
        self, x: Float[Array, "*tokens width"], products: Products, deterministic: bool
    ) -> Float[Array, "*tokens width"]:
        config = self.config
        initialization = INITIALIZATIONS[config.initialization]
        dense = functools.partial(
            nn.Dense,
            use_bias=config.feed_forward_bias,
            dtype=products.layer_dtype,
            kernel_init=initialization.feed_forward,
            dot_general=products.dot_general,
        )

        def wide(name: str) -> Float[Array, "*tokens features"]:
            layer = dense(
                config.feed_forward,
                use_bias=config.feed_forward_bias and config.up_bias,
                bias_init=initialization.bias(config.width),
                name=name,
            )
            return checkpoint_name(layer(x), UP)

        activated, hidden = ACTIVATIONS[config.activation], wide("up")
        hidden = activated(wide("gate")) * hidden if config.gated else activated(hidden)
        hidden = nn.Dropout(config.activation_dropout)(hidden, deterministic)
        narrow = dense(
            config.width, bias_init=initialization.bias(config.feed_forward), name="down"
        )
        return narrow(hidden)

    def _attention_fn(
        self,
        y: Float[Array, "batch length width"],
        kind: LayerKind,
        params: Params,
        call: BlockCall,
        last: int,
    ) -> AttentionFn:
        """Returns attention with the position method and the cache, for the layer input `y`."""
        config = self.config
        positions = np.arange(y.shape[1]) if call.positions is None else call.positions
        # One array if all tokens are queries, so that skipping knows that both sides are equal.
        segments: Any = call.segment_ids
        if segments is not None and last < y.shape[1]:
            segments = segments[..., -last:], segments
        cached = None
        if call.reading is not None:
            cached = Cached(self.variable("cache", "held", lambda: None), call.reading[kind.window])
        scale = functools.partial(scaled_queries, kind.logit_scale, kind.position, params)
        # Only the dense formula can be differentiated in any way.
        plain = config.products == "plain" and config.attention == "auto"
        options = AttentionOptions(
            window=kind.window or None,
            skip_epsilon=config.skip_epsilon,
            sharding=heads_sharding(self.sharding),
            backend="reference" if plain else config.attention,
            logit_cap=config.logit_cap or None,
        )
        return method_attention_fn(
            kind.position,
            params,
            y,
            query_positions=positions[..., -last:],
            key_positions=positions,
            segment_ids=segments,
            causal=call.causal,
            reach=None if call.reach is None else call.reach[..., -last:],
            ascending=call.ascending,
            scale=scale if kind.logit_scale else None,
            bias_scale=bias_scale(kind.logit_scale, kind.position, params),
            max_position=config.max_position,
            sink=sink_logits(self, config),
            options=options,
            cache=cached,
        )


def module_params(module: nn.Module, init: Callable[[PRNGKeyArray], Params]) -> Params:
    """Returns a module's parameters "position" as float32. A method without any adds nothing to the
    tree.
    """
    made = jax.eval_shape(lambda: init(jax.random.key(0)))
    params = module.param("position", init) if made else {}
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
