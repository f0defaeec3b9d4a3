"""A block's attention layer, with its options besides the position method.

The options enter through the layer's `attention_fn`, which gets projected queries, keys and values.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from alibi.attention.backends import BACKENDS, REASONS
from alibi.attention.flax import AttentionFn
from alibi.config import ModelConfig
from alibi.model.initialization import INITIALIZATIONS
from alibi.model.norms import make_norm
from alibi.numerics.products import Products
from alibi.positions.shapes import PerHead

# keys of `config.model` that need a feature of the backend
FEATURES = {"normalizer": "sink", "logit_cap": "logit cap"}


def check_backend(config: ModelConfig) -> None:
    """Raises ValueError if the backend `model.attention` lacks an option in the config."""
    if config.attention not in BACKENDS:  # auto chooses a backend that has them
        return
    for key, feature in FEATURES.items():
        value, default = getattr(config, key), ModelConfig.__dataclass_fields__[key].default
        if value != default and feature not in BACKENDS[config.attention].features:
            raise ValueError(
                f"model.{key}={value} doesn't go with model.attention={config.attention}: "
                f"{REASONS[feature]}; use model.attention=auto"
            )


def sink_logits(module: nn.Module, config: ModelConfig) -> PerHead | None:
    """Returns the logits of the heads' sinks in the layer `module`, or None for plain softmax.

    With `model.normalizer` softmax1 they are 0 (Miller 2023). With sink they are learned from 0 on
    (gpt-oss, arXiv 2508.10925).
    """
    if config.normalizer == "softmax":
        return None
    if config.normalizer == "softmax1":
        return jnp.zeros(config.num_heads, jnp.float32)
    return module.param("sink", nn.initializers.zeros, (config.num_heads,), jnp.float32)


def make_attention(
    config: ModelConfig, attention_fn: AttentionFn, x: Float[Array, "batch q width"]
) -> nn.Module:
    """Returns a block's layer "attention": Flax's own, or `GroupedAttention` for heads and biases that
    Flax's lacks. A block's compact method calls it and gets the options' parameters.

    Args:
      attention_fn: attention with the position method and the cache.
      x: the layer's input for the queries.
    """
    initialization = INITIALIZATIONS[config.initialization]
    attention_fn = _with_options(config, attention_fn, x)
    if config.kv_heads != config.num_heads or config.qkv_bias != config.out_bias:
        return GroupedAttention(config, attention_fn, name="attention")
    products = Products.of(config.products, jnp.dtype(config.dtype))
    return nn.MultiHeadDotProductAttention(
        num_heads=config.num_heads,
        qkv_features=config.num_heads * config.head_dim,
        use_bias=config.qkv_bias,
        dtype=products.layer_dtype,
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


class GroupedAttention(nn.Module):
    """Flax's `MultiHeadDotProductAttention`, with the same names and `attention_fn`, but fewer heads
    for keys than for queries (arXiv 2305.13245), or a bias on the inputs or the output alone.

    Attributes:
      config: the model's config.
      attention_fn: a function on queries `[batch, q, heads, head_dim]`, keys and values `[batch, k,
        kv_heads, head_dim]`.
    """

    config: ModelConfig
    attention_fn: AttentionFn

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "batch q width"],
        inputs_k: Float[Array, "batch k width"],
        *,
        deterministic: bool,
    ) -> Float[Array, "batch q width"]:
        """Returns attention from queries for `inputs_q` to keys for `inputs_k`."""
        config = self.config
        initialization = INITIALIZATIONS[config.initialization]
        products = Products.of(config.products, jnp.dtype(config.dtype))
        dense = functools.partial(
            nn.DenseGeneral, dtype=products.layer_dtype, dot_general=products.dot_general
        )
        projected = [
            dense(
                (heads, config.head_dim),
                use_bias=config.qkv_bias,
                kernel_init=initialization.attention_in,
                bias_init=initialization.bias(config.width),
                name=name,
            )(inputs)
            for name, heads, inputs in (
                ("query", config.num_heads, inputs_q),
                ("key", config.kv_heads, inputs_k),
                ("value", config.kv_heads, inputs_k),
            )
        ]
        drops = config.attention_dropout > 0 and not deterministic
        attended = self.attention_fn(
            *projected,
            dropout_rng=self.make_rng("dropout") if drops else None,
            dropout_rate=config.attention_dropout,
            broadcast_dropout=False,
            deterministic=deterministic,
        )
        return dense(
            config.width,
            axis=(-2, -1),
            use_bias=config.out_bias,
            kernel_init=initialization.attention_out,
            name="out",
        )(attended)


def _with_options(
    config: ModelConfig, attention: AttentionFn, x: Float[Array, "batch q width"]
) -> AttentionFn:
    """Returns `attention` with the config's options around it. It gets arrays in `model.dtype`.

    `model.clip_qkv` bounds queries, keys and values. `model.qk_norm` divides each head's queries and
    keys by their root mean square and multiplies them by learned numbers for each feature, which all
    heads share, before position enters (Qwen3, arXiv 2505.09388; Gemma 3, arXiv 2503.19786).
    `model.qk_norm_joint` uses the model's norm over all heads' features instead (MPT).
    `model.attention_scale` replaces 1 / sqrt(head_dim). `model.attention_gate` multiplies the result
    by sigmoid(x W) (Qiu et al. 2025, arXiv 2505.06708).
    """
    factor = config.attention_scale * math.sqrt(config.head_dim) or 1.0
    dtype = jnp.dtype(config.dtype)
    products, norms, gate = Products.of(config.products, dtype), [], None
    if config.qk_norm:
        norms = [
            make_norm(config, name)
            if config.qk_norm_joint
            else nn.RMSNorm(config.norm_epsilon, name=name)
            for name in ("query_norm", "key_norm")
        ]
    if config.attention_gate:
        gate = nn.DenseGeneral(
            (config.num_heads, config.head_dim),
            use_bias=False,
            dtype=products.layer_dtype,
            kernel_init=INITIALIZATIONS[config.initialization].attention_in,
            dot_general=products.dot_general,
            name="attention_gate",
        )(x)

    def normed(norm: nn.Module, side: Array) -> Array:
        heads = side.shape[-2:]
        features = side.reshape(*side.shape[:-2], -1) if config.qk_norm_joint else side
        return products.norm(norm, features).astype(side.dtype).reshape(*side.shape[:-2], *heads)

    # Flax passes the keywords that the signature of the wrapped function names.
    @functools.wraps(attention)
    def changed(query: Array, key: Array, value: Array, **keywords: Any) -> Array:
        if bound := config.clip_qkv:
            query, key, value = (jnp.clip(side, -bound, bound) for side in (query, key, value))
        if norms:
            query, key = (
                normed(norm, side) for norm, side in zip(norms, (query, key), strict=True)
            )
        if factor != 1:
            query = (factor * query.astype(jnp.float32)).astype(query.dtype)
        attended = attention(query, key, value, **keywords | {"dtype": dtype})
        return attended if gate is None else attended * jax.nn.sigmoid(gate).astype(attended.dtype)

    return changed
