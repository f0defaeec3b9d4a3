"""What a run tells while it trains: rows of metrics, a progress bar, and its status on disk."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import ml_collections
import numpy as np

from alibi.errors import UserError
from alibi.parallel.hosts import is_primary
from alibi.runs import RunDirectory
from alibi.training.checkpoint import Checkpoints
from alibi.training.metrics import MetricsWriter, Progress, peak_memory_bytes
from alibi.training.step import Metrics


class NonFiniteLossError(UserError):
    """The loss, its gradient or the update stopped being a number; the last good checkpoint stays."""


class Record:
    """The figures of a run that goes on from update `step`; the first process writes them, all check them.

    Attributes:
      best: the update with the lowest validation NLL, and that NLL; None before the first validation.
    """

    def __init__(self, config: ml_collections.ConfigDict, run: RunDirectory, checkpoints: Checkpoints, step: int):
        self._config, self._run, self._checkpoints = config, run, checkpoints
        self._before = run.status()  # of the process that trained here last
        self.best = checkpoints.best
        self._writer = None
        if is_primary():
            tensorboard = run.path / "tensorboard" if config.log.tensorboard else None
            self._writer = MetricsWriter(run.metrics_file, tensorboard, step)
        steps, tokens = config.train.steps, config.train.batch_tokens
        self._progress = Progress(run.name, step, steps, tokens, show=is_primary())
        self._sums = np.zeros(2)  # NLL and tokens since the last row
        self._pending: tuple[int, Metrics] | None = None
        if step:
            self._progress.say(f"{run.path}: going on from the checkpoint of update {step} of {steps}")

    def dispatched(self, step: int, metrics: Metrics) -> None:
        """Keeps the metrics of update `step`, which the devices still compute, and fetches those of the one before."""
        self.arrive()
        self._pending = step, metrics

    def arrive(self) -> None:
        """Waits for the metrics that are kept; raises NonFiniteLossError where one is no number."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        nll = values["nll_nats"] / max(values["tokens"], 1.0)
        if not all(math.isfinite(value) for value in values.values()):
            norms = f"gradient norm {values['gradient_norm']}, norm of the update {values['update_norm']}"
            self._refuse(f"update {step}: loss {nll}, {norms}")
        self._sums += (values["nll_nats"], values["tokens"])
        self._progress.update(step, nll)
        if step % self._config.log.every_steps == 0 or step == self._config.train.steps:
            self._log(step, values)

    def _log(self, step: int, values: dict[str, float]) -> None:
        nll, tokens = self._sums
        self._sums[:] = 0.0
        row = {"train_nll": float(nll / max(tokens, 1.0)), "train_tokens": float(tokens)}
        row |= {name: values[name] for name in ("gradient_norm", "update_norm", "learning_rate")}
        if self._progress.tokens_per_second:
            row["tokens_per_second"] = self._progress.tokens_per_second
        if self._writer:
            self._writer.write(step, row)
        self.write_status("running", step)

    def validated(self, step: int, nll: float) -> bool:
        """Records a validation; whether it is the best so far. Raises NonFiniteLossError where `nll` is no number."""
        if not math.isfinite(nll):
            self._refuse(f"update {step}: validation loss {nll}")
        self._progress.say(f"update {step}: validation {nll:.4f} nats, perplexity {math.exp(min(nll, 700)):.3f}")
        if self._writer:
            self._writer.write(step, {"valid_nll": nll})
        improved = self.best is None or nll < self.best[1]
        if improved:
            self.best = step, nll
        return improved

    def _refuse(self, what: str) -> None:
        good = self._checkpoints.latest
        saved = f"the last good checkpoint is that of update {good}" if good else "no checkpoint was saved before"
        raise NonFiniteLossError(
            f"{what}; {saved}; try a lower optimizer.learning_rate, a longer warm-up or a smaller optimizer.clip_norm"
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves what is done inside, validation and saving, out of the tokens per second."""
        start = time.perf_counter()
        yield
        self._progress.pause(time.perf_counter() - start)

    def write_status(self, state: str, step: int, reason: str = "") -> None:
        """Writes where the run stands, with its speed, memory and best checkpoint so far."""
        if not is_primary():
            return
        figures: dict[str, Any] = {
            "tokens_per_second": self._progress.tokens_per_second or self._before.get("tokens_per_second"),
            "peak_memory_bytes": max(peak_memory_bytes(), self._before.get("peak_memory_bytes", 0)),
            "best": None if self.best is None else {"step": self.best[0], "valid_nll": self.best[1]},
        }
        self._run.write_status(state, step=step, steps=self._config.train.steps, reason=reason, **figures)

    def close(self) -> None:
        self._progress.close()
        if self._writer:
            self._writer.close()
