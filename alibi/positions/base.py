"""What a position method is: everything that the paper compares differs only in this.

A method is a frozen dataclass without arrays. Its fields are its options; what it
learns, it makes in `init` and gets back as `params` in each of the three places where
position can enter a transformer. It fills in only those that it uses. Plain functions
of arrays, so that a method serves Linen, NNX and bare JAX alike.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PRNGKeyArray

Params = Mapping[str, Any]
Positions = Integer[Array, "*#batch length"]
# What attention takes: NumPy's are known when it is traced, so that it can skip what they hide.
KnownPositions = Integer[Array | np.ndarray, "*#batch _"]


def rows_and_columns(
    of_queries: Integer[Array, "*#batch q"], of_keys: Integer[Array, "*#batch k"]
) -> tuple[Integer[Array, "*#batch q 1"], Integer[Array, "*#batch 1 k"]]:
    """Both as the sides of `[*batch, q, k]` blocks, of one rank; either may lack batch dimensions."""
    rank = max(of_queries.ndim, of_keys.ndim)
    # Signed, since differences of unsigned positions wrap around.
    rows, columns = (
        jnp.asarray(x, jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype) for x in (of_queries, of_keys)
    )
    rows, columns = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (rows, columns))
    return jnp.expand_dims(rows, -1), jnp.expand_dims(columns, -2)


def check_integers(name: str, positions: Array | np.ndarray) -> None:
    """Raises ValueError where positions are no integers."""
    dtype = jnp.result_type(positions)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"{name}_positions have dtype {dtype}; they must be integers, "
            "since floating-point positions make neighbouring keys equal at long lengths"
        )


@runtime_checkable
class Bias(Protocol):
    """A pytree that gives the bias of any block of logits from the positions of its rows and columns."""

    def __call__(
        self, query_positions: Integer[Array, "*#batch q"], key_positions: Integer[Array, "*#batch k"]
    ) -> Float[Array, "*#batch heads q k"]:
        """What is added to the logits after their scaling by 1/sqrt(head_dim), float32."""

    def of_heads(self, heads: Integer[Array, " some"]) -> "Bias":
        """The same bias for these heads alone."""


@dataclasses.dataclass(frozen=True)
class PositionMethod:
    """A method that adds nothing; subclasses override what they use.

    Attributes:
      num_heads: attention heads.
      head_dim: features of a head.
      width: features of the residual stream.
      train_length: tokens of a training sequence.
    """

    num_heads: int
    head_dim: int
    width: int
    train_length: int

    learns: ClassVar[bool] = False  # whether `init` makes parameters

    @property
    def max_length(self) -> int | None:
        """The longest sequence, in tokens, that the method is defined for; None: any."""
        return None

    def check_length(self, length: int) -> None:
        """Raises ValueError if the method is not defined for `length` tokens."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"position method {type(self).__name__} has {self.max_length} positions and got a sequence of "
                f"{length} tokens; evaluate at {self.max_length} or less, or train with a longer length"
            )

    def init(self, key: PRNGKeyArray) -> Params:
        """Initial parameters, float32."""
        del key
        return {}

    def embed(
        self, params: Params, x: Float[Array, "*batch length width"], positions: Positions
    ) -> Float[Array, "*batch length width"]:
        """Token embeddings `x` with position added."""
        del params, positions
        return x

    def rotate(
        self,
        params: Params,
        query: Float[Array, "*batch q heads head_dim"],
        key: Float[Array, "*batch k heads head_dim"],
        query_positions: Integer[Array, "*#batch q"],
        key_positions: Integer[Array, "*#batch k"],
    ) -> tuple[Float[Array, "*batch q heads head_dim"], Float[Array, "*batch k heads head_dim"]]:
        """Queries and keys with position turned into them."""
        del params, query_positions, key_positions
        return query, key

    def bias(self, params: Params) -> Bias | None:
        """The bias of the logits, or None."""
        del params
        return None
