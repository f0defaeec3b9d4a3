"""Options of a decoder layer's attention besides its position method.

They enter Flax's own attention layer through its `attention_fn`, which gets queries, keys and
values after their projection, and gives the output projection its input.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from alibi.attention.backends import BACKENDS, REASONS
from alibi.attention.flax import AttentionFn
from alibi.config import ModelConfig
from alibi.cpu.products import Products
from alibi.model.initialization import INITIALIZATIONS
from alibi.positions.shapes import PerHead

# features of backends, by the key of `config.model` that needs them
FEATURES = {"normalizer": "sink", "logit_cap": "logit cap"}


def check_backend(config: ModelConfig) -> None:
    """Raises ValueError if the backend `model.attention` lacks an option of the config."""
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
    """Returns the logit of each head's sink in the layer `module`, by `model.normalizer`; None for
    plain softmax.

    "softmax1" has logits of 0 (Miller 2023). "sink" learns them, from 0 on (gpt-oss, arXiv
    2508.10925).
    """
    if config.normalizer == "softmax":
        return None
    if config.normalizer == "softmax1":
        return jnp.zeros(config.num_heads, jnp.float32)
    return module.param("sink", nn.initializers.zeros, (config.num_heads,), jnp.float32)


def normed_and_gated(
    config: ModelConfig,
    attention: AttentionFn,
    x: Float[Array, "batch q width"],
    dtype: Any,
) -> AttentionFn:
    """Returns `attention` with queries and keys normed before it, and its result gated, by the
    config; `attention` itself without both options.

    With `model.qk_norm` each head's queries and keys are divided by their root mean square and
    multiplied by learned numbers of each feature, alike for all heads, before position enters
    (Qwen3, arXiv 2505.09388; Gemma 3, arXiv 2503.19786). With `model.attention_gate` the result is
    multiplied, feature by feature, by sigmoid(x W) (Qiu et al. 2025, arXiv 2505.06708).

    Called in a layer's compact method, which gets the parameters.

    Args:
      x: the attention layer's input for the queries.
      dtype: of the products.
    """
    if not (config.qk_norm or config.attention_gate):
        return attention
    products, norms, gate = Products.of(config.products), [], None
    if config.qk_norm:
        names = ("query_norm", "key_norm")
        norms = [nn.RMSNorm(config.norm_epsilon, name=name) for name in names]
    if config.attention_gate:
        gate = nn.DenseGeneral(
            (config.num_heads, config.head_dim),
            use_bias=False,
            dtype=dtype,
            kernel_init=INITIALIZATIONS[config.initialization].attention_in,
            dot_general=products.dot_general,
            name="attention_gate",
        )(x)

    # Flax passes the keywords that the signature of the wrapped function names.
    @functools.wraps(attention)
    def changed(query: Array, key: Array, value: Array, **keywords: Any) -> Array:
        if norms:
            query, key = (
                products.norm(norm, side).astype(side.dtype)
                for norm, side in zip(norms, (query, key), strict=True)
            )
        attended = attention(query, key, value, **keywords)
        return attended if gate is None else attended * jax.nn.sigmoid(gate)

    return changed
