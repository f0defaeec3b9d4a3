"""The contracts of optimizers and schedules: frozen dataclasses with their options as fields.

Each is a file and a line in `OPTIMIZERS` or `SCHEDULES`, or a class anywhere, named as
package.module:Class. A field without a default has the value of the key with its name in the config
section `optimizer`.
"""

import abc
import dataclasses

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from alibi.config.classes import Registry

# The class of each optimizer and schedule.
OPTIMIZERS = {
    "adamw": "alibi.optimizers.gradients:AdamW",
    "nag": "alibi.optimizers.gradients:Nesterov",
    "muon": "alibi.optimizers.muon:Muon",
}
SCHEDULES = {
    "cosine": "alibi.optimizers.schedules:Cosine",
    "cosine_restarts": "alibi.optimizers.schedules:CosineRestarts",
    "constant": "alibi.optimizers.schedules:Constant",
    "inverse_sqrt": "alibi.optimizers.schedules:InverseSqrt",
    "wsd": "alibi.optimizers.schedules:WarmupStableDecay",
}
OPTIMIZER_NAMES = Registry(
    "optimizer.name",
    "optimizer",
    OPTIMIZERS,
    "alibi.optimizers:Optimizer",
    "alibi.optimizers",
    {"adam": "adamw", "sgd": "nag"},
)
SCHEDULE_NAMES = Registry(
    "optimizer.schedule",
    "schedule",
    SCHEDULES,
    "alibi.optimizers:Schedule",
    "alibi.schedules",
    {"warmup_stable_decay": "wsd", "trapezoidal": "wsd"},
)


@dataclasses.dataclass(frozen=True)
class Optimizer(abc.ABC):
    """A rule from gradients to updates. A subclass's fields are its options.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Lion(Optimizer):
      ...     b1: float  # the key optimizer.b1
      ...     b2: float
      ...     def make(self, schedule):
      ...         return optax.lion(schedule, self.b1, self.b2)
    """

    @abc.abstractmethod
    def make(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Returns the transformation, its updates multiplied by the learning rates.

        `alibi.optimizers.matrices` and `decayed` tell what each parameter is. Clipping comes before.
        """


@dataclasses.dataclass(frozen=True)
class Schedule(abc.ABC):
    """The learning rate of each update: linear warm-up, then a subclass's `rate`. A subclass's fields are
    its options.

    Attributes:
      steps: updates of the run.
      learning_rate, warmup_steps, warmup_init: the keys of these names.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Linear(Schedule):
      ...     def rate(self, step):
      ...         return self.learning_rate * (1 - step / self.steps)
    """

    steps: int
    learning_rate: float
    warmup_steps: int
    warmup_init: float

    @abc.abstractmethod
    def rate(self, step: Float[Array, ""]) -> Float[Array, ""] | float:
        """Returns the learning rate of update `step`, from 0, if it is after the warm-up."""

    def __call__(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        """Returns the learning rate of update `step`, from 0."""
        step = jnp.asarray(step, jnp.float32)
        first, rise = self.warmup_init, self.learning_rate - self.warmup_init
        warming = first + rise / max(self.warmup_steps, 1) * step
        return jnp.where(step < self.warmup_steps, warming, self.rate(step))
