"""The optimizers."""

import math

import jax
import ml_collections
import optax

from alibi.training.schedules import make_schedule


def make_optimizer(optimizer: ml_collections.ConfigDict, steps: int) -> optax.GradientTransformation:
    """The optimizer that the config's section names, with clipping by the global norm before it.

    Raises:
      ValueError: an unknown name, a number outside its range, nag with weight decay; see
        also `make_schedule`.
    """
    if optimizer.name not in ("adamw", "nag"):
        raise ValueError(f"optimizer.name={optimizer.name!r} is unknown; use one of adamw, nag")
    if not 0 <= optimizer.learning_rate < math.inf:
        raise ValueError(f"optimizer.learning_rate={optimizer.learning_rate} must be a number of at least 0")
    schedule = make_schedule(optimizer, steps)
    if optimizer.name == "nag":
        chosen = _nag(optimizer, schedule)
    else:
        _check_adamw(optimizer)
        chosen = optax.adamw(
            schedule,
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            mask=_decayed,
        )
    return optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), chosen) if optimizer.clip_norm else chosen


def _check_adamw(optimizer: ml_collections.ConfigDict) -> None:
    for key in ("b1", "b2"):
        if not 0 <= optimizer[key] < 1:
            raise ValueError(f"optimizer.{key}={optimizer[key]} must be from 0 to below 1")
    if not optimizer.eps > 0:
        raise ValueError(f"optimizer.eps={optimizer.eps} must be above 0, such as 1e-8")
    if not optimizer.weight_decay >= 0:
        raise ValueError(f"optimizer.weight_decay={optimizer.weight_decay} must be at least 0")


def _nag(optimizer: ml_collections.ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Nesterov's accelerated gradient; the same as fairseq's `nag`, whose buffer holds the learning rate too."""
    if optimizer.weight_decay:
        raise ValueError(
            f"optimizer.weight_decay={optimizer.weight_decay}: nag has none; set it to 0, or use optimizer.name=adamw"
        )
    if not 0 <= optimizer.momentum < 1:
        raise ValueError(f"optimizer.momentum={optimizer.momentum} must be from 0 to below 1")
    return optax.sgd(schedule, momentum=optimizer.momentum, nesterov=True)


def _decayed(params: optax.Params) -> optax.Params:
    """True for matrices: kernels and embeddings, not biases, norms and whatever a position method learns."""

    def is_decayed(path: tuple[jax.tree_util.DictKey, ...], _: jax.Array) -> bool:
        names = [part.key for part in path]
        return names[-1] in ("kernel", "embedding", "clusters") and "position" not in names

    return jax.tree_util.tree_map_with_path(is_decayed, params)
