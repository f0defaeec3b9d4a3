"""Optimizers and schedules: from gradients to updates."""

import optax

from alibi.config import OptimizerConfig
from alibi.optimizers.base import (
    OPTIMIZER_NAMES,
    OPTIMIZERS,
    SCHEDULE_NAMES,
    SCHEDULES,
    Optimizer,
    Schedule,
)
from alibi.optimizers.parameters import decayed, matrices

__all__ = [
    "OPTIMIZERS",
    "OPTIMIZER_NAMES",
    "SCHEDULES",
    "SCHEDULE_NAMES",
    "Optimizer",
    "Schedule",
    "decayed",
    "make_optimizer",
    "make_schedule",
    "matrices",
]


def make_optimizer(
    optimizer: OptimizerConfig, steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Returns the optimizer, after clipping by the global norm, and its schedule.

    Raises:
      ValueError: an unknown optimizer or option, or as in `make_schedule`.
    """
    schedule = make_schedule(optimizer, steps)
    chosen = OPTIMIZER_NAMES.make(optimizer.name, optimizer.options, optimizer).make(schedule)
    if optimizer.clip_norm:
        chosen = optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), chosen)
    return chosen, schedule


def make_schedule(optimizer: OptimizerConfig, steps: int) -> Schedule:
    """Returns the learning rate of each update: linear warm-up, then `optimizer.schedule`.

    Raises:
      ValueError: an unknown schedule or option, or numbers that make no schedule.
    """
    if optimizer.warmup_steps >= steps:
        raise ValueError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} must be below train.steps={steps}; lower the warm-up "
            "(0: none), or raise train.steps"
        )
    made: Schedule = SCHEDULE_NAMES.make(
        optimizer.schedule,
        optimizer.schedule_options,
        optimizer,
        steps=steps,
        learning_rate=optimizer.learning_rate,
        warmup_steps=optimizer.warmup_steps,
        warmup_init=optimizer.warmup_init,
    )
    return made
