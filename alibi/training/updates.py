"""The updates of one run, or of several seeds in one program."""

import contextlib
import dataclasses
import os
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from alibi.config import Config, flatten
from alibi.config.fields import as_text, without_lists
from alibi.errors import Interrupted, is_watched, masked
from alibi.evaluation.scorer import Score
from alibi.model.loss import training_loss
from alibi.parallel import hosts
from alibi.parallel.sharding import batch_parts, batch_sharding
from alibi.progress import print_line
from alibi.runs import RunDirectory, make_provenance, method_files
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.runs.checksums import check_replicas
from alibi.storage.claims import LostError
from alibi.storage.files import write_whole
from alibi.training.record import NonFiniteLossError, Record
from alibi.training.setup import Job, Stretch, make_validator, micro_batches, validation_windows
from alibi.training.step import Feed, TrainStep, abstract_state, initial_state, make_train_step


class SeedRun:
    """One of the runs that train in one program: its checkpoints and its record.

    Args:
      stack: closes the run's files and threads.
      index: the run's place along the first axis of all states, for one of several seeds.
    """

    def __init__(self, job: Job, stack: contextlib.ExitStack, index: int | None):
        config, run, model, self.index = job.config, job.run, job.model, index
        keep, every = config.checkpoint.keep, config.checkpoint.keep_every
        self.job, self.checkpoints = job, Checkpoints(run.checkpoints, keep=keep, keep_every=every)
        stack.enter_context(self.checkpoints)
        self.latest = hosts.broadcast(lambda: self.checkpoints.latest) or 0
        self.abstract = abstract_state(model, job.optimizer, job.mesh)
        self.provenance = {  # content of provenance.json and of each checkpoint
            "config": dataclasses.asdict(config),
            **make_provenance(
                devices=sorted({device.device_kind for device in jax.devices()}),
                device_count=jax.device_count(),
                process_count=jax.process_count(),
                parameters=sum(leaf.size for leaf in jax.tree.leaves(self.abstract.params)),
                vocab_size=model.vocab_size,
                corpus=job.corpus,
                method_files=method_files(config),
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
                self.provenance["parent"] = hosts.broadcast(lambda: run.provenance().get("parent"))
        elif parent:
            state = parent.replace_in(state, self.job.mesh)
            self.provenance["parent"] = parent.about()
            if hosts.is_primary():
                print(f"starting {parent.describe()}", file=sys.stderr)
        hosts.broadcast(lambda: run.write("provenance.json", self.provenance))
        # not `latest` if that is damaged, or the start is a fork (init_step)
        done = int(state.step)
        record = Record(self.job, self.checkpoints, done, self.index)
        self.record = stack.enter_context(contextlib.closing(record))
        return state

    def save(
        self,
        state: TrainState,
        program: "Program",
        step: int,
        save: bool,
        validate: bool,
    ) -> bool:
        """Validates if asked, and saves if asked or if the validation was the best. Returns whether
        it saved.
        """
        if jax.process_count() > 1:  # before each decides by its own loss whether to save
            check_replicas(state, f"after update {step}")
        validator, sampler = program.validator, program.stretch.sampler
        score = validator(state.params) if validate and validator else None
        nll, tokens = (score.mean_nats, score.values.size) if score else (None, 0)
        improved = nll is not None and self.record.validated(step, nll, tokens)
        if validate and sampler:
            self.record.sampled(step, sampler(state.params))
        # Seeds together are saved at the same updates, so that they can go on together.
        save |= improved or self.index is not None
        if save:
            hosts.broadcast(self.job.run.check_claim)
            self.checkpoints.save(state, step, self.provenance | self.record.for_checkpoint(), nll)
        return save

    def end(self, state: str, step: int, reason: str = "") -> None:
        """Waits for the checkpoint, and writes the run's last status."""
        self.checkpoints.wait()
        self.record.write_status(state, step, reason)
        self.record.close()  # before the line "finished"


@dataclasses.dataclass
class Program:
    """All that the updates of a stretch run."""

    stretch: Stretch
    feed: Feed
    train_step: TrainStep
    validator: Callable[[PyTree], Score] | None


class Updates:
    """The compiled step, batches, and state after the latest update. Several seeds have one step, and their
    state has a first axis of seeds.

    Args:
      stack: closes the runs' files and threads.

    Attributes:
      program: compiled step, batches and validation for the next update.
      left: the runs that have not diverged.
      diverged: why the others of several seeds ended.
    """

    def __init__(self, jobs: Sequence[Job], stack: contextlib.ExitStack):
        self.job, self.together = job, together = jobs[0], len(jobs) > 1
        self._jobs, self._stack, config, mesh = jobs, stack, job.config, job.mesh
        places = range(len(jobs)) if together else [None]
        runs = [SeedRun(each, stack, index) for each, index in zip(jobs, places, strict=True)]
        self.left, self.diverged = runs, list[str]()
        self._trace = stack.enter_context(contextlib.ExitStack())
        latest, abstract = runs[0].latest, runs[0].abstract
        shardings: Any = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        self._slice = jax.jit(
            lambda state, index: jax.tree.map(lambda leaf: leaf[index], state),
            out_shardings=shardings,
        )
        self._seed: Any = [each.config.seed for each in jobs] if together else config.seed
        if together:
            shardings = NamedSharding(mesh, PartitionSpec())
            abstract = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    (len(jobs), *leaf.shape), leaf.dtype, sharding=shardings
                ),
                abstract,
            )
        if hosts.is_primary() and not is_watched():
            print(_headline(jobs, runs[0].provenance), file=sys.stderr)

        self._abstract, self._shardings = abstract, shardings
        self._programs = dict[int, Program]()
        self._begin(latest)
        for stretch in job.stretches:  # all programs now: a refusal comes before the first update
            if stretch.first > latest:
                self._program(stretch)

        initial = None if latest else initial_state(job.model, job.optimizer, mesh, self._seed)
        states = [
            run.begin(None if initial is None else self._state_of(run, initial), stack)
            for run in runs
        ]
        self.state, self.step = states[0], int(states[0].step)
        if together:
            check_one_update(jobs, [int(state.step) for state in states])
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
            self.state = jax.device_put(stacked, shardings)
        if self.step != latest:  # the latest was damaged, or the run forks by init_step
            self._begin(self.step)

    def _begin(self, done: int) -> None:
        """Takes the program of the update after `done`, and starts to read its batch."""
        began = self.job.config.began(done + 1)
        self.program = self._program(next(s for s in self.job.stretches if s.first == began))
        self.program.feed.read_ahead(done)

    def _program(self, stretch: Stretch) -> Program:
        """Returns the compiled program of a stretch, the same for stretches of the same values."""
        alike = [each.config == stretch.config for each in self.job.stretches]
        if (first := alike.index(True)) in self._programs:
            return self._programs[first]
        config, model, mesh, files = stretch.config, stretch.model, self.job.mesh, self.job.files
        micro = micro_batches(config, batch_parts(batch_sharding(mesh)))
        batches, *others = (job.stretches[first].batches for job in self._jobs)
        feed = self._stack.enter_context(contextlib.closing(Feed(batches, mesh, micro, others)))
        step: Any = make_train_step(
            model,
            self.job.optimizer,
            self._seed,
            loss=training_loss(config),
            schedule=self.job.schedule,
            state_shardings=self._shardings,
            gather=config.mesh.gather,
        )
        if not jax.config.values["jax_disable_jit"]:
            step = step.lower(self._abstract, *feed.abstract).compile()
        validator = make_validator(config, model, files["valid"]) if "valid" in files else None
        return self._programs.setdefault(first, Program(stretch, feed, step, validator))

    def _state_of(self, run: SeedRun, state: TrainState) -> TrainState:
        """Returns a run's own state."""
        return self._slice(state, run.index) if self.together else state

    def run(self, request: "StopRequest") -> None:
        """Makes the remaining updates, with validations and checkpoints."""
        config, saved_at = self.job.config, time.monotonic()
        step = done = self.step
        steps, several = config.train.steps, jax.process_count() > 1
        first, last = config.log.traced
        if 0 < first <= done and hosts.is_primary():
            print(f"no trace: update {first} of log.profile_steps is done", file=sys.stderr)
        ends = {*(stretch.first for stretch in self.job.stretches), steps}
        while step < steps and self.left:
            if step in ends and step > done:
                self._begin(step)
                if hosts.is_primary():
                    print_line(f"{self.job.run.name}: {_values(self.job.config, step)}")
            if step + 1 == first:
                jax.block_until_ready(self.state)
                self._trace.enter_context(jax.profiler.trace(self.job.run.path / "trace"))
            batch = self.program.feed.get(step, last=step + 1 in ends)
            waited = sum(each.feed.waited for each in self._programs.values())
            step += 1
            with jax.profiler.StepTraceAnnotation("update", step_num=step):
                self.state, metrics = self.program.train_step(self.state, *batch)
            if step == last:
                jax.block_until_ready(self.state)
                self._trace.close()
            if several and step == done + 1:
                check_replicas(self.state, f"after update {step}")
            for run in tuple(self.left):
                with self._ends_alone(run):
                    run.record.dispatched(step, metrics, waited)
            stop, save = request.reached(step), _is_save_due(config, step, saved_at)
            # A run that stops is not validated: that may take longer than there is left to save.
            validate = step == steps or (_due(step, config.eval.every_steps) and not stop)
            if (stop or save or validate) and self._save(step, stop or save, validate):
                saved_at = time.monotonic()
            if stop and step < steps:
                self._end("interrupted", step, "stopped by a signal")
                raise Interrupted(f"stopped at update {step} of {steps}; {self._goes_on()}")
        self._end("finished", step)

    def _save(self, step: int, save: bool, validate: bool) -> bool:
        """Validates and saves the runs (see `SeedRun.save`). Returns whether one was saved."""
        saved = False
        with contextlib.ExitStack() as paused:
            for run in tuple(self.left):
                with self._ends_alone(run):
                    run.record.fetch()  # a state that is not finite is never saved
                    paused.enter_context(run.record.speed.paused())
            for run in tuple(self.left):
                with self._ends_alone(run):
                    state = self._state_of(run, self.state)
                    saved |= run.save(state, self.program, step, save, validate)
        return saved

    def _end(self, state: str, step: int, reason: str = "") -> None:
        for run in tuple(self.left):
            with self._ends_alone(run):
                run.end(state, step, reason)

    def _goes_on(self) -> str:
        """Returns how the runs go on there after a stop."""
        if not self.diverged:
            return "the same command goes on there"
        seeds = ",".join(str(run.job.config.seed) for run in self.left)
        workdirs = ",".join(str(run.job.run) for run in self.left)
        return f"those that have not diverged go on there by --seeds={seeds} --workdir={workdirs}"

    @contextlib.contextmanager
    def _ends_alone(self, run: SeedRun) -> Iterator[None]:
        """One of several runs that diverges inside ends, and is left out from now on."""
        try:
            yield
        except NonFiniteLossError as error:
            if not self.together:
                raise
            directory, steps = run.job.run, run.job.config.train.steps
            self.left.remove(run)
            self.diverged.append(f"{directory}: {error}")
            with contextlib.suppress(NonFiniteLossError), failure_recorded(directory, steps):
                raise


def check_one_update(jobs: Sequence[Job], updates: Sequence[int]) -> None:
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

    def answer(self, signum: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self._received and signum == signal.SIGINT:
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


def _values(config: Config, done: int) -> str:
    """Returns the values over updates that apply after update `done`."""
    now = flatten(config.at(done + 1))
    values = (f"{key}={as_text(without_lists(now[key]))}" for key in config.over_updates)
    return f"from update {done + 1:,} on {', '.join(values)}"


def _headline(jobs: Sequence[Job], provenance: dict[str, Any]) -> str:
    """Returns four lines: devices, model, corpus, and where checkpoints go."""
    job, config = jobs[0], jobs[0].config
    kinds = " and ".join(provenance["devices"])
    hosted = f" of {count} processes" if (count := provenance["process_count"]) > 1 else ""
    axes = ", ".join(f"{axis}={size}" for axis, size in job.mesh.shape.items())
    steps, batch = config.train.steps, config.train.batch_tokens
    texts = (
        f"{split} {manifest['tokens']:,} tokens of {textwrap.shorten(manifest['source'], 60, placeholder=' ...')}"
        for split, manifest in job.corpus.items()
    )
    methods = ", then ".join(name for _, name in config.pairs("position"))
    valid = validation_windows(config, job.corpus.get("valid", {"tokens": 1})["tokens"])
    return (
        f"devices: {job.mesh.size} x {kinds}{hosted}, mesh {axes}\n"
        f"model: {methods}, {provenance['parameters']:,} parameters; "
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
