"""Checkpoints: the latest and the best, through Orbax and nowhere else."""

import contextlib
import functools
import hashlib
import json
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import flax.struct
import jax
import orbax.checkpoint as ocp
from jaxtyping import Array, Int, PyTree

from alibi.model.layers import is_stacked, stacked, unstacked
from alibi.parallel import hosts
from alibi.parallel.sharding import laid_out
from alibi.runs.checksums import checksums
from alibi.runs.damage import damage_named, ignore_closed_loops, item_named

Restored = TypeVar("Restored")

PARAMS, OPTIMIZER, ABOUT = "params", "optimizer", "about"
# In `about`; checkpoints of older versions have neither these nor the hash of all of `about`.
CHECKSUMS, VALID_NLL, SHA256 = "checksums", "valid_nll", "sha256"
LATE_SECONDS = 60.0  # in which a network file system shows a host what another one has written


@flax.struct.dataclass
class TrainState:
    """The state after `step` updates.

    All randomness is derived from the seed and `step`, so a run resumes from this state alone.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree


class MissingError(ValueError):
    """A checkpoint that is not there, or that not all processes see."""


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint holds the parameters, the optimizer state and, as JSON, the config and
    provenance of the run, its validation NLL and the checksum of each array. It appears
    under its final name only when it is complete, and is read only if it is what was saved.

    Args:
      folder: the run's `checkpoints` directory.
      keep: latest checkpoints that stay, besides the best by validation NLL; one more where that is one of them.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int = 1, read_only: bool = False):
        for name in ("absl", "asyncio"):  # Orbax logs each of its steps, and what it raises too
            logging.getLogger(name).setLevel(logging.CRITICAL)
        ignore_closed_loops()
        self._folder, self._closed = folder, False
        self._open = functools.partial(_manager, folder, read_only=read_only, preservation_policy=_Kept(self, keep))
        with damage_named(folder):
            self._manager = self._open()
        self.unread: set[int] = set()  # steps whose validation NLL can't be read
        self._valid_nll = {step: self._read_valid_nll(step) for step in self._manager.all_steps()}

    @property
    def latest(self) -> int | None:
        """The last saved step, or None."""
        return self._manager.latest_step()

    @property
    def best(self) -> tuple[int, float] | None:
        """The saved step with the lowest validation NLL, and that NLL; None where none was validated."""
        return next(iter(self.ranked), None)

    @property
    def ranked(self) -> list[tuple[int, float]]:
        """The saved steps that were validated, each with its validation NLL, from the lowest on."""
        scored = [(step, nll) for step in self._manager.all_steps() if (nll := self._valid_nll.get(step)) is not None]
        return sorted(scored, key=lambda one: one[::-1])

    def save(self, state: TrainState, step: int, about: dict[str, Any], valid_nll: float | None = None) -> None:
        """Saves in the background; the one before is awaited first, and its errors are raised here."""
        if step in self._manager.all_steps():
            return
        sums = checksums({PARAMS: state.params, OPTIMIZER: state.opt_state})
        self._valid_nll[step] = valid_nll
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    PARAMS: ocp.args.StandardSave(state.params),
                    OPTIMIZER: ocp.args.StandardSave(state.opt_state),
                    ABOUT: ocp.args.JsonSave(_sealed(about | {CHECKSUMS: sums, VALID_NLL: valid_nll})),
                }
            ),
        )

    def restore_newest(self, abstract: TrainState) -> TrainState:
        """The state of the newest checkpoint that is whole; later ones, which are not, are named and set aside.

        Raises:
          ValueError: none is whole; nothing is set aside then. See `restore`.
        """
        step, state, damaged = self._newest_whole(lambda step: self.restore(step, abstract))
        if step is None or state is None:
            newest = next(iter(damaged.values()))
            raise ValueError(f"{newest}; no whole one is left: restore one, or remove the work directory to start over")
        hosts.on_first(functools.partial(self._set_aside, damaged, step))
        if damaged:  # not `reload`, which reads the metrics of older versions, damaged ones too
            self._manager.close()
            self._manager = self._open()
        return state

    def newest_params(self, abstract_params: PyTree) -> tuple[int, PyTree]:
        """The step and the parameters of the newest checkpoint that is whole; later ones are named, and stay.

        Raises:
          ValueError: none is whole; see `restore`.
        """
        step, params, damaged = self._newest_whole(lambda step: self.restore_params(step, abstract_params))
        if step is None:
            raise ValueError(f"{next(iter(damaged.values()), f'{self._folder} is empty')}; no whole one is left")
        if hosts.is_primary():
            for damage in damaged.values():
                print(f"{damage}; that of {step} is taken in its place", file=sys.stderr)
        return step, params

    def _newest_whole(self, restore: Callable[[int], Restored]) -> tuple[int | None, Restored | None, dict[int, str]]:
        """The newest step that `restore` reads on all hosts, what it gives, and what is wrong with later ones."""

        def tried(step: int) -> tuple[Restored | None, str]:
            try:
                return restore(step), ""
            except MissingError:
                raise
            except ValueError as error:
                return None, str(error).partition(";")[0]

        damaged: dict[int, str] = {}
        for step in hosts.told(lambda: sorted(self._manager.all_steps(), reverse=True)):
            restored, damage = hosts.together(functools.partial(tried, step))
            if not (told := next(filter(None, hosts.gather(damage)), "")):
                return step, restored, damaged
            damaged[step] = told
        return None, None, damaged

    def _set_aside(self, damaged: dict[int, str], step: int) -> None:
        if self._closed:  # by a signal, while another thread was reading; the run may be another's by now
            raise ValueError(f"{self._folder} was closed while it was read")
        for other, damage in damaged.items():
            aside = self._folder / f"{other}.damaged-{int(time.time())}"
            (self._folder / str(other)).rename(aside)
            print(f"{damage}; it is now {aside.name}, and the run goes on from that of {step}", file=sys.stderr)

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state after `step` updates, each leaf with the sharding that `abstract` has.

        Raises:
          MissingError: no such checkpoint.
          ValueError: a damaged one, or one of another model.
        """
        restored = self._restore(step, {PARAMS: abstract.params, OPTIMIZER: abstract.opt_state})
        count = jax.device_put(jax.numpy.asarray(step, abstract.step.dtype), abstract.step.sharding)
        return TrainState(step=count, params=restored[PARAMS], opt_state=restored[OPTIMIZER])

    def restore_params(self, step: int, abstract_params: PyTree) -> PyTree:
        """Only the parameters after `step` updates; see `restore`."""
        return self._restore(step, {PARAMS: abstract_params})[PARAMS]

    def _restore(self, step: int, trees: dict[str, PyTree]) -> Any:
        self._find(step)
        with damage_named(self._folder / str(step)):
            # Agreed before the checksums, in which all processes take part: each has read other files.
            about, change, restored = hosts.together(functools.partial(self._read, step, trees))
            _check(restored, about.get(CHECKSUMS, {}))
        if change is None:
            return restored
        shardings = jax.tree.map(lambda leaf: leaf.sharding, trees)
        # One tree after the other, so that only one is held twice.
        return {name: jax.jit(change[1], out_shardings=shardings[name])(restored.pop(name)) for name in trees}

    def _find(self, step: int) -> None:
        """Raises MissingError, on all processes alike, where the checkpoint is not there or one does not see it."""
        there = hosts.told(lambda: sorted(self._manager.all_steps()))
        if step not in there:
            known = ", ".join(map(str, there)) or "none"
            raise MissingError(f"{self._folder} has no checkpoint of step {step}; there are: {known}")
        # The first process has just listed it.
        place, late = self._folder / str(step), time.monotonic() + (0 if hosts.is_primary() else LATE_SECONDS)
        while not (seen := place.exists()) and time.monotonic() < late:
            time.sleep(1)
        unseen = [process for process, sees in enumerate(hosts.gather(seen)) if not sees]
        if 0 in unseen:
            raise MissingError(f"{place} was deleted after it had been found")
        if unseen:
            raise MissingError(f"{place}: process {unseen[0]} does not see it; all need the same work directory")

    def _read(self, step: int, trees: dict[str, PyTree]) -> tuple:
        with contextlib.closing(_reader(self._folder)) as reader:
            about = _opened(_read(reader, step, ABOUT, ocp.args.JsonRestore()))
            with item_named("metadata"):
                change = self._layout_change(step, trees[PARAMS])
            laid = trees if change is None else _abstract(change[0], trees)
            restored = {name: _read(reader, step, name, ocp.args.StandardRestore(tree)) for name, tree in laid.items()}
        return about, change, restored

    def _layout_change(self, step: int, params: PyTree) -> tuple[Callable[[PyTree], PyTree], ...] | None:
        """How `params` get the layout of layers that was saved, and how they get theirs back; None: it is the same."""
        try:
            saved = ocp.StandardCheckpointHandler().metadata(self._manager.directory / str(step) / PARAMS)
        except FileNotFoundError:
            return None  # reading them will say what is missing
        if is_stacked(params) == is_stacked(saved):
            return None
        return (unstacked, stacked) if is_stacked(params) else (stacked, unstacked)

    def about(self, step: int) -> dict[str, Any]:
        """What `save` got of it; raises ValueError where it is damaged."""
        with contextlib.closing(_reader(self._folder)) as reader:
            return _opened(_read(reader, step, ABOUT, ocp.args.JsonRestore()))

    def _read_valid_nll(self, step: int) -> float | None:
        """The validation NLL; None where there is none, or it can't be read now: that may be the best, and stays."""
        try:
            about = self.about(step)
            if VALID_NLL in about:
                return about[VALID_NLL]
            with contextlib.closing(_reader(self._folder)) as reader:
                return (reader.metrics(step) or {}).get(VALID_NLL)  # older versions wrote it as a metric of Orbax's
        except Exception:
            self.unread.add(step)
        return None

    def wait(self) -> None:
        """Returns when all saves are on disk; raises the errors that they met."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then releases the manager's threads."""
        self._closed = True
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _abstract(change: Callable[[PyTree], PyTree], trees: PyTree) -> PyTree:
    """The shapes of `change(trees)`, with the shardings that such parameters have."""
    return laid_out(jax.eval_shape(change, trees), jax.tree.leaves(trees)[0].sharding.mesh)


class _Kept:
    """Orbax's policy: the latest checkpoints and the best one stay, and each that can't be read now, as it may be that.

    Where the best is itself one of the latest, one more stays: there are always two, so that one may be damaged.
    """

    def __init__(self, checkpoints: Checkpoints, keep: int):
        self._checkpoints, self._keep = checkpoints, keep

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        best, unread = self._checkpoints.best, self._checkpoints.unread
        newest = sorted({info.step for info in checkpoints} - unread, reverse=True)
        latest = newest[: self._keep]
        stays = {best[0]} if best and best[0] not in latest else set(newest[: self._keep + 1])
        return [info.step in stays | unread | {*latest} for info in checkpoints]


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """Never: the loop asks that. Orbax would take the time since a checkpoint whose time isn't read, and fail."""
        return False


def _manager(folder: pathlib.Path, *, read_only: bool, **options: Any) -> ocp.CheckpointManager:
    return _Manager(
        folder,
        options=ocp.CheckpointManagerOptions(
            create=not read_only,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,  # what a killed process left
            save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(1),
            lightweight_initialize=True,  # a damaged file of one checkpoint is nothing to the others
            **options,
        ),
        item_handlers={
            PARAMS: ocp.StandardCheckpointHandler(),
            OPTIMIZER: ocp.StandardCheckpointHandler(),
            ABOUT: ocp.JsonCheckpointHandler(),
        },
    )


def _reader(folder: pathlib.Path) -> ocp.CheckpointManager:
    """A manager of this process alone: where it meets damage, no other waits for it."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"reader-{me}"
    )
    return _manager(folder, read_only=True, multiprocessing_options=alone)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sealed(content: dict[str, Any]) -> dict[str, Any]:
    """`content` with the hash of what is read back of it."""
    return content | {SHA256: _digest(json.loads(json.dumps(content)))}


def _opened(content: dict[str, Any]) -> dict[str, Any]:
    """What `_sealed` got; raises ValueError if that was something else."""
    content = dict(content)
    if content.pop(SHA256, None) not in (None, _digest(content)):
        raise ValueError(f"{ABOUT} is not what was saved")
    return content


def _read(reader: ocp.CheckpointManager, step: int, name: str, how: ocp.args.CheckpointArgs) -> Any:
    """One item of a checkpoint; errors say which."""
    with item_named(name):
        return reader.restore(step, args=ocp.args.Composite(**{name: how}))[name]


def _check(restored: dict[str, PyTree], saved: dict[str, str]) -> None:
    """Raises ValueError, with its path, for an array that has another checksum than `saved` has for it."""
    found = checksums(restored) if saved else {}
    if wrong := [path for path, checksum in found.items() if saved[path] != checksum]:
        others = f" and {len(wrong) - 1} other arrays are" if len(wrong) > 1 else " is"
        raise ValueError(f"{wrong[0]}{others} not what was saved")
