"""The training loop: from a config and a work directory to checkpoints and metrics."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_collections
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import PyTree

from alibi.data.batches import TrainBatches
from alibi.data.tokens import TokenFile, prepare, prepare_with
from alibi.errors import UserError
from alibi.evaluation.perplexity import Scorer, model_nll
from alibi.model import DecoderLM, build_model, count_parameters
from alibi.runs import RunDirectory, make_provenance
from alibi.training.checkpoint import Checkpoints
from alibi.training.feed import Feed
from alibi.training.interrupt import Interrupt
from alibi.training.metrics import MetricsWriter, Progress
from alibi.training.optimizer import make_optimizer, make_schedule
from alibi.training.sharding import batch_sharding, batch_shards, make_mesh
from alibi.training.state import abstract_state, initial_state
from alibi.training.step import Metrics, make_train_step

# Parameters to the mean NLL of a text in nats per token.
Validator = Callable[[PyTree], float]


class NonFiniteLossError(UserError):
    """The loss or its gradient stopped being a number; the last good checkpoint stays."""


class Interrupted(RuntimeError):  # noqa: N818 - no error: the user's wish
    """The run was asked to stop and has saved a checkpoint."""


def train(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
    """Trains the run that `config` describes in `workdir`, from its latest checkpoint if it has one.

    Returns:
      The run's final status (see `RunDirectory.status`).

    Raises:
      ValueError: a config, corpus or work directory that can't be used; before any work.
      NonFiniteLossError: see there.
      Interrupted: SIGINT or SIGTERM arrived; a checkpoint was saved.
    """
    run = RunDirectory(workdir)
    mesh = make_mesh(config.mesh)
    batch_size = sequences_per_update(config, batch_shards(mesh))
    make_optimizer(config.optimizer, config.train.steps)
    build_model(config, vocab_size=1)
    files = _prepare(config)
    batches = TrainBatches(
        files["train"].tokens,
        length=config.train_length,
        batch_size=batch_size,
        seed=config.seed,
        boundary_id=files["train"].manifest.boundary_id,
    )
    primary = jax.process_index() == 0
    if primary:
        run.start(config)
        files["train"].tokenizer().save(run.path / "tokenizer")
    with _failure_recorded(run if primary else None, config.train.steps):
        trainer = Trainer(config, run, mesh, files, batches)
        with contextlib.closing(trainer):
            return trainer.run_to_end()


@contextlib.contextmanager
def _failure_recorded(run: RunDirectory | None, steps: int) -> Iterator[None]:
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        if run is not None:
            reason = f"{type(error).__name__}: {error}"
            run.write_status("failed", step=run.status()["step"], steps=steps, reason=reason)
        raise


def sequences_per_update(config: ml_collections.ConfigDict, shards: int) -> int:
    """train.batch_tokens in sequences of train_length.

    Raises:
      ValueError: batch_tokens that is no multiple of the length, or a batch that the
        micro-batches and the devices don't divide.
    """
    tokens, length, micro_batches = config.train.batch_tokens, config.train_length, config.train.accumulation
    for key, value in (
        ("train_length", length),
        ("train.accumulation", micro_batches),
        ("train.steps", config.train.steps),
    ):
        if value < 1:
            raise ValueError(f"{key}={value} must be at least 1")
    unit = length * micro_batches * shards
    if tokens < 1 or tokens % unit:
        below, above = tokens // unit * unit, (tokens // unit + 1) * unit
        raise ValueError(
            f"train.batch_tokens={tokens} must be a multiple of {unit} (train_length={length} x "
            f"train.accumulation={micro_batches} x {shards} devices that split the batch); "
            f"use {f'{below} or ' if below else ''}{above}"
        )
    return tokens // length


def _prepare(config: ml_collections.ConfigDict) -> dict[str, TokenFile]:
    """The token files of train and, if there is one, valid. On many hosts the first one goes ahead."""
    show = jax.process_index() == 0
    if not show:
        multihost_utils.sync_global_devices("token files are ready")
    files = {"train": prepare(config.data, "train", progress=show)}
    if config.data.valid:
        files["valid"] = prepare_with(config.data, "valid", files["train"].tokenizer(), progress=show)
    if show and jax.process_count() > 1:
        multihost_utils.sync_global_devices("token files are ready")
    return files


class Trainer:
    """One run under way: what `train` has built, and the state that changes."""

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        run: RunDirectory,
        mesh: Mesh,
        files: dict[str, TokenFile],
        batches: TrainBatches,
    ):
        self.config, self.run = config, run
        self.primary = jax.process_index() == 0
        vocab_size = files["train"].manifest.vocab_size
        self.model = build_model(config, vocab_size, batch_shards=batch_shards(mesh))
        self.steps = config.train.steps
        self.schedule = make_schedule(config.optimizer, self.steps)
        optimizer = make_optimizer(config.optimizer, self.steps)
        self.train_step = make_train_step(self.model, optimizer, config.seed)
        self.about = {"config": config.to_dict(), **self._provenance(files)}
        if self.primary:
            run.write("provenance.json", self.about)
        self.checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        self.step = self.checkpoints.latest or 0
        if self.step:
            self.state = self.checkpoints.restore(self.step, abstract_state(self.model, optimizer, mesh))
        else:
            self.state = initial_state(self.model, optimizer, mesh, config.seed)
        self.best = self.checkpoints.best
        self.valid = _validator(config, self.model, mesh, files.get("valid"))
        tensorboard = run.path / "tensorboard" if config.log.tensorboard else None
        self.feed = Feed(batches, mesh, micro_batches=config.train.accumulation)
        self.writer = MetricsWriter(run.metrics_file, tensorboard, self.step) if self.primary else None
        self.progress = Progress(run.name, self.step, self.steps, config.train.batch_tokens, show=self.primary)
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
                    self.write_status("interrupted", reason="stopped by a signal")
                    raise Interrupted(
                        f"stopped at update {self.step} of {self.steps}; the same command goes on from there"
                    )
        self.checkpoints.wait()
        self.write_status("finished")
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
        if not (math.isfinite(nll) and math.isfinite(values["gradient_norm"])):
            good = self.checkpoints.latest
            raise NonFiniteLossError(
                f"update {step}: loss {nll}, gradient norm {values['gradient_norm']}; "
                + (f"the last good checkpoint is that of update {good}" if good else "no checkpoint was saved before")
                + "; try a lower optimizer.learning_rate, a longer warm-up or optimizer.clip_norm"
            )
        self.window += (values["nll_nats"], values["tokens"])
        self.progress.update(step, nll)
        if step % self.config.log.every_steps == 0 or step == self.steps:
            self._log(step, values)

    def _log(self, step: int, values: dict[str, float]) -> None:
        nll, tokens = self.window
        self.window[:] = 0.0
        row = {"train_nll": nll / max(tokens, 1.0), "gradient_norm": values["gradient_norm"]}
        row["learning_rate"] = float(self.schedule(step - 1))
        if self.progress.tokens_per_second:
            row["tokens_per_second"] = self.progress.tokens_per_second
        if self.writer:
            self.writer.write(step, row)
        self.write_status("running")

    def _decide(self, interrupted: bool) -> tuple[bool, bool]:
        """Whether to stop and whether to save now; all hosts decide alike."""
        checkpoint = self.config.checkpoint
        late = bool(checkpoint.every_minutes) and time.monotonic() - self.saved_at > 60 * checkpoint.every_minutes
        if jax.process_count() > 1:
            if self.step % self.config.log.every_steps:
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
        self.progress.say(f"update {self.step}: validation {nll:.4f} nats, perplexity {math.exp(min(nll, 700)):.3f}")
        if self.writer:
            self.writer.write(self.step, {"valid_nll": nll})
        return nll

    def _provenance(self, files: dict[str, TokenFile]) -> dict[str, Any]:
        return make_provenance(
            devices=sorted({device.device_kind for device in jax.devices()}),
            device_count=jax.device_count(),
            process_count=jax.process_count(),
            parameters=count_parameters(self.model),
            vocab_size=self.model.vocab_size,
            corpus={split: dataclasses.asdict(file.manifest) for split, file in files.items()},
        )

    def write_status(self, state: str, reason: str = "") -> None:
        if self.primary:
            best = None if self.best is None else {"step": self.best[0], "valid_nll": self.best[1]}
            rate = self.progress.tokens_per_second
            self.run.write_status(
                state, step=self.step, steps=self.steps, reason=reason, tokens_per_second=rate, best=best
            )

    def close(self) -> None:
        self.feed.close()
        self.progress.close()
        self.checkpoints.close()
        if self.writer:
            self.writer.close()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _validator(
    config: ml_collections.ConfigDict, model: DecoderLM, mesh: Mesh, file: TokenFile | None
) -> Validator | None:
    """A function of parameters to the mean NLL of the validation text at the training length; None without a text."""
    if file is None:
        return None
    limit = config.eval.max_tokens
    tokens = file.tokens if limit < 0 else file.tokens[:limit]
    scorer = Scorer(
        model_nll(model),
        boundary_id=file.manifest.boundary_id,
        batch_tokens=config.eval.batch_tokens,
        sharding=batch_sharding(mesh),
    )

    def validate(params: PyTree) -> float:
        score = scorer.score(params, tokens, config.train_length)
        return score.total_nats / score.tokens

    return validate
