"""Learning rates by update number."""

import dataclasses
import math

import jax.numpy as jnp
import ml_collections
import optax
from jaxtyping import Array, Float, Int

MAX_CYCLES = 64  # with equal periods; a run of more restarts than this is no schedule but a mistake


def make_schedule(optimizer: ml_collections.ConfigDict, steps: int) -> optax.Schedule:
    """Linear warm-up, then what `optimizer.schedule` names.

    cosine ends at `final_fraction` of the peak at update `steps`; for cosine_restarts see
    `CosineRestarts`.

    Raises:
      ValueError: an unknown name, or numbers that make no schedule.
    """
    if not 0 <= optimizer.warmup_steps < steps:
        raise ValueError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} must be at least 0 and below train.steps={steps}"
        )
    if optimizer.schedule == "cosine":
        peak = optimizer.learning_rate
        return optax.warmup_cosine_decay_schedule(
            init_value=optimizer.warmup_init if optimizer.warmup_steps else peak,
            peak_value=peak,
            warmup_steps=optimizer.warmup_steps,
            decay_steps=steps,
            end_value=peak * optimizer.final_fraction,
        )
    if optimizer.schedule == "cosine_restarts":
        return CosineRestarts.from_config(optimizer, steps)
    raise ValueError(f"optimizer.schedule={optimizer.schedule!r} is unknown; use one of cosine, cosine_restarts")


@dataclasses.dataclass(frozen=True)
class CosineRestarts:
    """Linear warm-up from `warmup_init` to `peak`, then cosines, each longer and lower than the one before.

    Cycle i has period_steps * period_mult^i updates and falls from peak * shrink^i to
    minimum * shrink^i (Loshchilov and Hutter 2017, as fairseq's `cosine` has it). Optax
    has the same curve, but not to float32: near its end 1 + cos loses all digits, and
    (1e-7 - 1) + 1 is 1.2e-7 where its warm-up begins.

    Attributes:
      cycles: how many there are; the last one's end stays.
    """

    warmup_init: float
    peak: float
    minimum: float
    warmup_steps: int
    period_steps: int
    period_mult: float
    shrink: float
    cycles: int

    @classmethod
    def from_config(cls, optimizer: ml_collections.ConfigDict, steps: int) -> "CosineRestarts":
        """Of the config's section, with as many cycles as `steps` updates need.

        Raises:
          ValueError: see `make_schedule`.
        """
        if optimizer.period_steps < 1 or optimizer.period_mult < 1:
            raise ValueError(
                f"optimizer.period_steps={optimizer.period_steps} and optimizer.period_mult={optimizer.period_mult} "
                "must be at least 1"
            )
        cycles = 1
        while _start(optimizer, cycles) < steps and cycles <= MAX_CYCLES:
            cycles += 1
        if cycles > MAX_CYCLES:
            raise ValueError(
                f"optimizer.period_steps={optimizer.period_steps} makes more than {MAX_CYCLES} cycles of "
                f"train.steps={steps}; use a longer period"
            )
        return cls(
            warmup_init=optimizer.warmup_init,
            peak=optimizer.learning_rate,
            minimum=optimizer.min_learning_rate,
            warmup_steps=optimizer.warmup_steps,
            period_steps=optimizer.period_steps,
            period_mult=optimizer.period_mult,
            shrink=optimizer.shrink,
            cycles=cycles,
        )

    def __call__(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        """The learning rate of update number `step`, from 0, to 1e-6 of itself."""
        step = jnp.asarray(step)
        warm = self.warmup_init + (self.peak - self.warmup_init) / max(self.warmup_steps, 1) * step
        rate = jnp.where(step < self.warmup_steps, warm, self.peak)
        for cycle in range(self.cycles):
            start = round(_start(self, cycle))
            period = round(_start(self, cycle + 1)) - start
            left = jnp.clip(period - (step - start), 0, period)
            # (1 + cos(pi t)) / 2 as the square of a sine of what is left of the cycle.
            height = jnp.sin(math.pi / 2 * (left / period)) ** 2
            scale = self.shrink**cycle
            cosine = scale * (self.minimum + (self.peak - self.minimum) * height)
            rate = jnp.where(step >= start, cosine, rate)
        return rate


def _start(schedule: "CosineRestarts | ml_collections.ConfigDict", cycle: int) -> float:
    """Update number at which a cycle begins."""
    lengths = (schedule.period_steps * schedule.period_mult**i for i in range(cycle))
    return schedule.warmup_steps + sum(lengths)
