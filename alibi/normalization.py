"""Layer norm at the speed of the CPU."""

import flax.linen as nn
import jax
from jaxtyping import Array, Float


class LayerNorm(nn.LayerNorm):
    """Flax's layer norm of `[..., features]`, as one of `[rows, features]`.

    On CPUs its gradient takes 0.8 to 0.9 of the time, and a tenth where the first dimension is 1 (one long sequence).
    """

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:  # type: ignore[override]
        if jax.default_backend() != "cpu":
            return super().__call__(x)
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(x.shape)
