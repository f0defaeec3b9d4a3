"""Checkpoints: the latest and the best, through Orbax and nowhere else."""

import asyncio
import collections
import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree, UInt32

from alibi.model.layers import is_stacked, stacked, unstacked
from alibi.parallel import hosts
from alibi.parallel.sharding import laid_out
from alibi.runs.provenance import ABOUT, STEP, own_files, processor, read_about
from alibi.storage.files import SHA256, digest, resolve

Restored = TypeVar("Restored")

PARAMS, OPTIMIZER = "params", "optimizer"  # items of a checkpoint, beside ABOUT
# Keys of `about`, beside SHA256. The tokens are those of the last validation, of this checkpoint or
# before it.
CHECKSUMS, VALID_NLL, VALID_TOKENS = "checksums", "valid_nll", "valid_tokens"
# Words in errors of the machine or the network, after which a checkpoint may still be whole.
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
    """The state after `step` updates.

    All randomness is derived from the seed and `step`, so a run resumes from this state alone.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: PyTree


class DamagedError(ValueError):
    """A checkpoint can't be read, or differs from the saved one."""


class Checkpoints(contextlib.AbstractContextManager["Checkpoints", None]):
    """The checkpoints of a run.

    A checkpoint holds the parameters, the optimizer state and, as JSON, the config and provenance
    of the run, its update, its validation NLL and the checksum of each array. It gets its final name
    when it is complete, and is used only if it equals the saved one.

    Args:
      folder: the run's `checkpoints` directory.
      keep: number of latest checkpoints to keep, besides the best by validation NLL. If the best is
        among them, the checkpoint before them is kept too, in case the best is damaged.
      written_bytes: of arrays that are written at a time, more than those of the largest; writing
        takes as much memory beside the state. None: Orbax's limit, 96 GB.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 1,
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
                preservation_policy=_LatestAndBest(self, keep),
                lightweight_initialize=True,  # else a damaged checkpoint makes all unreadable
            ),
        )
        # of each step: the validation NLL, None without one, and the tokens that it scored
        self._valid: dict[int, tuple[float | None, int | None]] = {}
        for step in self._manager.all_steps():
            with contextlib.suppress(DamagedError):
                about = self.about(step)
                self._valid[step] = about[VALID_NLL], about.get(VALID_TOKENS)

    @property
    def latest(self) -> int | None:
        """The last saved step, or None."""
        return self._manager.latest_step()

    @property
    def best(self) -> tuple[int, float] | None:
        """The saved step with the lowest validation NLL, and this NLL; None if no saved step was
        validated.
        """
        return next(iter(self.ranked), None)

    @property
    def ranked(self) -> list[tuple[int, float]]:
        """The validated steps among the saved, each with its validation NLL, in ascending order of
        it; those that scored as many tokens as the newest, since eval.max_tokens may change.
        """
        scored = [
            (step, nll, tokens)
            for step in sorted(self._manager.all_steps())
            for nll, tokens in [self._valid.get(step, (None, None))]
            if nll is not None
        ]
        return sorted(
            (entry[:2] for entry in scored if entry[2] == scored[-1][2]),
            key=lambda entry: entry[::-1],
        )

    def save(
        self, state: TrainState, step: int, about: dict[str, Any], valid_nll: float | None = None
    ) -> None:
        """Saves in the background; first waits for the checkpoint before, and raises its errors."""
        if step in self._manager.all_steps():
            return
        sums = checksums({PARAMS: state.params, OPTIMIZER: state.opt_state})
        content = about | {STEP: step, CHECKSUMS: sums, VALID_NLL: valid_nll}
        self._valid[step] = valid_nll, about.get(VALID_TOKENS)
        items = {
            PARAMS: ocp.args.StandardSave(state.params),
            ABOUT: ocp.args.JsonSave(content | {SHA256: digest(content)}),
        }
        if state.opt_state is not None:  # an imported model has none
            items[OPTIMIZER] = ocp.args.StandardSave(state.opt_state)
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore_newest(self, abstract: TrainState) -> TrainState:
        """Returns the state of the newest whole checkpoint; prints and sets aside the damaged later
        ones.

        Raises:
          ValueError: none is whole, and nothing was set aside; see also `restore`.
        """
        step, state, damaged = self.first_whole(lambda step: self.restore(step, abstract))
        if damaged:
            hosts.broadcast(lambda: self._set_aside(damaged, step))
            self._manager.reload()
        return state

    def first_whole(
        self, restore: Callable[[int], Restored]
    ) -> tuple[int, Restored, dict[int, str]]:
        """Returns the newest step that `restore` finds whole, its result, and the errors of later
        steps.

        Raises:
          DamagedError: no checkpoint is whole.
        """
        damaged: dict[int, str] = {}
        for step in hosts.broadcast(lambda: sorted(self._manager.all_steps(), reverse=True)):
            try:
                return step, restore(step), damaged
            except DamagedError as error:
                damaged[step] = str(error)
        newest = next(iter(damaged.values()), f"{self._folder} is empty")
        raise DamagedError(
            f"{newest}; no other is whole: restore a checkpoint, or remove the work directory to start over"
        )

    def _set_aside(self, damaged: dict[int, str], step: int) -> None:
        for other, damage in damaged.items():
            aside = self._folder / f"{other}.damaged-{int(time.time())}"
            (self._folder / str(other)).rename(aside)
            print(
                f"{damage}; it is now {aside.name}, and the run goes on from step {step}",
                file=sys.stderr,
            )

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """Returns the state after `step` updates, each leaf with the sharding of `abstract`.

        Raises:
          ValueError: there is no such checkpoint.
          DamagedError: it is damaged, or of another model.
        """
        self._check_seen(step)
        if not any(path.startswith(OPTIMIZER) for path in self.about(step)[CHECKSUMS]):
            raise ValueError(
                f"{self._folder.parent} holds an imported model, without an optimizer's state; train on from it in "
                f"another --workdir by --init_from={self._folder.parent}"
            )
        restored = self._restore(step, {PARAMS: abstract.params, OPTIMIZER: abstract.opt_state})
        count = jax.device_put(jnp.asarray(step, abstract.step.dtype), abstract.step.sharding)
        return TrainState(step=count, params=restored[PARAMS], opt_state=restored[OPTIMIZER])

    def restore_params(self, step: int, abstract_params: PyTree) -> PyTree:
        """Returns only the parameters after `step` updates; see `restore`."""
        return self._restore(step, {PARAMS: abstract_params})[PARAMS]

    def _restore(self, step: int, trees: dict[str, PyTree]) -> dict[str, PyTree]:
        """Returns the items `trees` of a checkpoint; all processes raise if any meets damage."""
        self._check_seen(step)
        restored, sums, damage = {}, {}, ""
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
            restored = {
                name: self._read(step, name, ocp.args.StandardRestore(tree))
                for name, tree in saved.items()
            }
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
        """Raises ValueError on all processes if any does not see the checkpoint."""
        place = self._folder / str(step)
        seen = hosts.gather(place.exists())
        if not any(seen):
            known = ", ".join(map(str, sorted(self._manager.all_steps()))) or "none"
            raise ValueError(f"{self._folder} has no checkpoint of step {step}; there are: {known}")
        if not all(seen):
            raise ValueError(
                f"process {seen.index(False)} does not see {place}; all need the same work directory"
            )

    def about(self, step: int) -> dict[str, Any]:
        """Returns the `about` of `save`, with the keys of this file; raises DamagedError if it is
        damaged.
        """
        with self._damage_named(step, ABOUT):
            return read_about(self._folder / str(step))

    def _read(self, step: int, item: str, how: ocp.args.CheckpointArgs) -> Any:
        """Returns the arrays of a checkpoint's item, read by this process alone."""
        with self._damage_named(step, item):
            return ocp.StandardCheckpointHandler().restore(
                self._folder / str(step) / item, args=how
            )

    @contextlib.contextmanager
    def _damage_named(self, step: int, item: str) -> Iterator[None]:
        """Turns the many errors of Orbax for a damaged file into DamagedError."""
        policy = asyncio.get_event_loop_policy()
        asyncio.set_event_loop_policy(_Loops())
        try:
            yield
        except Exception as error:
            if _is_of_machine(error):
                raise
            reason = re.split(r"\n| See full TensorStore| \[", f"{type(error).__name__}: {error}")[
                0
            ]
            raise self._damaged(step, f"its {item} can't be read, {reason[:300]}") from error
        finally:
            asyncio.set_event_loop_policy(policy)

    def _damaged(self, step: int, reason: str) -> DamagedError:
        return DamagedError(
            f"checkpoint {self._folder / str(step)} is damaged or of another model ({reason})"
        )

    def check(self) -> None:
        """Raises the error of the last save if it has ended; does not wait for it."""
        if not self._manager.is_saving_in_progress():
            self._manager.wait_until_finished()

    def wait(self) -> None:
        """Returns when all saves are on disk; raises their errors."""
        self._manager.wait_until_finished()

    def __exit__(self, *_: object) -> None:
        """Waits as `wait` does, then releases the manager's threads."""
        self._manager.close()


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that waits for all reads before it closes.

    Orbax closes its loop at the first error, and each read that ends later prints another error.
    """

    def close(self) -> None:
        if not self.is_closed() and (left := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        super().close()


class _Loops(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> _Loop:
        return _Loop()


class _LatestAndBest:
    """Orbax's policy to preserve the latest checkpoints and the best one, see `Checkpoints`."""

    def __init__(self, checkpoints: Checkpoints, keep: int):
        self._checkpoints, self._keep = checkpoints, keep

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        newest = sorted((info.step for info in checkpoints), reverse=True)
        latest, best = newest[: self._keep], self._checkpoints.best
        kept = (
            {*latest, best[0]} if best and best[0] not in latest else set(newest[: self._keep + 1])
        )
        return [info.step in kept for info in checkpoints]


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """Returns False: the loop asks JAX. Orbax would use the times of checkpoints, which it has
        not read.
        """
        return False


def _is_of_machine(error: Exception) -> bool:
    """Returns whether the machine or the network failed, and not the checkpoint."""
    if (
        isinstance(error, OSError)
        and not isinstance(error, _NOT_THERE)
        and error.errno != errno.EIO
    ):
        return True  # errors of the network have no errno
    text = re.sub(r"\S*/\S*", "", str(error)).lower()  # without paths, which may hold any word
    return isinstance(error, MemoryError) or any(word in text for word in _MACHINE)


def checksums(tree: PyTree) -> dict[str, str]:
    """Returns the checksum of each array of `tree`, 16 hexadecimal digits, by its path.

    It depends on the bits and places of the elements, not on their split over devices, each of
    which sums up its own part. A change of one element always changes it; a change of several does
    with a probability of 1 - 2^-64.
    """
    jax.block_until_ready(tree)
    sums = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # One after the other: many programs at once, each of which sums over devices, wait for each
        # other on CPUs.
        first, second = jax.device_get(_checksum(leaf))
        sums[jax.tree_util.keystr(path, simple=True, separator="/")] = f"{first:08x}{second:08x}"
    return sums


def check_replicas(state: TrainState, when: str) -> None:
    """Checks that all devices hold the same values of the same part of an array.

    A checkpoint is put together from parts of all processes. A part that one device alone holds is
    not compared.

    Raises:
      UserError: on every process, see `hosts.check_same_state`.
    """
    sums = [_checksums_of_parts(leaf.sharding)(leaf) for leaf in jax.tree.leaves(state)]
    digests: dict[tuple[str, int], Any] = collections.defaultdict(hashlib.sha256)
    for leaf, of_leaf in zip(jax.tree.leaves(state), sums, strict=True):
        split = str(leaf.sharding.spec)
        for shard in of_leaf.addressable_shards:
            place = [
                f"{axis}={index.start}"
                for axis, index in zip(leaf.sharding.mesh.axis_names, shard.index, strict=False)
                if repr(axis) in split
            ]
            digests[" ".join(place), shard.device.id].update(np.asarray(shard.data).tobytes())
    parts = [(place, digest.hexdigest()) for (place, _), digest in digests.items()]
    hosts.check_same_state(
        parts, lambda: {"processor": processor(), **hosts.computer(), **own_files()}, when
    )


@functools.cache
def _checksums_of_parts(sharding: NamedSharding) -> Callable[[Array], Array]:
    """Returns a function from an array to the checksum of each device's part,
    `[data, fsdp, tensor, 2]`.
    """
    axes = sharding.mesh.axis_names
    checksum = jax.shard_map(
        lambda part: jnp.expand_dims(_checksum(part), tuple(range(len(axes)))),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=P(*axes),
        check_vma=False,
    )
    return jax.jit(checksum)


@jax.jit
def _checksum(array: Array) -> UInt32[Array, "2"]:
    """Returns two sums, modulo 2^32, of each element's bits mixed with its place; mixed as in
    murmur3.
    """
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(
        jnp.uint32
    )
    place, size = jnp.zeros(array.shape, jnp.uint32), 1
    for axis in reversed(range(array.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(
            size * 0x9E3779B1 % 2**32
        )
        size *= array.shape[axis]
    once = (bits ^ place) * jnp.uint32(0x85EBCA6B)
    once ^= once >> 15
    twice = once * jnp.uint32(0xC2B2AE35)
    return jnp.stack([once.sum(), (twice ^ twice >> 13).sum()])
