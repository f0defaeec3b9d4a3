"""A run's record: rows of metrics, progress, and status on disk."""

import collections
import concurrent.futures
import contextlib
import functools
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from alibi.config import Config
from alibi.devices.kinds import find_device_kind
from alibi.errors import UserError
from alibi.model.flops import model_flops
from alibi.parallel import hosts
from alibi.progress import Progress, print_line
from alibi.runs.checkpoint import BEGAN, VALID_TOKENS, Checkpoints, validated
from alibi.training.metric_writers import MetricWriter, Values, open_writers
from alibi.training.setup import Job
from alibi.training.step import Metrics

UNLOGGED = "unlogged"  # key of a checkpoint's `about`: NLL and tokens since the last row
RECENT = 50  # updates over which the speed is averaged
# waiting: three or four rows with their statuses, which a stopped run finishes first
MOST_WRITES = 8


class NonFiniteLossError(UserError):
    """The loss, its gradient or the update is not finite. The last good checkpoint stays."""


class Record:
    """A run's figures from update `step` on. Process 0 writes them, all processes check them.

    Updates don't wait for writes, which take a bucket some tenths of a second. A failed write is
    raised at the next row, checkpoint or final status.

    Args:
      index: the run's place along the first axis of all metrics, for one of several seeds. The first shows the
        progress of all.

    Attributes:
      best: the update with the lowest validation NLL, and this NLL, or None before a validation.
      speed: tokens per second.
    """

    def __init__(self, job: Job, checkpoints: Checkpoints, step: int, index: int | None = None):
        config, run = job.config, job.run
        self._config, self._run, self._checkpoints = config, run, checkpoints
        self._index = () if index is None else index  # x[()] is x
        self._peaks = {
            each.first: _peak_tokens_per_second(job, each.config) for each in job.stretches
        }
        self._before = run.status()  # left by the process that trained here last
        self.best = hosts.broadcast(lambda: checkpoints.best)
        self._writers: list[MetricWriter] = []
        hosts.broadcast(lambda: self._writers.extend(open_writers(config, run, step)))
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="writes")
        self._writes: collections.deque[concurrent.futures.Future] = collections.deque()
        self._finished = False
        steps = config.train.steps
        self.speed = Speed(config.train.batch_tokens)
        shown = hosts.is_primary() and not index
        self._bar = Progress(run.name, steps, "update", done=step, show=shown, last=True)
        # Imported checkpoints have no sums; others were saved between two rows, and the next row
        # counts from the last.
        saved = checkpoints.about(step) if step and checkpoints.latest else {}
        self._sums = np.array(saved.get(UNLOGGED, [0.0, 0.0]))
        # the last validation's tokens, and the update after which its values apply
        self._valid_tokens, self._valid_began = validated(saved)
        self._dispatched: tuple[int, Metrics] | None = None
        # seconds waited for data: now; at the last row, and its update
        self._waited, self._last_row = 0.0, (step, 0.0)
        self._train_nll = self._before.get("train_nll")  # in the last row
        if step and hosts.is_primary():
            print_line(f"{run}: going on from the checkpoint of update {step} of {steps}")

    def dispatched(self, step: int, metrics: Metrics, data_wait_seconds: float) -> None:
        """Keeps the metrics of update `step`, which devices still compute, and fetches the ones before.

        Args:
          data_wait_seconds: how long this process's updates have waited for tokens so far.
        """
        self.fetch()
        self._dispatched = step, metrics
        self._waited = data_wait_seconds

    def fetch(self) -> None:
        """Waits for the kept metrics. Raises NonFiniteLossError unless all are finite."""
        if self._dispatched is None:
            return
        (step, metrics), self._dispatched = self._dispatched, None
        fetched = jax.device_get(metrics).items()
        values = {name: float(value[self._index]) for name, value in fetched}
        nll = values["nll_nats"] / max(values["tokens"], 1.0)
        if not all(math.isfinite(value) for value in values.values()):
            norms = f"gradient norm {values['gradient_norm']}, norm of the update {values['update_norm']}"
            self._refuse(f"update {step}: loss {nll}, {norms}")
        self._sums += (values["nll_nats"], values["tokens"])
        if self._config.began(step) == step - 1:  # other values cost otherwise
            self.speed.forget()
        self.speed.update()
        rate = self.speed.tokens_per_second
        speed = f", {rate:,.0f} tokens/s" if rate else ""
        peak = self._peaks[self._config.began(step)]
        speed += f", {rate / peak:.0%} MFU" if rate and peak else ""
        self._bar.update(1, f"loss {nll:.3f} nats ({nll / math.log(2):.3f} bits){speed}")
        if step % self._config.log.every_steps == 0 or step == self._config.train.steps:
            self._log(step, values)

    def for_checkpoint(self) -> dict[str, Any]:
        """Waits for earlier rows, and returns what a resumed run needs to continue them."""
        hosts.broadcast(self._finish_writes)
        return {
            UNLOGGED: self._sums.tolist(),
            VALID_TOKENS: self._valid_tokens,
            BEGAN: self._valid_began,
        }

    def _log(self, step: int, values: dict[str, float]) -> None:
        nll, tokens = self._sums
        self._sums[:] = 0.0
        self._train_nll = float(nll / max(tokens, 1.0))
        row = {"train_nll": self._train_nll, "train_tokens": float(tokens)}
        row |= {name: values[name] for name in ("gradient_norm", "update_norm", "learning_rate")}
        last, waited = self._last_row
        row["data_wait_seconds"] = (self._waited - waited) / (step - last)  # per update
        self._last_row = step, self._waited
        if rate := self.speed.tokens_per_second:
            row["tokens_per_second"] = rate
            if peak := self._peaks[self._config.began(step)]:
                row["mfu"] = rate / peak
        self._write(step, row)
        self.write_status("running", step)
        self._checkpoints.check()

    def validated(self, step: int, nll: float, tokens: int) -> bool:
        """Records a validation. Returns whether it is the best so far of as many tokens and of the
        config's values at this update. Raises NonFiniteLossError.
        """
        if not math.isfinite(nll):
            self._refuse(f"update {step}: validation loss {nll}")
        if hosts.is_primary():
            perplexity = math.exp(min(nll, 700))
            print_line(
                f"{self._run.name}: update {step:,}: validation {nll:.4f} nats, perplexity {perplexity:.3f} "
                f"of {tokens:,} tokens"
            )
        self._write(step, {"valid_nll": nll, "valid_tokens": float(tokens)})
        # With another eval.max_tokens than before, all before is of another sample.
        before, now = (self._valid_tokens, self._valid_began), (tokens, self._config.began(step))
        improved = self.best is None or now != before or nll < self.best[1]
        self._valid_tokens, self._valid_began = now
        if improved:
            self.best = step, nll
        return improved

    def sampled(self, step: int, text: str) -> None:
        """Records a continuation of eval.sample_prompt."""
        prompt = self._config.eval.sample_prompt
        if hosts.is_primary():
            print_line(f"{self._run.name}: update {step:,}: {prompt}|{text}")
        self._write(step, {"sample": prompt + text})

    def _refuse(self, reason: str) -> None:
        good = self._checkpoints.latest
        saved = (
            f"the last good checkpoint is that of update {good}"
            if good
            else "no checkpoint was saved before"
        )
        clipped = self._config.optimizer.clip_norm > 0
        raise NonFiniteLossError(
            f"{reason}; {saved}; try a lower optimizer.learning_rate, a longer warm-up or "
            + ("a smaller optimizer.clip_norm" if clipped else "optimizer.clip_norm=1")
        )

    def write_status(self, state: str, step: int, reason: str = "") -> None:
        """Writes status.json with loss, speed, memory and best validation, and waits if the run ends."""
        if not hosts.is_primary():
            return
        self._finished = state == "finished"
        figures: dict[str, Any] = {
            "step": step,
            "steps": self._config.train.steps,
            "reason": reason,
            "train_nll": self._train_nll,
            "tokens_per_second": self.speed.tokens_per_second
            or self._before.get("tokens_per_second"),
            "peak_memory_bytes": max(
                _peak_memory_bytes(), self._before.get("peak_memory_bytes", 0)
            ),
            "best": None
            if self.best is None
            else {
                "step": self.best[0],
                "valid_nll": self.best[1],
                "valid_tokens": self._valid_tokens,
            },
        }
        self._queue(functools.partial(self._run.write_status, state, **figures))
        if state != "running":
            self._finish_writes()

    def _write(self, step: int, values: Values) -> None:
        for writer in self._writers:
            self._queue(functools.partial(writer.write, step, values))

    def _queue(self, write: Callable[[], object]) -> None:
        """Gives `write` to a thread, which keeps the order. Raises an earlier write's error.

        Of several hosts, only process 0 writes. It keeps the error until `for_checkpoint`, where all learn it.
        """
        while self._writes and (self._writes[0].done() or len(self._writes) == MOST_WRITES):
            if jax.process_count() > 1 and self._writes[0].exception():
                return
            self._writes.popleft().result()
        self._writes.append(self._pool.submit(write))

    def _finish_writes(self) -> None:
        while self._writes:
            self._writes.popleft().result()

    def close(self) -> None:
        """Finishes writing, and ends the bar and the writers."""
        self._pool.shutdown()
        self._bar.close()
        while self._writers:
            self._writers.pop().close(self._finished)


class Speed:
    """The tokens per second over the last updates, so that a slowdown shows."""

    def __init__(self, tokens_per_step: int):
        self._tokens_per_step = tokens_per_step
        # for each update after the first
        self._seconds: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._last: float | None = None

    def update(self) -> None:
        """Notes the end of an update."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    def forget(self) -> None:
        """Leaves out all updates so far."""
        self._seconds.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time inside, as for validations and saves."""
        start = time.perf_counter()
        yield
        if self._last is not None:
            self._last += time.perf_counter() - start

    @property
    def tokens_per_second(self) -> float | None:
        """The speed, or None before there are two updates."""
        seconds = sum(self._seconds)
        return len(self._seconds) * self._tokens_per_step / seconds if seconds else None


def _peak_tokens_per_second(job: Job, config: Config) -> float | None:
    """Returns the training speed at the devices' peak, or None with an unknown device."""
    kinds = [find_device_kind(device.device_kind) for device in job.mesh.devices.flat]
    peaks = [kind.peak(config.model.dtype) for kind in kinds if kind]
    flops = model_flops(config, job.model.vocab_size)
    return sum(peaks) / flops if len(peaks) == len(kinds) else None


def _peak_memory_bytes() -> int:
    """Returns the most memory held so far on one device, or in this process if its devices are CPUs."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    of_process = peak if sys.platform == "darwin" else 1024 * peak
    return max(each.get("peak_bytes_in_use", 0) for each in stats) or of_process
