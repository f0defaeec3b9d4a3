"""The functions and types behind the names in the config's section `model`."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array

from alibi.attention import AttentionOptions
from alibi.config import ModelConfig

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,  # Flax's default, by tanh
    "gelu_exact": functools.partial(nn.gelu, approximate=False),
    "silu": nn.silu,
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@functools.singledispatch
def attention_options(config: ModelConfig, sharding: Any) -> AttentionOptions:
    """Returns the options of the layers' attention, whose inputs lie on the devices by `sharding`."""
    # Only the dense formula can be differentiated in any way.
    plain = config.products == "plain" and config.attention == "auto"
    return AttentionOptions(
        window=config.window or None,
        skip_epsilon=config.skip_epsilon,
        sharding=sharding,
        backend="reference" if plain else config.attention,
    )
