"""Training: from a config and a work directory to checkpoints and metrics."""

import contextlib
import dataclasses
import functools
import os
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from alibi.config import Config
from alibi.errors import (
    SIGNALS,
    Interrupted,
    disk_errors_named,
    is_watched,
    masked,
    signals_handled,
    signals_raised,
)
from alibi.evaluation.scorer import Score
from alibi.model.loss import training_loss
from alibi.parallel import hosts
from alibi.parallel.sharding import batch_parts, batch_sharding, make_mesh
from alibi.runs import RunDirectory, make_provenance, method_files, process_facts
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.runs.checksums import check_replicas
from alibi.storage.claims import LostError
from alibi.storage.files import write_whole
from alibi.training.record import NonFiniteLossError, Record
from alibi.training.setup import Job, make_job, make_validator, micro_batches, validation_windows
from alibi.training.step import (
    Feed,
    Metrics,
    TrainStep,
    abstract_state,
    initial_state,
    make_train_step,
)

__all__ = ["Interrupted", "NonFiniteLossError", "train", "train_seeds"]


def train(config: Config, workdir: str) -> dict[str, Any]:
    """Trains a run in `workdir` from its latest checkpoint, or without one from the parameters of
    `config.init_from`, if set.

    A finished run stays as it is. If its last checkpoint was lost, it goes on from an earlier one.

    Returns:
      The run's final status (see `RunDirectory.status`).

    Raises:
      ValueError: before any work, for a refused config, corpus or work directory.
      NonFiniteLossError: the loss diverged.
      UserError: no space left.
      Interrupted: one of SIGNALS arrived. From the first update on a checkpoint was saved.
    """
    return train_seeds(config, {config.seed: workdir})[0]


def train_seeds(config: Config, workdirs: Mapping[int, str]) -> list[dict[str, Any]]:
    """Trains a run of `config` for each seed, all in one program, as `train` does each by itself.

    A run whose loss diverges ends, and the others go on. Speeds in rows and statuses are of a run, so
    its share of the device.

    Args:
      workdirs: the work directory of each seed.

    Returns:
      The runs' final statuses.

    Raises:
      ValueError: as `train`, and for several seeds on several devices or at different updates.
      NonFiniteLossError: the loss of a run diverged; for several seeds after the others' last update.
      UserError, Interrupted: as `train`.

    Example:
      >>> train_seeds(config, {seed: f"workdirs/copy-seed{seed}" for seed in range(100)})
    """
    several = jax.process_count() > 1
    signals = set(SIGNALS) - ({signal.SIGTERM} if several else set())  # that is JAX's
    with signals_raised(signals) as received, contextlib.ExitStack() as stack:
        if config.init_from:  # absolute: the command may be repeated elsewhere
            config = dataclasses.replace(config, init_from=str(RunDirectory(config.init_from)))
        hosts.check_alike({"workdir": ",".join(workdirs.values()), **process_facts(config)})
        mesh, runs = make_mesh(config.mesh), [*map(RunDirectory, workdirs.values())]
        together = len(runs) > 1
        if together and mesh.size > 1:
            raise ValueError(
                f"{len(runs)} seeds train together on one device, and the mesh has {mesh.size}; let the "
                "process see one (CUDA_VISIBLE_DEVICES=0), or train each seed by itself"
            )
        jobs = [
            make_job(dataclasses.replace(config, seed=seed), run, mesh)
            for seed, run in zip(workdirs, runs, strict=True)
        ]
        steps = config.train.steps
        if all(hosts.broadcast(lambda: [_is_finished(run, steps) for run in runs])):
            return [run.status() for run in runs]
        if together:
            _check_one_update(jobs, [max(run.saved_steps(), default=0) for run in runs])
        for job, run in zip(jobs, runs, strict=True):
            stack.enter_context(disk_errors_named(run))
            hosts.broadcast(
                functools.partial(run.claim, job.config, job.files["train"].tokenizer())
            )
            if hosts.is_primary():
                stack.callback(run.release)
        if hosts.is_primary():  # only now are all runs this process's own
            for run in runs:
                stack.enter_context(failure_recorded(run, steps))
        updates, stop = Updates(jobs, stack), StopRequest()
        if received:
            raise Interrupted
        with signals_handled(stop.answer, signals):
            updates.run(stop)
        if hosts.is_primary() and not is_watched() and updates.left:
            print(
                f"finished; {_next_command(*(part.job.run for part in updates.left))}",
                file=sys.stderr,
            )
    if updates.diverged:
        raise NonFiniteLossError("; ".join(updates.diverged))
    return [run.status() for run in runs]


class Part:
    """What a run has for itself beside other seeds in one program: its checkpoints and its record.

    Args:
      stack: closes the run's files and threads.
      index: the run's place along the first axis of all states, for one of several seeds.
    """

    def __init__(self, job: Job, stack: contextlib.ExitStack, index: int | None):
        config, run, model, self.index = job.config, job.run, job.model, index
        self.job, self.checkpoints = job, Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        stack.enter_context(self.checkpoints)
        self.latest = hosts.broadcast(lambda: self.checkpoints.latest) or 0
        self.abstract = abstract_state(model, job.optimizer, job.mesh)
        self.about = {  # content of provenance.json and of each checkpoint
            "config": dataclasses.asdict(config),
            **make_provenance(
                devices=sorted({device.device_kind for device in jax.devices()}),
                device_count=jax.device_count(),
                process_count=jax.process_count(),
                parameters=sum(leaf.size for leaf in jax.tree.leaves(self.abstract.params)),
                vocab_size=model.vocab_size,
                corpus=job.corpus,
                method_files=method_files(config.position),
            ),
        }

    def begin(self, state: TrainState | None, stack: contextlib.ExitStack) -> TrainState:
        """Starts to record. Returns the state of the newest checkpoint, or without one `state`, in which the
        parent's parameters replace its own.
        """
        run, parent = self.job.run, self.job.parent
        if state is None:
            state = self.checkpoints.restore_newest(self.abstract)
            if self.job.config.init_from:
                self.about["parent"] = hosts.broadcast(lambda: run.provenance().get("parent"))
        elif parent:
            state = parent.replace_in(state, self.job.mesh)
            self.about["parent"] = parent.about()
            if hosts.is_primary():
                print(f"starting {parent.describe()}", file=sys.stderr)
        if hosts.is_primary():
            run.write("provenance.json", self.about)
        done = int(state.step)  # less than `latest` if that is damaged
        record = Record(self.job, self.checkpoints, done, self.index)
        self.record = stack.enter_context(contextlib.closing(record))
        return state

    def save(
        self,
        state: TrainState,
        validator: Callable[[PyTree], Score] | None,
        step: int,
        save: bool,
        validate: bool,
    ) -> bool:
        """Validates if asked, and saves if asked or if the validation was the best. Returns whether
        it saved.
        """
        self.record.fetch()  # a state that is not finite is never saved
        with self.record.speed.paused():
            if jax.process_count() > 1:  # before each decides by its own loss whether to save
                check_replicas(state, f"after update {step}")
            score = validator(state.params) if validate and validator else None
            nll, tokens = (score.total_nats / score.tokens, score.tokens) if score else (None, 0)
            improved = nll is not None and self.record.validated(step, nll, tokens)
            if validate and self.job.sampler:
                self.record.sampled(step, self.job.sampler(state.params))
            # Seeds together are saved at the same updates, so that they can go on together.
            if save or improved or self.index is not None:
                hosts.broadcast(self.job.run.check_claim)
                self.checkpoints.save(
                    state,
                    step,
                    self.about | self.record.for_checkpoint(),
                    nll,
                )
        return save or improved or self.index is not None

    def end(self, state: str, step: int, reason: str = "") -> None:
        """Waits for the checkpoint, and writes the run's last status."""
        self.checkpoints.wait()
        self.record.write_status(state, step, reason)
        self.record.close()  # before the line "finished"


class Updates:
    """The compiled step, batches, and state after the latest update. Several seeds have one step, and their
    state has a first axis of seeds.

    Args:
      stack: closes the runs' files and threads.

    Attributes:
      left: the runs that have not diverged.
      diverged: why the others of several seeds ended.
    """

    def __init__(self, jobs: Sequence[Job], stack: contextlib.ExitStack):
        self.job, self.together = job, together = jobs[0], len(jobs) > 1
        config, model, optimizer, mesh = job.config, job.model, job.optimizer, job.mesh
        places = range(len(jobs)) if together else [None]
        parts = [Part(each, stack, index) for each, index in zip(jobs, places, strict=True)]
        self.left, self.diverged = parts, list[str]()
        if together:  # again, under the claims
            _check_one_update(jobs, [part.latest for part in parts])
        latest, abstract = parts[0].latest, parts[0].abstract
        shardings: Any = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        self._slice = jax.jit(
            lambda state, index: jax.tree.map(lambda leaf: leaf[index], state),
            out_shardings=shardings,
        )
        seed: Any = [each.config.seed for each in jobs] if together else config.seed
        if together:
            shardings = NamedSharding(mesh, PartitionSpec())
            abstract = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    (len(jobs), *leaf.shape), leaf.dtype, sharding=shardings
                ),
                abstract,
            )
        if hosts.is_primary() and not is_watched():
            print(_headline(jobs, parts[0].about), file=sys.stderr)

        micro = micro_batches(config, batch_parts(batch_sharding(mesh)))
        feed = Feed(job.batches, mesh, micro, [each.batches for each in jobs[1:]])
        self.feed = stack.enter_context(contextlib.closing(feed))
        self.feed.read_ahead(latest)
        step = make_train_step(
            model,
            optimizer,
            seed,
            loss=training_loss(config),
            schedule=job.schedule,
            state_shardings=shardings,
        )
        self.train_step: TrainStep = step
        if not jax.config.values["jax_disable_jit"]:
            self.train_step = step.lower(abstract, *self.feed.abstract).compile()
        self.validator = (
            make_validator(config, model, job.files["valid"]) if "valid" in job.files else None
        )

        initial = None if latest else initial_state(model, optimizer, mesh, seed)
        states = [part.begin(initial and self._part(initial, part), stack) for part in parts]
        self.state, self.step = states[0], int(states[0].step)
        if together:
            _check_one_update(jobs, [int(state.step) for state in states])
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
            self.state = jax.device_put(stacked, shardings)

    def _part(self, state: TrainState, part: Part) -> TrainState:
        """Returns the state of a run."""
        return self._slice(state, part.index) if self.together else state

    def run(self, request: "StopRequest") -> None:
        """Makes the remaining updates, with validations and checkpoints."""
        config, saved_at = self.job.config, time.monotonic()
        step = done = self.step
        steps, several = config.train.steps, jax.process_count() > 1
        first, last = config.log.traced
        if 0 < first <= done and hosts.is_primary():
            print(f"no trace: update {first} of log.profile_steps is done", file=sys.stderr)
        while step < steps and self.left:
            if step + 1 == first:
                jax.block_until_ready(self.state)
                jax.profiler.start_trace(self.job.run.path / "trace")
            batch = self.feed.get(step, last=step + 1 == steps)
            step += 1
            with jax.profiler.StepTraceAnnotation("update", step_num=step):
                self.state, metrics = self.train_step(self.state, *batch)
            if done < first and step == last:
                jax.block_until_ready(self.state)
                jax.profiler.stop_trace()
            if several and step == done + 1:
                check_replicas(self.state, f"after update {step}")
            self._each(self._dispatched, step, metrics)
            stop, save = request.reached(step), _is_save_due(config, step, saved_at)
            # A run that stops is not validated: that may take longer than there is left to save.
            validate = step == steps or (_due(step, config.eval.every_steps) and not stop)
            due = stop or save or validate
            if due and any(self._each(self._save, step, stop or save, validate)):
                saved_at = time.monotonic()
            if stop and step < steps:
                self._each(Part.end, "interrupted", step, "stopped by a signal")
                raise Interrupted(
                    f"stopped at update {step} of {steps}; the same command goes on there"
                )
        self._each(Part.end, "finished", step)

    def _dispatched(self, part: Part, step: int, metrics: Metrics) -> None:
        part.record.dispatched(step, metrics, data_wait_seconds=self.feed.waited)

    def _save(self, part: Part, *due: Any) -> bool:
        return part.save(self._part(self.state, part), self.validator, *due)

    def _each(self, work: Callable[..., Any], *of: Any) -> list[Any]:
        """Returns `work(part, *of)` for each run. One of several that diverges ends, and is left out from now on."""
        results = []
        for part in tuple(self.left):
            try:
                results.append(work(part, *of))
            except NonFiniteLossError as error:
                if not self.together:
                    raise
                run, steps = part.job.run, part.job.config.train.steps
                self.left.remove(part)
                self.diverged.append(f"{run}: {error}")
                with contextlib.suppress(NonFiniteLossError), failure_recorded(run, steps):
                    raise
        return results


def _check_one_update(jobs: Sequence[Job], updates: Sequence[int]) -> None:
    """Raises ValueError for seeds at different updates."""
    last, first = updates.index(max(updates)), updates.index(min(updates))
    if last != first:
        ahead, behind = (f"{jobs[at].run} is at update {updates[at]:,}" for at in (last, first))
        raise ValueError(
            f"{ahead}, and {behind}; seeds train together from the same update on, so train each by itself, "
            "without --seeds"
        )


def _is_save_due(config: Config, step: int, saved_at: float) -> bool:
    """Returns whether to save after update `step`. Several hosts ask process 0's clock, as often as
    they log metrics.
    """
    if step == config.train.steps or _due(step, config.checkpoint.every_steps):
        return True
    minutes = config.checkpoint.every_minutes
    if not minutes or (jax.process_count() > 1 and not _due(step, config.log.every_steps)):
        return False
    return hosts.broadcast(lambda: time.monotonic() - saved_at > 60 * minutes)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class StopRequest:
    """A signal's request to stop after an update, with a checkpoint. A second SIGINT stops at once.

    On several processes JAX takes SIGTERM (see `hosts.join`) and tells all of them, so they stop
    after the same update. Other signals are passed on as SIGTERM.
    """

    def __init__(self) -> None:
        self._alone, self._received = jax.process_count() == 1, False

    def answer(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self._received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = True
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)
        # Not print: the signal may have interrupted a print. And the reader may be gone.
        with contextlib.suppress(OSError):
            os.write(
                2,
                b"\nstopping after this update; a checkpoint will be saved (Ctrl-C again: at once)\n",
            )

    def reached(self, step: int) -> bool:
        """Returns whether to stop after update `step`. All processes must call it each update."""
        return (
            self._received if self._alone else multihost_utils.reached_preemption_sync_point(step)
        )


def _is_finished(run: RunDirectory, steps: int) -> bool:
    """Returns whether all `steps` updates are made, and prints it, or that the last checkpoint is lost."""
    status = run.status()
    if status["step"] < steps:
        return False
    finished = status["state"] == "finished" and status["step"] in run.saved_steps()
    if status["state"] == "finished":
        rest = f"but its checkpoint of update {status['step']} was lost since"
        if finished:
            rest = f"with {status['steps']} updates; {_next_command(run)}"
        print(f"{run} was finished before, {rest}", file=sys.stderr)
    return finished


def _next_command(*runs: RunDirectory) -> str:
    flags = shlex.join([f"--workdirs={','.join(map(str, runs))}", "--multiples=1,2,4,8"])
    installed = os.path.basename(sys.argv[0]) == "alibi-train"
    command = "alibi-eval" if installed else "python eval_extrapolation.py"
    return f"evaluate it by\n  {command} {flags}"


def _headline(jobs: Sequence[Job], about: dict[str, Any]) -> str:
    """Returns four lines: devices, model, corpus, and where checkpoints go."""
    job, config = jobs[0], jobs[0].config
    kinds = " and ".join(about["devices"])
    hosted = f" of {count} processes" if (count := about["process_count"]) > 1 else ""
    axes = ", ".join(f"{axis}={size}" for axis, size in job.mesh.shape.items())
    steps, batch = config.train.steps, config.train.batch_tokens
    texts = (
        f"{split} {manifest['tokens']:,} tokens of {textwrap.shorten(manifest['source'], 60, placeholder=' ...')}"
        for split, manifest in job.corpus.items()
    )
    valid = validation_windows(config, job.corpus.get("valid", {"tokens": 1})["tokens"])
    return (
        f"devices: {job.mesh.size} x {kinds}{hosted}, mesh {axes}\n"
        f"model: {config.position}, {about['parameters']:,} parameters; "
        f"{batch:,} tokens a step, {steps * batch:,} in {steps:,} steps\n"
        f"corpus ({config.data.tokenizer}): {'; '.join(texts)}"
        + f"; a validation scores {valid.num_tokens:,} tokens, spread evenly (eval.max_tokens)"
        * bool(valid.spacing)
        + f"\n"
        f"saved in: {', '.join(str(each.run) for each in jobs)}"
    )


@contextlib.contextmanager
def failure_recorded(run: RunDirectory, steps: int) -> Iterator[None]:
    """Writes why a run ended to its status, and a traceback to error.txt, if the disk allows."""
    try:
        yield
    except LostError:
        raise  # another process writes the status by now
    except BaseException as error:
        signalled = isinstance(error, KeyboardInterrupt)
        stopped = signalled or hosts.is_lost_connection(error)
        reason = "stopped by a signal" if signalled else masked(f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError, ValueError, LostError):
            status = run.status()
            # otherwise the status is written, with the update
            if not isinstance(error, Interrupted) or status["state"] == "running":
                state = "interrupted" if stopped else "failed"
                run.write_status(**status | {"state": state, "steps": steps, "reason": reason})
            if not stopped:
                write_whole(run.path / "error.txt", masked(traceback.format_exc()))
        raise
