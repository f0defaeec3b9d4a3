"""What defines a model besides its position method and vocabulary: the section `model` of a config, checked."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import ml_collections
from jaxtyping import Array

from alibi.attention import AttentionOptions
from alibi.attention.backends import OF_SEQUENCES
from alibi.config.ranges import check_numbers
from alibi.model.initialization import INITIALIZATIONS

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,  # Flax's default, by tanh
    "gelu_exact": functools.partial(nn.gelu, approximate=False),
    "silu": nn.silu,
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
CHOICES: dict[str, Collection[str]] = {
    "activation": ACTIVATIONS,
    "dtype": DTYPES,
    "embedding": ("tied", "adaptive"),
    "initialization": INITIALIZATIONS,
    "attention": ("auto", *OF_SEQUENCES),
    "products": ("auto", "plain"),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The keys of `config.model`, by the same names; configs/base.py says what each of them is.

    Raises:
      ValueError: num_heads that doesn't divide width, a number out of its range, an unknown name of a choice.
    """

    num_layers: int
    width: int
    num_heads: int
    feed_forward: int
    activation: str = "relu"
    final_norm: bool = True
    norm_epsilon: float = 1e-6
    initialization: str = "xavier"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    embedding: str = "tied"
    cutoffs: tuple[int, ...] = ()
    adaptive_factor: int = 4
    softmax_dropout: float = 0.0
    padding_rows: bool = False
    dtype: str = "float32"
    remat: bool = False
    scan_layers: bool = False
    window: int = 0
    skip_epsilon: float = 0.0
    attention: str = "auto"
    products: str = "auto"
    logits_chunk: int = 2048

    @classmethod
    def of(cls, section: ml_collections.ConfigDict) -> "ModelConfig":
        """The configuration that the section `model` of a config gives; ValueError as above."""
        return cls(**{**section, "cutoffs": tuple(section["cutoffs"])})

    def __post_init__(self) -> None:
        check_numbers(self, "model.")
        if self.width % self.num_heads:
            divisors = [n for n in range(1, self.width + 1) if self.width % n == 0]
            nearest = sorted(sorted(divisors, key=lambda n: abs(n - self.num_heads))[:3])
            raise ValueError(
                f"model.num_heads={self.num_heads} does not divide model.width={self.width}; "
                f"use {', '.join(map(str, nearest))}"
            )
        for key, choices in CHOICES.items():
            if getattr(self, key) not in choices:
                raise ValueError(f"model.{key}={getattr(self, key)!r} is unknown; use one of {', '.join(choices)}")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    def attention_options(self, sharding: Any) -> AttentionOptions:
        """How the layers' attention is computed, on devices over which its inputs lie by `sharding`."""
        # The dense formula alone is differentiable in any way.
        plain = self.products == "plain" and self.attention == "auto"
        return AttentionOptions(
            window=self.window or None,
            skip_epsilon=self.skip_epsilon,
            sharding=sharding,
            backend="reference" if plain else self.attention,
        )
