"""The optimizers, and their learning rates by update number."""

import itertools
import math

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from alibi.config import OptimizerConfig

MAX_CYCLES = 64  # with equal periods; more restarts are a mistake, not a schedule


def make_optimizer(
    optimizer: OptimizerConfig, steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Returns the optimizer, after clipping by the global norm, and its schedule.

    Raises:
      ValueError: nag with weight decay, or as in `make_schedule`.
    """
    schedule = make_schedule(optimizer, steps)
    if optimizer.name == "nag":
        if optimizer.weight_decay:
            raise ValueError(
                f"optimizer.weight_decay={optimizer.weight_decay}: nag has none; set it to 0, or use "
                "optimizer.name=adamw"
            )
        # Nesterov's accelerated gradient; the same as fairseq's `nag`, whose buffer holds the
        # learning rate too.
        chosen = optax.sgd(schedule, momentum=optimizer.momentum, nesterov=True)
    else:
        chosen = optax.adamw(
            schedule,
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            mask=_decayed,
        )
    if optimizer.clip_norm:
        chosen = optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), chosen)
    return chosen, schedule


def _decayed(params: optax.Params) -> optax.Params:
    """Returns True for matrices (kernels, embeddings), not for biases, norms and position parameters."""
    matrices = ("kernel", "embedding", "clusters")
    return jax.tree.map_with_path(
        lambda path, _: path[-1].key in matrices and all(part.key != "position" for part in path),
        params,
    )


def make_schedule(optimizer: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate of each update: linear warm-up, then `optimizer.schedule`.

    cosine ends at `final_fraction` times the peak at update `steps`. inverse_sqrt falls with the
    update's square root, as in fairseq.

    Raises:
      ValueError: numbers that make no schedule.
    """
    if optimizer.warmup_steps >= steps:
        raise ValueError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} must be below train.steps={steps}; lower the warm-up "
            "(0: none), or raise train.steps"
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
        return _cosine_restarts(optimizer, steps)
    first, peak, warmup = optimizer.warmup_init, optimizer.learning_rate, optimizer.warmup_steps

    def schedule(step: Int[Array, ""] | int) -> Float[Array, ""]:
        """Returns the learning rate of update number `step`, from 0."""
        step = jnp.asarray(step, jnp.float32)
        falling = jnp.sqrt(max(warmup, 1) / jnp.maximum(step, 1.0))
        after = peak * (falling if optimizer.schedule == "inverse_sqrt" else 1.0)
        return jnp.where(step < warmup, first + (peak - first) / max(warmup, 1) * step, after)

    return schedule


def _cosine_restarts(optimizer: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns a schedule of linear warm-up, then cosines that grow longer and lower.

    Cycle i has period_steps * period_mult^i updates and falls from learning_rate * shrink^i to
    min_learning_rate * shrink^i (Loshchilov and Hutter 2017, fairseq's `cosine`). Optax's curve is
    inexact in float32: near its end 1 + cos loses all digits, and (1e-7 - 1) + 1 is 1.2e-7 at the
    start of its warm-up.
    """
    if optimizer.min_learning_rate > optimizer.learning_rate:
        raise ValueError(
            f"optimizer.min_learning_rate={optimizer.min_learning_rate} must be at most "
            f"optimizer.learning_rate={optimizer.learning_rate}, from which the cycles fall"
        )
    warmup, peak, minimum = (
        optimizer.warmup_steps,
        optimizer.learning_rate,
        optimizer.min_learning_rate,
    )
    first, shrink = optimizer.warmup_init, optimizer.shrink
    starts = [warmup]
    while starts[-1] < steps and len(starts) <= MAX_CYCLES:
        cycles = range(len(starts))
        starts.append(
            round(
                warmup
                + sum(optimizer.period_steps * optimizer.period_mult**cycle for cycle in cycles)
            )
        )
    if starts[-1] < steps:
        raise ValueError(
            f"optimizer.period_steps={optimizer.period_steps} makes more than {MAX_CYCLES} cycles of "
            f"train.steps={steps}; use a longer period"
        )

    def schedule(step: Int[Array, ""] | int) -> Float[Array, ""]:
        """Returns the learning rate of update number `step`, from 0, with a relative error of 1e-6."""
        step = jnp.asarray(step)
        rate = jnp.where(step < warmup, first + (peak - first) / max(warmup, 1) * step, peak)
        for cycle, (start, end) in enumerate(itertools.pairwise(starts)):
            left = jnp.clip(end - step, 0, end - start)
            # (1 + cos(pi t)) / 2, as the square of a sine of the remaining part of the cycle.
            height = jnp.sin(math.pi / 2 * (left / (end - start))) ** 2
            rate = jnp.where(
                step >= start, shrink**cycle * (minimum + (peak - minimum) * height), rate
            )
        return rate

    return schedule
