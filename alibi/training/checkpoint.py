"""Checkpoints: the latest and the best, through Orbax and nowhere else."""

import contextlib
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from alibi.model.layers import is_stacked, stacked, unstacked
from alibi.parallel.sharding import tree_shardings
from alibi.training.state import TrainState

PARAMS, OPTIMIZER, ABOUT = "params", "optimizer", "about"


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint holds the parameters, the optimizer state and, as JSON, the config and
    provenance of the run. It appears under its final name only when it is complete.

    Args:
      folder: the run's `checkpoints` directory.
      keep: latest checkpoints that stay, besides the best by validation NLL.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int = 1, read_only: bool = False):
        for name in ("absl", "asyncio"):  # Orbax logs each of its steps, and what it raises too
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._folder = folder
        with _damage_named(folder):
            self._manager = ocp.CheckpointManager(
                folder,
                options=_options(keep, read_only),
                item_handlers={
                    PARAMS: ocp.StandardCheckpointHandler(),
                    OPTIMIZER: ocp.StandardCheckpointHandler(),
                    ABOUT: ocp.JsonCheckpointHandler(),
                },
            )

    @property
    def latest(self) -> int | None:
        """The last saved step, or None."""
        return self._manager.latest_step()

    @property
    def best(self) -> tuple[int, float] | None:
        """The saved step with the lowest validation NLL, and that NLL; None where none was validated."""
        with _damage_named(self._folder):
            metrics = {step: self._manager.metrics(step) for step in self._manager.all_steps()}
        scored = [(_valid_nll(values), step) for step, values in metrics.items() if values]
        return min(scored)[::-1] if scored else None

    def save(self, state: TrainState, step: int, about: dict[str, Any], valid_nll: float | None = None) -> None:
        """Saves in the background; the one before is awaited first, and its errors are raised here."""
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    PARAMS: ocp.args.StandardSave(state.params),
                    OPTIMIZER: ocp.args.StandardSave(state.opt_state),
                    ABOUT: ocp.args.JsonSave(about),
                }
            ),
            metrics=None if valid_nll is None else {"valid_nll": valid_nll},
        )

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state after `step` updates, each leaf with the sharding that `abstract` has.

        Raises:
          ValueError: no such checkpoint, a damaged one, or one of another model.
        """
        restored = self._restore(step, {PARAMS: abstract.params, OPTIMIZER: abstract.opt_state})
        count = jax.device_put(jax.numpy.asarray(step, abstract.step.dtype), abstract.step.sharding)
        return TrainState(step=count, params=restored[PARAMS], opt_state=restored[OPTIMIZER])

    def restore_params(self, step: int, abstract_params: PyTree) -> PyTree:
        """Only the parameters after `step` updates; see `restore`."""
        return self._restore(step, {PARAMS: abstract_params})[PARAMS]

    def _restore(self, step: int, trees: dict[str, PyTree]) -> Any:
        if step not in self._manager.all_steps():
            there = ", ".join(map(str, sorted(self._manager.all_steps()))) or "none"
            raise ValueError(f"{self._folder} has no checkpoint of step {step}; there are: {there}")
        with _damage_named(self._folder / str(step)):
            change = self._layout_change(step, trees[PARAMS])
            laid = trees if change is None else _abstract(change[0], trees)
            items = {name: ocp.args.StandardRestore(item) for name, item in laid.items()}
            restored = dict(self._manager.restore(step, args=ocp.args.Composite(**items)))
        if change is None:
            return restored
        shardings = jax.tree.map(lambda leaf: leaf.sharding, trees)
        # One tree after the other, so that only one is held twice.
        return {name: jax.jit(change[1], out_shardings=shardings[name])(restored.pop(name)) for name in trees}

    def _layout_change(self, step: int, params: PyTree) -> tuple[Callable[[PyTree], PyTree], ...] | None:
        """How `params` get the layout of layers that was saved, and how they get theirs back; None: it is the same."""
        try:
            saved = ocp.StandardCheckpointHandler().metadata(self._manager.directory / str(step) / PARAMS)
        except FileNotFoundError:
            return None  # reading them will say what is missing
        if is_stacked(params) == is_stacked(saved):
            return None
        return (unstacked, stacked) if is_stacked(params) else (stacked, unstacked)

    def wait(self) -> None:
        """Returns when all saves are on disk; raises the errors that they met."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then releases the manager's threads."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _abstract(change: Callable[[PyTree], PyTree], trees: PyTree) -> PyTree:
    """The shapes of `change(trees)`, with the shardings that such parameters have."""
    shapes = jax.eval_shape(change, trees)
    shardings = tree_shardings(shapes, jax.tree.leaves(trees)[0].sharding.mesh)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )


def _options(keep: int, read_only: bool) -> ocp.CheckpointManagerOptions:
    policies = ocp.checkpoint_managers
    best = policies.BestN(get_metric_fn=_valid_nll, reverse=True, n=1, keep_checkpoints_without_metrics=False)
    return ocp.CheckpointManagerOptions(
        create=not read_only,
        read_only=read_only,
        cleanup_tmp_directories=not read_only,  # what a killed process left
        save_decision_policy=policies.FixedIntervalPolicy(1),
        best_fn=_valid_nll,  # without it Orbax writes no metrics
        best_mode="min",
        preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
    )


@contextlib.contextmanager
def _damage_named(place: pathlib.Path) -> Iterator[None]:
    """Orbax raises many kinds of error for what is one thing to its user."""
    try:
        yield
    except (MemoryError, PermissionError):
        raise
    except Exception as error:
        if "no space left" in str(error).lower() or "RESOURCE_EXHAUSTED" in str(error):
            raise
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"checkpoint {place} is damaged or of another model ({first_line[:300]}); "
            "delete the directory of the damaged one to use the one before it, if there is one"
        ) from error


def _valid_nll(metrics: dict[str, float]) -> float:
    return metrics["valid_nll"]
