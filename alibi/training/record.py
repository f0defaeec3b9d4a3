"""What a run tells while it trains: rows of metrics, its progress, and its status on disk."""

import collections
import contextlib
import functools
import math
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from alibi.config import Config
from alibi.errors import UserError
from alibi.model.flops import model_flops
from alibi.parallel import hosts, peers
from alibi.parallel.device_kinds import find_device_kind
from alibi.progress import Progress, say
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints
from alibi.training.metric_writers import open_writers
from alibi.training.pending import Pending
from alibi.training.step import Metrics

UNLOGGED = "unlogged"
RECENT = 50  # updates, over which the speed is taken


class NonFiniteLossError(UserError):
    """The loss, its gradient or the update stopped being a number; the last good checkpoint stays."""


class Record:
    """The figures of a run that goes on from update `step`; the first process writes them, all check them.

    Updates don't wait for a row and its status to be written: a store may take several requests of some tenths of a
    second. What fails in that is raised at the next row, checkpoint or status of an end.

    Args:
      peak: tokens a second at the peak of the devices, of which `mfu` is the share that is reached; None: not known.

    Attributes:
      best: the update with the lowest validation NLL, and that NLL; None before the first validation.
    """

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        checkpoints: Checkpoints,
        step: int,
        peak: float | None = None,
    ):
        self._config, self._run, self._checkpoints = config, run, checkpoints
        self._before = run.status()  # of the process that trained here last
        self.best = hosts.told(lambda: checkpoints.best)
        self._writers = open_writers(config, run, step) if hosts.is_primary() else []
        self._writes, self._saved = Pending(), 0  # and the last step that is known to be saved
        self._finished = False
        steps, tokens = config.train.steps, config.train.batch_tokens
        self._peak = peak
        self._progress = UpdateProgress(run.name, step, steps, tokens, peak, show=hosts.is_primary())
        # NLL and tokens since the last row; of the process that saved the checkpoint, if it came between two rows.
        self._sums = np.array(checkpoints.about(step).get(UNLOGGED, [0.0, 0.0]) if step else [0.0, 0.0])
        self._pending: tuple[int, Metrics] | None = None
        self._waited, self._row = 0.0, (step, 0.0)  # now; at the last row, and its update
        self._train_nll = self._before.get("train_nll")  # of the last row
        if step:
            self._say(f"{run}: going on from the checkpoint of update {step} of {steps}")

    def dispatched(self, step: int, metrics: Metrics, *, data_wait_seconds: float = 0.0) -> None:
        """Keeps the metrics of update `step`, which the devices still compute, and fetches those of the one before.

        `data_wait_seconds`: for how long, since the process began, updates have waited for their tokens.
        """
        self.arrive()
        self._pending = step, metrics
        self._waited = data_wait_seconds

    def arrive(self) -> None:
        """Waits for the metrics that are kept; raises NonFiniteLossError where one is no number."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        peers.expect_update()
        nll = values["nll_nats"] / max(values["tokens"], 1.0)
        if not all(math.isfinite(value) for value in values.values()):
            norms = f"gradient norm {values['gradient_norm']}, norm of the update {values['update_norm']}"
            self._refuse(f"update {step}: loss {nll}, {norms}")
        self._sums += (values["nll_nats"], values["tokens"])
        self._progress.update(step, nll)
        if step % self._config.log.every_steps == 0 or step == self._config.train.steps:
            self._log(step, values)

    def for_checkpoint(self) -> dict[str, list[float]]:
        """What a checkpoint holds so that the next row is that of a run without a stop; waits for earlier rows."""
        self._writes.wait()
        return {UNLOGGED: self._sums.tolist()}

    def _log(self, step: int, values: dict[str, float]) -> None:
        nll, tokens = self._sums
        self._sums[:] = 0.0
        self._train_nll = float(nll / max(tokens, 1.0))
        row = {"train_nll": self._train_nll, "train_tokens": float(tokens)}
        row |= {name: values[name] for name in ("gradient_norm", "update_norm", "learning_rate")}
        last, waited = self._row
        row["data_wait_seconds"] = (self._waited - waited) / (step - last)  # of an update
        self._row = step, self._waited
        if rate := self._progress.tokens_per_second:
            row["tokens_per_second"] = rate
            if self._peak:
                row["mfu"] = rate / self._peak
        self._write(step, row)
        self._write_status("running", step)

    def validated(self, step: int, nll: float) -> bool:
        """Records a validation; whether it is the best so far. Raises NonFiniteLossError where `nll` is no number."""
        if not math.isfinite(nll):
            self._refuse(f"update {step}: validation loss {nll}")
        perplexity = math.exp(min(nll, 700))
        self._say(f"{self._run.name}: update {step:,}: validation {nll:.4f} nats, perplexity {perplexity:.3f}")
        self._write(step, {"valid_nll": nll})
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
        peers.expect_update(False)
        start = time.perf_counter()
        yield
        self._progress.pause(time.perf_counter() - start)

    def write_status(self, state: str, step: int, reason: str = "") -> None:
        """Writes where the run ended, with its last loss, speed, memory and best checkpoint so far."""
        self._finished = state == "finished"
        self._write_status(state, step, reason)
        self._writes.wait()

    def _write_status(self, state: str, step: int, reason: str = "") -> None:
        if not hosts.is_primary():
            return
        figures: dict[str, Any] = {
            "train_nll": self._train_nll,
            "tokens_per_second": self._progress.tokens_per_second or self._before.get("tokens_per_second"),
            "peak_memory_bytes": max(peak_memory_bytes(), self._before.get("peak_memory_bytes", 0)),
            "best": None if self.best is None else {"step": self.best[0], "valid_nll": self.best[1]},
        }
        figures |= {"step": step, "steps": self._config.train.steps, "reason": reason}
        self._writes.add(lambda: self._run.write_status(state, saved=self._last_saved(), **figures))

    def _last_saved(self) -> int:
        """The last step whose checkpoint is complete; asks where they lie only while a later one is being written."""
        if self._saved != (self._checkpoints.latest or 0):
            self._saved = max(self._run.saved_steps(), default=0)
        return self._saved

    def close(self) -> None:
        peers.expect_update(False)
        self._writes.close()
        self._progress.close()
        while self._writers:
            self._writers.pop().close(self._finished)

    def _write(self, step: int, values: dict[str, float]) -> None:
        for writer in self._writers:
            self._writes.add(functools.partial(writer.write, step, values))

    def _say(self, line: str) -> None:
        if hosts.is_primary():
            say(line)


def peak_tokens_per_second(config: Config, vocab_size: int, mesh: Mesh) -> float | None:
    """What the devices of `mesh` would train on at their peak; None where one of them is of an unknown kind."""
    kinds = [find_device_kind(device.device_kind) for device in mesh.devices.flat]
    known = [kind.peak(config.model.dtype) for kind in kinds if kind]
    return sum(known) / model_flops(config, vocab_size) if len(known) == len(kinds) else None


def peak_memory_bytes() -> int:
    """The most memory held so far: on one device, where devices count theirs, else of this process (CPUs)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    if any(peaks):
        return max(peaks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class UpdateProgress:
    """The progress of updates, with loss, tokens per second and the time left, on standard error."""

    def __init__(
        self, name: str, step: int, steps: int, tokens_per_step: int, peak: float | None = None, *, show: bool
    ):
        self._tokens_per_step, self._peak = tokens_per_step, peak
        self._seconds: collections.deque[float] = collections.deque(maxlen=RECENT)  # of updates after the first
        self._last: float | None = None
        self._shown = Progress(name, steps, "update", done=step, show=show, last=True)

    @property
    def tokens_per_second(self) -> float | None:
        """The speed over the last updates, so that a slowdown shows; None before there are two."""
        seconds = sum(self._seconds)
        return len(self._seconds) * self._tokens_per_step / seconds if seconds else None

    def update(self, step: int, nll: float) -> None:
        """Notes that the metrics of update `step` have arrived."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(max(now - self._last, 0.0))
        self._last = now
        rate = self.tokens_per_second
        speed = f", {rate:,.0f} tokens/s" if rate else ""
        speed += f", {rate / self._peak:.0%} MFU" if rate and self._peak else ""
        loss = f"loss {nll:.3f} nats ({nll / math.log(2):.3f} bits)"
        self._shown.update(step - self._shown.done, loss + speed)

    def pause(self, seconds: float) -> None:
        """Leaves `seconds` of validation or saving out of the rate."""
        if self._last is not None:
            self._last += seconds

    def close(self) -> None:
        self._shown.close()
