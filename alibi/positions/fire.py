"""FIRE: a function of the distance, progressively scaled by the query's position (Li et al. 2023, arXiv 2310.04418)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import Bias, per_head, shared
from alibi.positions.distance import rows_and_columns

HIDDEN = 32  # units between the one input of the network and its heads
EPSILON = 1e-6  # added to the denominator, as in the paper's code


class FireBias(Bias):
    """f(psi(|i - j|) / psi(max(threshold, i))) with psi(x) = log(c x + 1), for query i and key j (section 3.1).

    Attributes:
      hidden_kernel, hidden_bias, kernel: of f, a network with one hidden layer of ReLUs. A bias of its outputs,
        which the paper's code has, would add a constant to each row of logits, and softmax ignores that.
      c, threshold: learned, above 0; the threshold in tokens.
    """

    hidden_kernel: Float[Array, " hidden"] = shared()
    hidden_bias: Float[Array, " hidden"] = shared()
    kernel: Float[Array, "hidden heads"] = per_head(axis=1)
    c: Float[Array, ""] = shared()
    threshold: Float[Array, ""] = shared()

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*#batch heads q k"]:
        rows, columns = rows_and_columns(query_positions, key_positions)
        distance = jnp.log1p(self.c * jnp.abs(rows - columns).astype(jnp.float32))
        scale = jnp.log1p(self.c * jnp.maximum(rows.astype(jnp.float32), self.threshold))
        normalized = (distance / (scale + EPSILON))[..., None]
        hidden = jax.nn.relu(normalized * _last(self.hidden_kernel, normalized) + _last(self.hidden_bias, normalized))
        return jnp.moveaxis(jnp.matmul(hidden, self.kernel, precision="highest"), -1, -3)


def _last(x: Float[Array, " features"], like: Array) -> Array:
    return x.reshape((1,) * (like.ndim - 1) + x.shape)


@dataclasses.dataclass(frozen=True)
class Fire(PositionMethod):
    """A learned function of the distance relative to the query's position, in each layer its own.

    Attributes:
      threshold: tokens, of which a learned multiple is the least position by which distances are scaled.
    """

    about = About(
        formula="f(ln(c (i - j) + 1) / ln(c max(T, i) + 1)), f a network with 32 hidden units, c and T learned",
        source="Li et al. 2023, [arXiv 2310.04418](https://arxiv.org/abs/2310.04418), section 3.1",
        caveats="no function of the distance alone, so it is computed for each pair of query and key",
    )

    threshold: int = 512

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise ValueError(f"fire needs a threshold of at least 1 token, such as 512, and got {self.threshold}")

    def init_layer(self, key: PRNGKeyArray) -> Params:
        def uniform(number: int, shape: tuple[int, ...], inputs: int) -> Array:
            bound = inputs**-0.5  # as PyTorch starts its linear layers
            return jax.random.uniform(jax.random.fold_in(key, number), shape, minval=-bound, maxval=bound)

        return {
            "hidden_kernel": uniform(0, (HIDDEN,), 1),
            "hidden_bias": uniform(1, (HIDDEN,), 1),
            "kernel": uniform(2, (HIDDEN, self.num_heads), HIDDEN),
            "c": jnp.asarray(0.1),
            "threshold_multiple": jnp.asarray(1.0),
        }

    def bias(self, params: Params) -> FireBias:
        return FireBias(
            hidden_kernel=params["hidden_kernel"],
            hidden_bias=params["hidden_bias"],
            kernel=params["kernel"],
            c=jnp.abs(params["c"]),
            threshold=jnp.abs(params["threshold_multiple"]) * self.threshold,
        )
