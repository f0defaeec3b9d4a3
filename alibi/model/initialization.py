"""Initial values of the layers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float, PRNGKeyArray

Initializer = Callable[..., Array]  # key, shape and dtype to an array


@dataclasses.dataclass(frozen=True)
class Initialization:
    """The initializers in a decoder layer. Norms start as the identity, attention's output bias as 0.

    Attributes:
      attention_in: for the query, key and value matrices.
      attention_out: for attention's output matrix.
      feed_forward: for both matrices in a feed-forward layer.
      bias: for the other biases, as a function of the number of inputs.
    """

    attention_in: Initializer
    attention_out: Initializer
    feed_forward: Initializer
    bias: Callable[[int], Initializer]


def uniform_by_inputs(inputs: int) -> Initializer:
    """Returns an initializer uniform on +-1/sqrt(inputs), as PyTorch's `nn.Linear` has for its bias."""

    def initialize(key: PRNGKeyArray, shape: Sequence[int], dtype: Any) -> Float[Array, "..."]:
        return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

    return initialize


XAVIER = nn.initializers.xavier_uniform()

INITIALIZATIONS = {
    "xavier": Initialization(XAVIER, XAVIER, XAVIER, lambda inputs: nn.initializers.zeros),
    # The paper's code (fairseq): attention as in its MultiheadAttention, Xavier with the gain 1/sqrt(2)
    # for the joint matrix [width, 3 width], and all else as in PyTorch's `nn.Linear`, uniform on
    # +-1/sqrt(inputs).
    "paper": Initialization(
        attention_in=nn.initializers.variance_scaling(0.5, "fan_avg", "uniform"),
        attention_out=XAVIER,
        feed_forward=nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
        bias=uniform_by_inputs,
    ),
}
