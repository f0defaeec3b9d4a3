"""FIRE: a function of the distance, progressively scaled with the query's position (Li et al. 2023,
arXiv 2310.04418).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.config.fields import number
from alibi.positions.base import MOST_TOKENS, About, Params, PositionMethod
from alibi.positions.bias import Bias, per_head, shared
from alibi.positions.distance import rows_and_columns
from alibi.positions.shapes import KeyPositions, QueryPositions, Tile

HIDDEN = 32  # units of the network
ROWS = 64  # queries whose hidden units exist at a time
EPSILON = 1e-6  # added to the denominator, as in the paper's code


class FireBias(Bias):
    """f(psi(|i - j|) / psi(max(threshold, i))) with psi(x) = log(c x + 1), for query i and key j
    (section 3.1).

    Attributes:
      hidden_kernel, hidden_bias, kernel: parameters of f, a network with a hidden layer of ReLUs.
        The paper's code also adds a bias to the outputs, a constant in each row of logits, which
        softmax ignores.
      c: learned, above 0.
      threshold: learned, above 0, in tokens.
    """

    hidden_kernel: Float[Array, " hidden"] = shared()
    hidden_bias: Float[Array, " hidden"] = shared()
    kernel: Float[Array, "hidden heads"] = per_head(axis=1)
    c: Float[Array, ""] = shared()
    threshold: Float[Array, ""] = shared()

    def __call__(self, query_positions: QueryPositions, key_positions: KeyPositions) -> Tile:
        rows, columns = rows_and_columns(query_positions, key_positions)
        scale = self._psi(jnp.maximum(rows.astype(jnp.float32), self.threshold)) + EPSILON
        relative = self._psi(jnp.abs(rows - columns).astype(jnp.float32)) / scale
        by_row = jax.lax.map(self._network, jnp.moveaxis(relative, -2, 0), batch_size=ROWS)
        return jnp.moveaxis(by_row, (0, -1), (-2, -3))

    def _psi(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return jnp.log1p(self.c * x)

    @jax.checkpoint  # the hidden units of all pairs would fill the memory until the backward pass
    def _network(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape heads"]:
        hidden = jnp.multiply.outer(x, self.hidden_kernel)
        bias = self.hidden_bias.reshape((1,) * x.ndim + (-1,))
        return jnp.matmul(jax.nn.relu(hidden + bias), self.kernel, precision="highest")


@dataclasses.dataclass(frozen=True)
class Fire(PositionMethod):
    """A learned function of the distance relative to the query's position, another in each layer.

    Config: `position=fire,position_options.threshold=32`

    Attributes:
      threshold: in tokens. A learned multiple of it is the least divisor. 0 means a quarter of the
        training length, as in the paper's code (512 for 2,048).
    """

    about = About(
        formula="f(ln(c (i - j) + 1) / ln(c max(T, i) + 1)), f a network with 32 hidden units, c and T "
        "learned, T from L / 4 on",
        source="Li et al. 2023, [arXiv 2310.04418](https://arxiv.org/abs/2310.04418), section 3.1",
        caveats="beyond the threshold it is not a function of the distance, so each pair of query and key is computed",
    )

    follow_length = (("threshold", "first_threshold"),)

    threshold: int = number(0, at_least=0, at_most=MOST_TOKENS)

    @property
    def first_threshold(self) -> int:
        """`threshold` or its default, in tokens."""
        return self.threshold or max(self.train_length // 4, 1)

    def init_layer(self, key: PRNGKeyArray) -> Params:
        return {
            "hidden_kernel": linear_parameter(key, 0, (HIDDEN,), 1),
            "hidden_bias": linear_parameter(key, 1, (HIDDEN,), 1),
            "kernel": linear_parameter(key, 2, (HIDDEN, self.num_heads), HIDDEN),
            "c": jnp.asarray(0.1, jnp.float32),
            "threshold_multiple": jnp.asarray(1.0, jnp.float32),
        }

    def bias(self, params: Params) -> FireBias:
        return FireBias(
            hidden_kernel=params["hidden_kernel"],
            hidden_bias=params["hidden_bias"],
            kernel=params["kernel"],
            c=jnp.abs(params["c"]),
            threshold=jnp.abs(params["threshold_multiple"]) * self.first_threshold,
        )


def linear_parameter(
    key: PRNGKeyArray, index: int, shape: tuple[int, ...], inputs: int
) -> Float[Array, "..."]:
    """Returns a layer's parameter number `index`, uniform on +-1/sqrt(inputs), as PyTorch's linear
    layers begin.
    """
    bound = inputs**-0.5
    return jax.random.uniform(jax.random.fold_in(key, index), shape, jnp.float32, -bound, bound)
