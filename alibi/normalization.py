"""Layer norm at the speed of the CPU."""

import flax.linen as nn
import jax
from jaxtyping import Array, Float


class LayerNorm(nn.LayerNorm):
    """Flax's layer norm of `[..., features]`, as one of `[rows, features]`.

    On CPUs its gradient takes a tenth of the time where the first dimension is 1, as for one long sequence, and
    about the same elsewhere. (On several devices, where the length is split, it would gather it; so on accelerators
    this is Flax's own.)
    """

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:  # type: ignore[override]
        if jax.default_backend() != "cpu":
            return super().__call__(x)
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(x.shape)
