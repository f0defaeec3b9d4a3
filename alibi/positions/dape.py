"""Data-adaptive position encoding (DAPE; Zheng et al. 2024, arXiv 2405.14722)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.config.fields import choice, number
from alibi.positions.base import About, Params, PositionMethod
from alibi.positions.bias import Bias, like, shared
from alibi.positions.fire import linear_parameter
from alibi.positions.kerple import KerpleLog
from alibi.positions.registry import make_position
from alibi.positions.shapes import KeyPositions, QueryPositions, Tile, Visible


class DapeBias(Bias):
    """z + B + f([z; B]) for the logits z and biases B of all heads, for each pair.

    Attributes:
      bias: B.
      first, first_bias, second: f's two layers. A second bias would add a constant to each row of
        logits, which the softmax without a sink ignores.
    """

    reads_rows = True
    mixes_heads = True
    bias: Bias = shared()
    first: Float[Array, "twice hidden"] = shared()
    first_bias: Float[Array, " hidden"] = shared()
    second: Float[Array, "hidden heads"] = shared()

    def of_rows(
        self,
        logits: Tile,
        visible: Visible,
        query_positions: QueryPositions,
        key_positions: KeyPositions,
    ) -> Tile:
        bias = like(self.bias(query_positions, key_positions), logits)
        both = [jnp.where(visible, x, 0.0) for x in (logits, bias)]
        inputs = jnp.concatenate(both, axis=-3)

        def layer(x: Array, kernel: Array) -> Array:
            return jnp.einsum("...iqk,io->...oqk", x, kernel, precision="highest")

        hidden = layer(inputs, self.first) + like(self.first_bias[:, None, None], logits)
        return logits + bias + layer(jax.nn.leaky_relu(hidden), self.second)


@dataclasses.dataclass(frozen=True)
class Dape(PositionMethod):
    """A small network in each layer corrects the logits of a pair of query and key from the logits and
    biases of all heads.

    Config: `position=dape,position_options.of=kerple_log`

    Attributes:
      of: the position method that gives the bias.
      hidden: units of the network.
    """

    about = About(
        formula="z + B + f([z; B]) over heads, f a network 2H -> 32 -> H with leaky ReLUs, B of ALiBi or KERPLE",
        source="Zheng et al. 2024, [arXiv 2405.14722](https://arxiv.org/abs/2405.14722)",
        caveats="32 hidden units for each pair of query and key; heads are not split over devices",
    )

    shift_invariant = True
    limits: ClassVar = KerpleLog.limits

    of: str = choice("alibi", ("alibi", "kerple_log"))
    hidden: int = number(32, at_least=1, at_most=4096)

    @property
    def inner(self) -> PositionMethod:
        """The method that gives the bias."""
        made = make_position(
            self.of,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            width=self.width,
            train_length=self.train_length,
            causal=self.causal,
        )
        return made.at_length(self.length or self.train_length)

    def init(self, key: PRNGKeyArray) -> Params:
        return self.inner.init(key)

    def init_layer(self, key: PRNGKeyArray) -> Params:
        heads = self.num_heads
        return {
            **self.inner.init_layer(key),
            "first": linear_parameter(key, 0, (2 * heads, self.hidden), 2 * heads),
            "first_bias": linear_parameter(key, 1, (self.hidden,), 2 * heads),
            "second": linear_parameter(key, 2, (self.hidden, heads), self.hidden),
        }

    def bias(self, params: Params) -> DapeBias:
        names = ("first", "first_bias", "second")
        inner = self.inner.bias(params)
        assert inner is not None
        return DapeBias(inner, *(params[name].astype(jnp.float32) for name in names))
