"""The schedules of learning rates."""

import dataclasses
import functools
import itertools
import math

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from alibi.config.fields import choice, number
from alibi.optimizers.base import Schedule

MAX_CYCLES = 64  # with equal periods; more restarts are a mistake, not a schedule


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """The same rate."""

    def rate(self, step: Float[Array, ""]) -> float:
        return self.learning_rate * 1.0


@dataclasses.dataclass(frozen=True)
class InverseSqrt(Schedule):
    """Falls with the square root of the update, as fairseq's."""

    def rate(self, step: Float[Array, ""]) -> Float[Array, ""]:
        return self.learning_rate * jnp.sqrt(max(self.warmup_steps, 1) / jnp.maximum(step, 1.0))


@dataclasses.dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """Constant, then a fall to final_fraction times the rate at the run's end (Hu et al. 2024, arXiv
    2404.06395; Hägele et al. 2024, arXiv 2405.18392).

    Before its fall a run is the same, however long it is. So `init_step` forks a shorter or longer run
    from any checkpoint there.

    Attributes:
      final_fraction: the key of this name.
      decay_steps: updates of the fall, at most the run's after the warm-up.
      shape: sqrt is 1 - sqrt(share of the fall), linear 1 - share.
    """

    final_fraction: float
    decay_steps: int = number(100, at_least=2)
    shape: str = choice("sqrt", ("sqrt", "linear"))

    def __post_init__(self) -> None:
        if self.decay_steps > self.steps - self.warmup_steps:
            raise ValueError(
                f"optimizer.schedule_options.decay_steps={self.decay_steps} must be at most train.steps={self.steps} "
                f"less optimizer.warmup_steps={self.warmup_steps}"
            )

    def rate(self, step: Float[Array, ""]) -> Float[Array, ""]:
        share = jnp.clip((step - (self.steps - self.decay_steps)) / self.decay_steps, 0.0, 1.0)
        fallen = jnp.sqrt(share) if self.shape == "sqrt" else share
        return self.learning_rate * (1.0 - (1.0 - self.final_fraction) * fallen)


@dataclasses.dataclass(frozen=True)
class Cosine(Schedule):
    """A cosine that ends at final_fraction times the rate after the run's last update."""

    final_fraction: float

    def rate(self, step: Float[Array, ""]) -> Float[Array, ""]:
        return self(step)

    def __call__(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        peak = self.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=self.warmup_init if self.warmup_steps else peak,
            peak_value=peak,
            warmup_steps=self.warmup_steps,
            decay_steps=self.steps,
            end_value=peak * self.final_fraction,
        )
        return schedule(step)


@dataclasses.dataclass(frozen=True)
class CosineRestarts(Schedule):
    """Cosines that grow longer and lower.

    Cycle i has period_steps * period_mult^i updates and falls from learning_rate * shrink^i to
    min_learning_rate * shrink^i (Loshchilov and Hutter 2017, fairseq's `cosine`). Optax's curve is
    inexact in float32: near its end 1 + cos loses all digits, and (1e-7 - 1) + 1 is 1.2e-7 at the
    start of its warm-up.
    """

    min_learning_rate: float
    period_steps: int
    period_mult: float
    shrink: float

    def __post_init__(self) -> None:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"optimizer.min_learning_rate={self.min_learning_rate} must be at most "
                f"optimizer.learning_rate={self.learning_rate}, from which the cycles fall"
            )
        if self._starts[-1] < self.steps:
            raise ValueError(
                f"optimizer.period_steps={self.period_steps} makes more than {MAX_CYCLES} cycles of "
                f"train.steps={self.steps}; use a longer period"
            )

    @functools.cached_property
    def _starts(self) -> list[int]:
        """The first updates of the cycles, and the one after the last."""
        starts, updates = [self.warmup_steps], 0.0
        for cycle in range(MAX_CYCLES):
            if starts[-1] >= self.steps:
                break
            updates += self.period_steps * self.period_mult**cycle
            starts.append(round(self.warmup_steps + updates))
        return starts

    def rate(self, step: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the learning rate of update `step`, from 0, with a relative error of 1e-6."""
        peak, minimum = self.learning_rate, self.min_learning_rate
        rate = jnp.asarray(peak)
        for cycle, (start, end) in enumerate(itertools.pairwise(self._starts)):
            left = jnp.clip(end - step, 0, end - start)
            # (1 + cos(pi t)) / 2, as the square of a sine of the remaining part of the cycle.
            height = jnp.sin(math.pi / 2 * (left / (end - start))) ** 2
            rate = jnp.where(
                step >= start, self.shrink**cycle * (minimum + (peak - minimum) * height), rate
            )
        return rate
