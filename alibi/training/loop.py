"""The training loop: from a config and a work directory to checkpoints and metrics."""

import contextlib
import dataclasses
import math
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import ml_collections
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from alibi.data.batches import TrainBatches
from alibi.data.tokens import TokenFile
from alibi.errors import UserError, disk_errors_named
from alibi.model import build_model, count_parameters
from alibi.runs import RunDirectory, completed, make_provenance
from alibi.training.checkpoint import Checkpoints
from alibi.training.feed import Feed
from alibi.training.interrupt import Interrupt
from alibi.training.metrics import MetricsWriter, Progress, peak_memory_bytes
from alibi.training.optimizer import make_optimizer
from alibi.training.schedules import make_schedule
from alibi.training.setup import check_config, micro_batches, on_first_host, prepare_files, sequences_per_update
from alibi.training.sharding import batch_sharding, batch_shards, make_mesh
from alibi.training.state import abstract_state, initial_state
from alibi.training.step import Metrics, make_train_step
from alibi.training.validation import make_validator

# Hosts ask each other at least this often whether one was told to stop: a cluster that takes a machine back gives
# it half a minute or so, in which the checkpoint must be saved too. All must ask at the same update, so it is a
# number of updates; each time they wait for the update before.
MOST_UPDATES_ALONE = 10


class NonFiniteLossError(UserError):
    """The loss, its gradient or the update stopped being a number; the last good checkpoint stays."""


class Interrupted(RuntimeError):  # noqa: N818 - no error: the user's wish
    """The run was asked to stop and has saved a checkpoint."""


def train(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
    """Trains the run that `config` describes in `workdir`, from its latest checkpoint if it has one.

    Returns:
      The run's final status (see `RunDirectory.status`). A finished run is left as it is, unless
      its last checkpoint was lost: then it goes on from the one before.

    Raises:
      ValueError: a config, corpus or work directory that can't be used, or whose checkpoints were
        all lost; before any work.
      NonFiniteLossError: see there.
      UserError: no space left.
      Interrupted: SIGINT or SIGTERM arrived; a checkpoint was saved.
    """
    config = completed(config)  # a config file that an older version wrote beside an imported checkpoint may lack keys
    run = RunDirectory(workdir)
    mesh = make_mesh(config.mesh)
    check_config(config, mesh)
    on_first_host(lambda: run.check(config))
    on_first_host(run.check_checkpoints)
    files = prepare_files(config.data)
    build_model(config, files["train"].manifest.vocab_size)  # raises if adaptive bands don't fit the dictionary
    batches = TrainBatches(
        files["train"].tokens,
        length=config.train_length,
        batch_size=sequences_per_update(config, batch_shards(mesh)),
        seed=config.seed,
        boundary_id=files["train"].manifest.boundary_id,
    )
    manifests = {split: dataclasses.asdict(file.manifest) for split, file in files.items()}
    on_first_host(lambda: run.check_corpus(manifests))
    if (status := run.status())["state"] == "finished":
        if run.is_finished():
            _say(
                f"{run.path} was finished before, with {status['steps']} updates; evaluate it by\n"
                f"  python eval_extrapolation.py --workdirs={run.path} --multiples=1,2,4,8"
            )
            return status
        _say(f"{run.path} was finished before, but its checkpoint of update {status['step']} was lost since")
    with disk_errors_named(run.path):
        on_first_host(lambda: run.claim(config, files["train"].tokenizer()))
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            stack.callback(run.release)
            stack.enter_context(_failure_recorded(run, config.train.steps))
        stack.enter_context(disk_errors_named(run.path))
        return Trainer(config, run, mesh, files, batches, stack).run_to_end()


def _say(message: str) -> None:
    if jax.process_index() == 0:
        print(message, file=sys.stderr)


@contextlib.contextmanager
def _failure_recorded(run: RunDirectory, steps: int) -> Iterator[None]:
    """Writes why a run ended to its status, with the traceback beside it, as far as the disk allows."""
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        reason = "stopped by a signal" if state == "interrupted" else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError, ValueError):
            before = run.status()
            kept = {key: before[key] for key in ("tokens_per_second", "peak_memory_bytes", "best") if key in before}
            run.write_status(state, step=before["step"], steps=steps, reason=reason, **kept)
            (run.path / "error.txt").write_text(traceback.format_exc())
        raise


class Trainer:
    """One run under way: what `train` has built, and the state that changes."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        run: RunDirectory,
        mesh: Mesh,
        files: dict[str, TokenFile],
        batches: TrainBatches,
        stack: contextlib.ExitStack,
    ):
        self.config, self.run, self.steps = config, run, config.train.steps
        self.primary = jax.process_index() == 0
        model = build_model(config, files["train"].manifest.vocab_size, activations=batch_sharding(mesh))
        optimizer = make_optimizer(config.optimizer, self.steps)
        abstract = abstract_state(model, optimizer, mesh)
        self.train_step = make_train_step(
            model,
            optimizer,
            config.seed,
            schedule=make_schedule(config.optimizer, self.steps),
            state_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
        )
        self.before = run.status()  # of the process that trained here last
        self.about = {
            "config": config.to_dict(),
            **make_provenance(
                devices=sorted({device.device_kind for device in jax.devices()}),
                device_count=jax.device_count(),
                process_count=jax.process_count(),
                parameters=count_parameters(model),
                vocab_size=model.vocab_size,
                corpus={split: dataclasses.asdict(file.manifest) for split, file in files.items()},
            ),
        }
        if self.primary:
            run.write("provenance.json", self.about)
        self.checkpoints = stack.enter_context(Checkpoints(run.checkpoints, keep=config.checkpoint.keep))
        self.step, self.best = self.checkpoints.latest or 0, self.checkpoints.best
        if self.step:
            self.state = self.checkpoints.restore(self.step, abstract)
        else:
            self.state = initial_state(model, optimizer, mesh, config.seed)
        self.valid = make_validator(config, model, mesh, files.get("valid"))
        parts = micro_batches(config, batch_shards(mesh))
        self.feed = stack.enter_context(contextlib.closing(Feed(batches, mesh, parts)))
        self.writer = None
        if self.primary:
            tensorboard = run.path / "tensorboard" if config.log.tensorboard else None
            writer = MetricsWriter(run.metrics_file, tensorboard, self.step)
            self.writer = stack.enter_context(contextlib.closing(writer))
        progress = Progress(run.name, self.step, self.steps, config.train.batch_tokens, show=self.primary)
        self.progress = stack.enter_context(contextlib.closing(progress))
        self.saved_at = time.monotonic()
        self.window = np.zeros(2)  # NLL and tokens since the last row
        self.pending: tuple[int, Metrics] | None = None

    def run_to_end(self) -> dict[str, Any]:
        """All updates that are left, then the final validation and checkpoint."""
        if self.step:
            self.progress.say(f"{self.run.path}: going on from the checkpoint of update {self.step} of {self.steps}")
        with Interrupt() as interrupt:
            while self.step < self.steps:
                self._update()
                stop, save = self._decide(interrupt.requested)
                validate = self.step == self.steps or _due(self.step, self.config.eval.every_steps)
                if stop or save or validate:
                    self._pause(validate, save or stop)
                if stop and self.step < self.steps:
                    self.checkpoints.wait()
                    self._write_status("interrupted", reason="stopped by a signal")
                    raise Interrupted(f"stopped at update {self.step} of {self.steps}; the same command goes on there")
        self.checkpoints.wait()
        self._write_status("finished")
        return self.run.status()

    def _update(self) -> None:
        batch = self.feed.get(self.step, last=self.step + 1 == self.steps)
        self.state, metrics = self.train_step(self.state, *batch)
        self._arrive()
        self.step += 1
        self.pending = (self.step, metrics)

    def _arrive(self) -> None:
        """Fetches the metrics of the update before, while the devices work on the next one."""
        if self.pending is None:
            return
        (step, metrics), self.pending = self.pending, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        nll = values["nll_nats"] / max(values["tokens"], 1.0)
        if not all(math.isfinite(value) for value in values.values()):
            norms = f"gradient norm {values['gradient_norm']}, norm of the update {values['update_norm']}"
            self._refuse(f"update {step}: loss {nll}, {norms}")
        self.window += (values["nll_nats"], values["tokens"])
        self.progress.update(step, nll)
        if _due(step, self.config.log.every_steps) or step == self.steps:
            self._log(step, values)

    def _refuse(self, what: str) -> None:
        good = self.checkpoints.latest
        saved = f"the last good checkpoint is that of update {good}" if good else "no checkpoint was saved before"
        raise NonFiniteLossError(
            f"{what}; {saved}; try a lower optimizer.learning_rate, a longer warm-up or a smaller optimizer.clip_norm"
        )

    def _log(self, step: int, values: dict[str, float]) -> None:
        nll, tokens = self.window
        self.window[:] = 0.0
        row = {"train_nll": float(nll / max(tokens, 1.0)), "train_tokens": float(tokens)}
        row |= {name: values[name] for name in ("gradient_norm", "update_norm", "learning_rate")}
        if self.progress.tokens_per_second:
            row["tokens_per_second"] = self.progress.tokens_per_second
        if self.writer:
            self.writer.write(step, row)
        self._write_status("running")

    def _decide(self, interrupted: bool) -> tuple[bool, bool]:
        """Whether to stop and whether to save now; all hosts decide alike, every few updates."""
        checkpoint = self.config.checkpoint
        late = bool(checkpoint.every_minutes) and time.monotonic() - self.saved_at > 60 * checkpoint.every_minutes
        if jax.process_count() > 1:
            if not _due(self.step, min(self.config.log.every_steps, MOST_UPDATES_ALONE)):
                interrupted = late = False
            else:  # one signal stops all; the first host's clock counts
                flags = multihost_utils.process_allgather(np.array([interrupted, late and self.primary]))
                interrupted, late = (bool(flag) for flag in flags.any(axis=0))
        return interrupted, late or self.step == self.steps or _due(self.step, checkpoint.every_steps)

    def _pause(self, validate: bool, save: bool) -> None:
        """Validates and saves; nothing that is not finite is ever saved."""
        start = time.perf_counter()
        self._arrive()
        nll = self._validate() if validate and self.valid else None
        improved = nll is not None and (self.best is None or nll < self.best[1])
        if nll is not None and improved:
            self.best = (self.step, nll)
        if save or improved:
            self.checkpoints.save(self.state, self.step, self.about, nll)
            self.saved_at = time.monotonic()
        self.progress.pause(time.perf_counter() - start)

    def _validate(self) -> float:
        assert self.valid is not None
        nll = self.valid(self.state.params)
        if not math.isfinite(nll):
            self._refuse(f"update {self.step}: validation loss {nll}")
        self.progress.say(f"update {self.step}: validation {nll:.4f} nats, perplexity {math.exp(min(nll, 700)):.3f}")
        if self.writer:
            self.writer.write(self.step, {"valid_nll": nll})
        return nll

    def _write_status(self, state: str, reason: str = "") -> None:
        if self.primary:
            best = None if self.best is None else {"step": self.best[0], "valid_nll": self.best[1]}
            self.run.write_status(
                state,
                step=self.step,
                steps=self.steps,
                reason=reason,
                tokens_per_second=self.progress.tokens_per_second or self.before.get("tokens_per_second"),
                peak_memory_bytes=max(peak_memory_bytes(), self.before.get("peak_memory_bytes", 0)),
                best=best,
            )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
