"""Training: from a config and a work directory to checkpoints and metrics."""

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

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
from alibi.model.loss import training_loss
from alibi.parallel import hosts
from alibi.parallel.sharding import batch_parts, batch_sharding, make_mesh
from alibi.runs import RunDirectory, make_provenance, method_files, process_facts
from alibi.runs.checkpoint import Checkpoints
from alibi.runs.checksums import check_replicas
from alibi.storage.claims import LostError
from alibi.storage.files import write_whole
from alibi.training.record import NonFiniteLossError, Record
from alibi.training.setup import Job, make_job, make_validator, micro_batches, validation_windows
from alibi.training.step import Feed, TrainStep, abstract_state, initial_state, make_train_step

__all__ = ["Interrupted", "NonFiniteLossError", "train"]


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
    several = jax.process_count() > 1
    signals = set(SIGNALS) - ({signal.SIGTERM} if several else set())  # that is JAX's
    with signals_raised(signals) as received, contextlib.ExitStack() as stack:
        if config.init_from:  # absolute: the command may be repeated elsewhere
            config = dataclasses.replace(config, init_from=str(RunDirectory(config.init_from)))
        hosts.check_alike({"workdir": workdir, **process_facts(config)})
        run = RunDirectory(workdir)
        job = make_job(config, run, make_mesh(config.mesh))
        if hosts.broadcast(lambda: _is_finished(run, config.train.steps)):
            return run.status()
        stack.enter_context(disk_errors_named(run))
        hosts.broadcast(lambda: run.claim(config, job.files["train"].tokenizer()))
        if hosts.is_primary():
            stack.callback(run.release)
            stack.enter_context(failure_recorded(run, config.train.steps))
        updates, stop = Updates(job, stack), StopRequest()
        if received:
            raise Interrupted
        with signals_handled(stop.answer, signals):
            updates.run(stop)
        if hosts.is_primary() and not is_watched():
            print(f"finished; {_next_command(run)}", file=sys.stderr)
        return run.status()


class Updates:
    """A run's compiled step, batches, and state after the latest update.

    Args:
      stack: closes the run's files and threads.
    """

    def __init__(self, job: Job, stack: contextlib.ExitStack):
        config, run, model, optimizer, mesh = (
            job.config,
            job.run,
            job.model,
            job.optimizer,
            job.mesh,
        )
        self.job, self.checkpoints = job, Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        stack.enter_context(self.checkpoints)
        latest = hosts.broadcast(lambda: self.checkpoints.latest) or 0
        abstract = abstract_state(model, optimizer, mesh)
        self.about = {  # content of provenance.json and of each checkpoint
            "config": dataclasses.asdict(config),
            **make_provenance(
                devices=sorted({device.device_kind for device in jax.devices()}),
                device_count=jax.device_count(),
                process_count=jax.process_count(),
                parameters=sum(leaf.size for leaf in jax.tree.leaves(abstract.params)),
                vocab_size=model.vocab_size,
                corpus=job.corpus,
                method_files=method_files(config.position),
            ),
        }
        if hosts.is_primary() and not is_watched():
            print(_headline(job, self.about), file=sys.stderr)

        micro = micro_batches(config, batch_parts(batch_sharding(mesh)))
        self.feed = stack.enter_context(contextlib.closing(Feed(job.batches, mesh, micro)))
        self.feed.read_ahead(latest)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        step = make_train_step(
            model,
            optimizer,
            config.seed,
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

        if latest:
            self.state = self.checkpoints.restore_newest(abstract)
            if config.init_from:
                self.about["parent"] = hosts.broadcast(lambda: run.provenance().get("parent"))
        else:
            self.state = initial_state(model, optimizer, mesh, config.seed)
            if job.parent:
                self.state = job.parent.replace_in(self.state, mesh)
                self.about["parent"] = job.parent.about()
                if hosts.is_primary():
                    print(f"starting {job.parent.describe()}", file=sys.stderr)
        if hosts.is_primary():
            run.write("provenance.json", self.about)
        done = int(self.state.step)  # less than `latest` if that is damaged
        self.record = stack.enter_context(contextlib.closing(Record(job, self.checkpoints, done)))

    def run(self, request: "StopRequest") -> None:
        """Makes the remaining updates, with validations and checkpoints."""
        config, saved_at = self.job.config, time.monotonic()
        step = done = int(self.state.step)
        steps, several = config.train.steps, jax.process_count() > 1
        first, last = config.log.traced
        if 0 < first <= done and hosts.is_primary():
            print(f"no trace: update {first} of log.profile_steps is done", file=sys.stderr)
        while step < steps:
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
            self.record.dispatched(step, metrics, data_wait_seconds=self.feed.waited)
            stop, save = request.reached(step), _is_save_due(config, step, saved_at)
            # A run that stops is not validated: that may take longer than there is left to save.
            validate = step == steps or (_due(step, config.eval.every_steps) and not stop)
            if (stop or save or validate) and self._save(step, stop or save, validate):
                saved_at = time.monotonic()
            if stop and step < steps:
                self.checkpoints.wait()
                self.record.write_status("interrupted", step, reason="stopped by a signal")
                raise Interrupted(
                    f"stopped at update {step} of {steps}; the same command goes on there"
                )
        self.checkpoints.wait()
        self.record.write_status("finished", step)
        self.record.close()  # before the line "finished"

    def _save(self, step: int, save: bool, validate: bool) -> bool:
        """Validates if asked, and saves if asked or if the validation was the best. Returns whether
        it saved.
        """
        self.record.fetch()  # a state that is not finite is never saved
        with self.record.speed.paused():
            if jax.process_count() > 1:  # before each decides by its own loss whether to save
                check_replicas(self.state, f"after update {step}")
            score = self.validator(self.state.params) if validate and self.validator else None
            nll, tokens = (score.total_nats / score.tokens, score.tokens) if score else (None, 0)
            improved = nll is not None and self.record.validated(step, nll, tokens)
            if validate and self.job.sampler:
                self.record.sampled(step, self.job.sampler(self.state.params))
            if save or improved:
                hosts.broadcast(self.job.run.check_claim)
                self.checkpoints.save(
                    self.state,
                    step,
                    self.about | self.record.for_checkpoint(),
                    nll,
                )
        return save or improved


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


def _next_command(run: RunDirectory) -> str:
    flags = shlex.join([f"--workdirs={run}", "--multiples=1,2,4,8"])
    installed = os.path.basename(sys.argv[0]) == "alibi-train"
    command = "alibi-eval" if installed else "python eval_extrapolation.py"
    return f"evaluate it by\n  {command} {flags}"


def _headline(job: Job, about: dict[str, Any]) -> str:
    """Returns four lines: devices, model, corpus, and where checkpoints go."""
    config = job.config
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
        f"saved in: {job.run}"
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
