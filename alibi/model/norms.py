"""A model's norms, chosen in `model.norm`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from alibi.config import ModelConfig


class OffsetRMSNorm(nn.Module):
    """RMS norm with a scale of 1 plus the parameter (Gemma, arXiv 2403.08295).

    Attributes:
      epsilon: added to the mean square.
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        """Returns `x` normed over the last dimension, float32."""
        offset = self.param("scale", nn.initializers.zeros, x.shape[-1:], jnp.float32)
        scale = (1 + offset.astype(jnp.float32)).reshape((1,) * (x.ndim - 1) + (-1,))
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + self.epsilon) * scale


def is_norm_sum(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Returns whether an operation sums the last axis of at most three, as a layer's norms do.

    `jax.checkpoint` takes it as a policy: to keep the sums is cheaper than to compute them again. With
    four axes it may be a softmax over all keys.
    """
    return (
        primitive.name == "reduce_sum"
        and inputs[0].ndim < 4
        and params["axes"] == (inputs[0].ndim - 1,)
    )


def make_norm(config: ModelConfig, name: str) -> nn.Module:
    """Returns the model's norm over features, with parameters under `name`."""
    if config.norm == "rms_one":
        return OffsetRMSNorm(config.norm_epsilon, name=name)
    if config.norm == "rms":
        return nn.RMSNorm(config.norm_epsilon, name=name)
    return nn.LayerNorm(config.norm_epsilon, use_bias=config.norm == "layer", name=name)
