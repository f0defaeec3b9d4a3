"""How the layers of the model start."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float, PRNGKeyArray

Initializer = Callable[..., Array]  # of a key, a shape and a dtype


@dataclasses.dataclass(frozen=True)
class Initialization:
    """The initializers of a decoder layer; its norms start as the identity, attention's output bias as 0.

    Attributes:
      attention_in: of the query, key and value matrices.
      attention_out: of the matrix behind attention.
      feed_forward: of both matrices there.
      bias: of all these but attention's output, for the number of inputs that a feature has.
    """

    attention_in: Initializer
    attention_out: Initializer
    feed_forward: Initializer
    bias: Callable[[int], Initializer]


def uniform_by_inputs(inputs: int) -> Initializer:
    """Uniform on +-1/sqrt(inputs): what PyTorch's `nn.Linear` does with its bias."""

    def initialize(key: PRNGKeyArray, shape: Sequence[int], dtype: Any) -> Float[Array, "..."]:
        return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

    return initialize


XAVIER = nn.initializers.xavier_uniform()

INITIALIZATIONS = {
    "xavier": Initialization(XAVIER, XAVIER, XAVIER, lambda inputs: nn.initializers.zeros),
    # The paper's code (fairseq): attention as in its MultiheadAttention, Xavier with a gain of
    # 1/sqrt(2) for what would be one matrix [width, 3 width]; all else as PyTorch leaves a
    # new `nn.Linear`, uniform on +-1/sqrt(inputs).
    "paper": Initialization(
        attention_in=nn.initializers.variance_scaling(0.5, "fan_avg", "uniform"),
        attention_out=XAVIER,
        feed_forward=nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
        bias=uniform_by_inputs,
    ),
}
