"""Options of a decoder layer's attention besides its position method."""

import flax.linen as nn
import jax.numpy as jnp

from alibi.attention.backends import BACKENDS, REASONS
from alibi.config import ModelConfig
from alibi.positions.shapes import PerHead

FEATURES = {"normalizer": "sink"}  # of backends, by the key of `config.model` that needs it


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
        return jnp.zeros(config.num_heads)
    return module.param("sink", nn.initializers.zeros, (config.num_heads,))
