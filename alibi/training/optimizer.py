"""The optimizer and its learning-rate schedule."""

import jax
import ml_collections
import optax


def make_schedule(optimizer: ml_collections.ConfigDict, steps: int) -> optax.Schedule:
    """Linear warm-up, then a cosine to `final_fraction` of the peak at update `steps`.

    Raises:
      ValueError: a warm-up that is not shorter than the run.
    """
    if not 0 <= optimizer.warmup_steps < steps:
        raise ValueError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} must be at least 0 and below train.steps={steps}"
        )
    peak = optimizer.learning_rate
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if optimizer.warmup_steps else peak,
        peak_value=peak,
        warmup_steps=optimizer.warmup_steps,
        decay_steps=steps,
        end_value=peak * optimizer.final_fraction,
    )


def make_optimizer(optimizer: ml_collections.ConfigDict, steps: int) -> optax.GradientTransformation:
    """The optimizer that the config's section names, with clipping by the global norm before it.

    Raises:
      ValueError: an unknown name; see also `make_schedule`.
    """
    if optimizer.name != "adamw":
        raise ValueError(f"optimizer.name={optimizer.name!r} is unknown; use adamw")
    adamw = optax.adamw(
        make_schedule(optimizer, steps),
        b1=optimizer.b1,
        b2=optimizer.b2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        mask=_decayed,
    )
    return optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), adamw) if optimizer.clip_norm else adamw


def _decayed(params: optax.Params) -> optax.Params:
    """True for matrices: kernels and embeddings, not biases, norms and position parameters."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding", "clusters"), params)
