"""Checkpoints: the latest and the best, through Orbax and nowhere else."""

import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import Array, Int, PyTree

from alibi.model.layers import is_stacked, stacked, unstacked
from alibi.parallel import hosts
from alibi.parallel.sharding import laid_out
from alibi.progress import print_line
from alibi.runs.checksums import checksums
from alibi.runs.provenance import ABOUT, STEP, read_about
from alibi.storage.files import SHA256, digest, resolve

Restored = TypeVar("Restored")

PARAMS, OPTIMIZER = "params", "optimizer"  # items of a checkpoint, beside ABOUT
# Keys of `about`, beside SHA256. VALID_TOKENS counts the tokens in the last validation so far.
CHECKSUMS, VALID_NLL, VALID_TOKENS = "checksums", "valid_nll", "valid_tokens"
BEGAN = "began"  # the update after which the config's values at the last validation apply
# Words in errors by the machine or the network, which leave a checkpoint whole.
_MACHINE = (
    *(
        "resource_exhausted",
        "unavailable",
        "deadline_exceeded",
        "permission",
        "too many open",
        "no space left",
    ),
    *("timed out", "timeout", "connection", "disconnected", "resolve host"),
)
_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@flax.struct.dataclass
class TrainState:
    """The state after `step` updates. With the seed it is all that a run resumes from."""

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree


class DamagedError(ValueError):
    """A checkpoint can't be read, or differs from the saved one."""


class Checkpoints(contextlib.AbstractContextManager["Checkpoints", None]):
    """A run's checkpoints.

    A checkpoint holds parameters, optimizer state and, as JSON, config, provenance, update,
    validation NLL and a checksum for each array. It gets its final name when it is complete, and is
    used only if it equals what was saved.

    Args:
      folder: the run's `checkpoints` directory.
      keep: how many latest checkpoints are kept, besides the best validation NLL, and one more if the
        best is among them, in case it is damaged.
      keep_every: updates whose multiples keep their checkpoints. Defaults to none.
      written_bytes: bytes written at a time, more than the largest array has. Writing takes as much
        memory. Defaults to Orbax's 96 GB.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 1,
        keep_every: int = 0,
        read_only: bool = False,
        written_bytes: int | None = None,
    ):
        # Orbax logs each of its steps, and also the errors that it raises
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._folder = resolve(folder)
        limit = {} if written_bytes is None else {"save_concurrent_gb": written_bytes / 1e9}
        self._manager = _Manager(
            self._folder,
            item_handlers={
                PARAMS: ocp.StandardCheckpointHandler(**limit),
                OPTIMIZER: ocp.StandardCheckpointHandler(**limit),
                ABOUT: ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                create=not read_only,
                read_only=read_only,
                cleanup_tmp_directories=not read_only,  # files of a process that was killed
                save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(1),
                preservation_policy=_Preserved(self, keep, keep_every),
                lightweight_initialize=True,  # else a damaged checkpoint makes all unreadable
            ),
        )
        # by step: validation NLL (None without one), and its scored tokens and BEGAN
        self._valid: dict[int, tuple[float | None, tuple[int | None, int]]] = {}
        for step in self._manager.all_steps():
            with contextlib.suppress(DamagedError):
                about = self.about(step)
                self._valid[step] = about[VALID_NLL], validated(about)

    @property
    def latest(self) -> int | None:
        """The last saved step, or None."""
        return self._manager.latest_step()

    @property
    def best(self) -> tuple[int, float] | None:
        """The saved step with the lowest validation NLL, and this NLL, or None without a validation."""
        return next(iter(self.ranked), None)

    @property
    def ranked(self) -> list[tuple[int, float]]:
        """The saved steps with their validation NLL, lowest first. Only validations count that scored
        as many tokens as the newest, since eval.max_tokens may change, and a model of the same values.
        """
        scored = [
            (step, nll, of)
            for step in sorted(self._manager.all_steps())
            for nll, of in [self._valid.get(step, (None, None))]
            if nll is not None
        ]
        return sorted(
            (entry[:2] for entry in scored if entry[2] == scored[-1][2]),
            key=lambda entry: entry[::-1],
        )

    def save(
        self, state: TrainState, step: int, about: dict[str, Any], valid_nll: float | None = None
    ) -> None:
        """Waits for the previous save, raises its errors, and saves in the background."""
        sums = checksums({PARAMS: state.params, OPTIMIZER: state.opt_state})
        content = about | {STEP: step, CHECKSUMS: sums, VALID_NLL: valid_nll}
        self._valid[step] = valid_nll, validated(about)
        items = {
            PARAMS: ocp.args.StandardSave(state.params),
            ABOUT: ocp.args.JsonSave(content | {SHA256: digest(content)}),
        }
        if state.opt_state is not None:  # an imported model has none
            items[OPTIMIZER] = ocp.args.StandardSave(state.opt_state)
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore_newest(self, abstract: TrainState) -> TrainState:
        """Returns the state of the newest whole checkpoint, each leaf with the sharding of `abstract`;
        sets later, damaged ones aside as STEP.damaged-TIME.

        Raises:
          DamagedError: none is whole.
        """
        _, state, damaged = self.first_whole(lambda step: self.restore(step, abstract))

        def set_aside() -> None:
            for other in damaged:
                aside = self._folder / f"{other}.damaged-{int(time.time())}"
                (self._folder / str(other)).rename(aside)

        if damaged:
            hosts.broadcast(set_aside)
            self._manager.reload()
        return state

    def first_whole(
        self,
        restore: Callable[[int], Restored],
        steps: Callable[[Collection[int]], list[int]] | None = None,
    ) -> tuple[int, Restored, Collection[int]]:
        """Returns the first step that `restore` finds whole, its result, and the damaged steps before
        it, with a line for each.

        Args:
          steps: returns the steps in order from those lost so far, and is called again after each
            loss, since training may replace checkpoints. Defaults to the newest first.

        Raises:
          DamagedError: no checkpoint is whole.
        """
        damaged: dict[int, DamagedError] = {}

        def left() -> list[int]:
            all_steps = steps(damaged) if steps else sorted(self._manager.all_steps(), reverse=True)
            return [step for step in all_steps if step not in damaged]

        while candidates := hosts.broadcast(left):
            try:
                restored = restore(candidates[0])
            except DamagedError as error:
                damaged[candidates[0]] = error
                continue
            if hosts.is_primary():
                for damage in (str(each).partition(";")[0] for each in damaged.values()):
                    print_line(f"{damage}; that of step {candidates[0]} is taken in its place")
            return candidates[0], restored, damaged.keys()
        raise next(iter(damaged.values()), DamagedError(f"{self._folder} is empty"))

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """Returns the state after `step` updates, each leaf with the sharding of `abstract`. Raises as
        `restore_params`.
        """
        restored = self._restore(step, {PARAMS: abstract.params, OPTIMIZER: abstract.opt_state})
        count = jax.device_put(jnp.asarray(step, abstract.step.dtype), abstract.step.sharding)
        return TrainState(step=count, params=restored[PARAMS], opt_state=restored[OPTIMIZER])

    def restore_params(self, step: int, abstract_params: PyTree) -> PyTree:
        """Returns the parameters after `step` updates, sharded as `abstract_params`.

        Raises:
          DamagedError: there is no such checkpoint, it is damaged, or of another model.
        """
        return self._restore(step, {PARAMS: abstract_params})[PARAMS]

    def _restore(self, step: int, trees: dict[str, PyTree]) -> dict[str, PyTree]:
        """Returns the items `trees` of a checkpoint. All processes raise if one finds damage."""
        self._check_seen(step)
        restored: dict[str, PyTree] = {}
        sums, damage = {}, ""
        here = there = is_stacked(trees[PARAMS])  # the layout of the layers
        try:
            sums = self.about(step)[CHECKSUMS]
            with self._damage_named(step, "metadata"):
                there = is_stacked(
                    ocp.StandardCheckpointHandler().metadata(self._folder / str(step) / PARAMS)
                )
            saved = trees
            if there != here:
                shapes = jax.eval_shape(stacked if there else unstacked, trees)
                saved = laid_out(shapes, jax.tree.leaves(trees)[0].sharding.mesh)
            for name, tree in saved.items():
                with self._damage_named(step, name):
                    restored[name] = ocp.StandardCheckpointHandler().restore(
                        self._folder / str(step) / name, args=ocp.args.StandardRestore(tree)
                    )
        except DamagedError as error:
            damage = str(error)
        # each process has read other files
        if damage := next(filter(None, hosts.gather(damage)), ""):
            raise DamagedError(damage)
        wrong = [path for path, checksum in checksums(restored).items() if sums[path] != checksum]
        if wrong := next(filter(None, hosts.gather(wrong)), []):
            raise self._damaged(
                step, f"{len(wrong)} arrays differ from the saved ones, first {wrong[0]}"
            )
        if there == here:
            return restored
        shardings = jax.tree.map(lambda leaf: leaf.sharding, trees)
        change = stacked if here else unstacked
        # One tree at a time, so that only this is held twice.
        return {
            name: jax.jit(change, out_shardings=shardings[name])(restored.pop(name))
            for name in trees
        }

    def _check_seen(self, step: int) -> None:
        """Raises an error on all processes if any does not see the checkpoint."""
        folder = self._folder / str(step)
        seen = hosts.gather(folder.exists())
        if not any(seen):
            saved = ", ".join(map(str, sorted(self._manager.all_steps()))) or "none"
            raise DamagedError(
                f"{self._folder} has no checkpoint of step {step}; there are: {saved}"
            )
        if not all(seen):
            raise ValueError(
                f"process {seen.index(False)} does not see {folder}; all need the same work directory"
            )

    def about(self, step: int) -> dict[str, Any]:
        """Returns what `save` kept as JSON. Raises DamagedError."""
        with self._damage_named(step, ABOUT):
            about = read_about(self._folder / str(step))
            if (update := about.get(STEP, step)) != step:
                raise ValueError(f"it is of update {update}: it was renamed or copied")
            return about

    @contextlib.contextmanager
    def _damage_named(self, step: int, item: str) -> Iterator[None]:
        """Turns the many errors of Orbax for a damaged file into DamagedError."""
        try:
            yield
        except Exception as error:
            if _is_of_machine(error):
                raise
            text = f"{type(error).__name__}: {error}"
            reason, *_ = re.split(r"\n| See full TensorStore| \[", text)
            raise self._damaged(step, f"its {item} can't be read, {reason[:300]}") from error

    def _damaged(self, step: int, reason: str) -> DamagedError:
        return DamagedError(
            f"checkpoint {self._folder / str(step)} is damaged or of another model ({reason}); restore it, or train "
            "in another --workdir"
        )

    def check(self) -> None:
        """Raises the error of the last save if it has ended, without waiting for it."""
        if not self._manager.is_saving_in_progress():
            self._manager.wait_until_finished()

    def wait(self) -> None:
        """Returns when all saves are on disk. Raises their errors."""
        self._manager.wait_until_finished()

    def __exit__(self, *_: object) -> None:
        """Waits as `wait` does, then releases the manager's threads."""
        self._manager.close()


def validated(saved: Mapping[str, Any]) -> tuple[int | None, int]:
    """Returns what is equal in validations with comparable losses: tokens, and BEGAN."""
    return saved.get(VALID_TOKENS), saved.get(BEGAN, 0)


class _Preserved:
    """Tells Orbax to preserve the latest checkpoints, the best, and multiples, as `Checkpoints` says."""

    def __init__(self, checkpoints: Checkpoints, keep: int, keep_every: int):
        self._checkpoints, self._keep, self._every = checkpoints, keep, keep_every

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        newest = sorted((info.step for info in checkpoints), reverse=True)
        latest, best = newest[: self._keep], self._checkpoints.best
        kept = (
            {*latest, best[0]} if best and best[0] not in latest else set(newest[: self._keep + 1])
        )
        every = self._every
        return [info.step in kept or (every > 0 and info.step % every == 0) for info in checkpoints]


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """Returns False: the loop asks JAX, and Orbax has not read the times that it would need."""
        return False


def _is_of_machine(error: Exception) -> bool:
    """Returns whether the machine or the network failed, and not the checkpoint."""
    text = re.sub(r"\S*/\S*", "", str(error)).lower()  # without paths, which may hold any word
    # errors of the network have no errno
    failed = isinstance(error, OSError | MemoryError) and not isinstance(error, _NOT_THERE)
    return any(word in text for word in _MACHINE) or (
        failed and getattr(error, "errno", None) != errno.EIO
    )
