"""Logits that grow with the logarithm of how many keys a query sees, for any position method."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from alibi.positions.around import Around
from alibi.positions.base import Params, PositionMethod, Positions

RULES = ("log_n", "ssmax")


@dataclasses.dataclass(frozen=True)
class ScaledLogits(Around):
    """Another method, whose queries are multiplied by a function of n, the number of keys that they see.

    Softmax over more keys is flatter; this sharpens it. n is the query's position plus one, or the length where
    attention is not causal. What the method adds to the logits is not scaled, unless it is made of queries.

    Attributes:
      other: the other method.
      rule: "log_n": by max(1, ln n / ln L), L the training length (arXiv 2202.12172); "ssmax": by s ln n,
        s learned by each head of each layer (arXiv 2501.19399), from what makes its mean over training 1.

    Raises:
      ValueError: another rule, a training length of 1, whose logarithm is 0, or a method by which positions are no
        counts of tokens.
    """

    no_window = "it limits the keys that a query sees, by whose number logit_scale goes"

    other: PositionMethod = dataclasses.field(kw_only=True)
    rule: str = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"logit_scale={self.rule!r} is unknown; use one of {', '.join(RULES)}")
        if self.train_length < 2:
            raise ValueError(f"logit_scale={self.rule} needs a train_length of at least 2 and got {self.train_length}")
        if type(self.other).place is not PositionMethod.place:
            raise ValueError(
                f"logit_scale={self.rule} goes by the number of keys, which the positions of "
                f"{type(self.other).__name__} don't tell; leave it out"
            )

    def at_length(self, length: int) -> "ScaledLogits":
        return dataclasses.replace(self, length=length, other=self.other.at_length(length))

    @property
    def max_length(self) -> int | None:
        return self.other.max_length

    def check_length(self, length: int) -> None:
        self.other.check_length(length)

    def init_layer(self, key: PRNGKeyArray) -> Params:
        if self.rule == "log_n":
            return self.other.init_layer(key)
        mean = math.lgamma(self.train_length + 1) / self.train_length  # of ln n over n = 1, ..., L
        return {**self.other.init_layer(key), "ssmax": jnp.full(self.num_heads, 1 / mean)}

    def queries(
        self, params: Params, query: Float[Array, "*batch q heads head_dim"], positions: Positions
    ) -> Float[Array, "*batch q heads head_dim"]:
        # Those of padding stand below 0, and nobody sees them.
        count = jnp.maximum(positions + 1, 1)
        if not self.causal:
            count = jnp.full_like(positions, self.length or self.train_length)
        log_n = jnp.expand_dims(jnp.log(count.astype(jnp.float32)), (-1, -2))
        if self.rule == "log_n":
            scale = jnp.maximum(log_n / math.log(self.train_length), 1.0)
        else:
            scale = params["ssmax"].astype(jnp.float32).reshape((1,) * (log_n.ndim - 2) + (-1, 1)) * log_n
        turned = self.other.queries(params, query, positions)
        scale = scale.reshape((1,) * (query.ndim - scale.ndim) + scale.shape)
        return (turned.astype(jnp.float32) * scale).astype(query.dtype)
