"""Initial values of the layers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float, PRNGKeyArray

Initializer = Callable[..., Array]  # of a key, a shape and a dtype


@dataclasses.dataclass(frozen=True)
class Initialization:
    """The initializers of a decoder layer; norms start as the identity, attention's output bias as
    0.

    Attributes:
      attention_in: of the query, key and value matrices.
      attention_out: of the output matrix of attention.
      feed_forward: of both matrices of the feed-forward layers.
      bias: of the other biases, a function of the number of inputs.
    """

    attention_in: Initializer
    attention_out: Initializer
    feed_forward: Initializer
    bias: Callable[[int], Initializer]


def uniform_by_inputs(inputs: int) -> Initializer:
    """Returns an initializer uniform on +-1/sqrt(inputs), as that of PyTorch's `nn.Linear` for its
    bias.
    """

    def initialize(key: PRNGKeyArray, shape: Sequence[int], dtype: Any) -> Float[Array, "..."]:
        return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

    return initialize


XAVIER = nn.initializers.xavier_uniform()

INITIALIZATIONS = {
    "xavier": Initialization(XAVIER, XAVIER, XAVIER, lambda inputs: nn.initializers.zeros),
    # The paper's code (fairseq): attention as in its MultiheadAttention, Xavier with a gain of
    # 1/sqrt(2) for the joint matrix [width, 3 width]; all else as in PyTorch's `nn.Linear`,
    # uniform on +-1/sqrt(inputs).
    "paper": Initialization(
        attention_in=nn.initializers.variance_scaling(0.5, "fan_avg", "uniform"),
        attention_out=XAVIER,
        feed_forward=nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
        bias=uniform_by_inputs,
    ),
}
