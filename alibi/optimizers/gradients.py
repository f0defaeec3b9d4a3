"""Optimizers that see each number of a gradient alone."""

import dataclasses

import optax

from alibi.optimizers.base import Optimizer
from alibi.optimizers.parameters import decayed


@dataclasses.dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), with the keys optimizer.b1, b2, eps and
    weight_decay.
    """

    b1: float
    b2: float
    eps: float
    weight_decay: float

    def make(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        return optax.adamw(
            schedule,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=decayed,
        )


@dataclasses.dataclass(frozen=True)
class Nesterov(Optimizer):
    """Nesterov's accelerated gradient, with the key optimizer.momentum, without weight decay. It gives
    the updates of fairseq's `nag`. (The buffer of `nag` holds the learning rate too.)
    """

    momentum: float
    weight_decay: float

    def __post_init__(self) -> None:
        if self.weight_decay:
            raise ValueError(
                f"optimizer.weight_decay={self.weight_decay}: nag has none; set it to 0, or use optimizer.name=adamw"
            )

    def make(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        return optax.sgd(schedule, momentum=self.momentum, nesterov=True)
