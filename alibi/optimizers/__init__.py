"""Optimizers and schedules: from gradients to updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from alibi.config import OptimizerConfig
from alibi.config.classes import place_of
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
    "first_other_rate",
    "make_optimizer",
    "make_schedule",
    "matrices",
]


def make_optimizer(
    optimizer: OptimizerConfig, steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Returns the optimizer, after clipping of the global norm, and its schedule.

    Raises:
      ValueError: an unknown optimizer or option, or as in `make_schedule`.
    """
    schedule = make_schedule(optimizer, steps)
    kind = OPTIMIZER_NAMES.make(optimizer.name, optimizer.options, optimizer)
    chosen = kind.make(schedule)
    if not isinstance(chosen, optax.GradientTransformation):
        raise ValueError(
            f"optimizer {optimizer.name!r} ({place_of(type(kind))}): make returns {chosen!r:.60}; it must return an "
            "optax.GradientTransformation"
        )
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
    if type(made).__module__.startswith("alibi."):
        return made
    named = f"schedule {optimizer.schedule!r} ({place_of(type(made))})"
    try:
        rate = jax.eval_shape(made, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:  # the first line of JAX's page
        raise ValueError(
            f"{named}: rate(step) fails under jax.jit: {type(error).__name__}: {str(error).splitlines()[0]}; use "
            "jax.numpy.where for conditions on step"
        ) from error
    if rate.shape or not jnp.issubdtype(rate.dtype, jnp.floating):
        raise ValueError(
            f"{named}: rate(step) is {rate.dtype}{list(rate.shape)}; it must be a single float"
        )
    return made


def first_other_rate(
    one: tuple[OptimizerConfig, int], other: tuple[OptimizerConfig, int], updates: int
) -> int | None:
    """Returns the first of so many updates at which the learning rates of two runs differ, each given as in
    `make_schedule`, or None.
    """
    ours, theirs = (jax.vmap(make_schedule(*each))(jnp.arange(updates)) for each in (one, other))
    apart = np.flatnonzero(ours != theirs)
    return int(apart[0]) if apart.size else None
