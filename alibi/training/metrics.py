"""Where a run's metrics go: rows of metrics.jsonl, TensorBoard, and a progress bar."""

import json
import math
import pathlib
import resource
import sys
import time

import jax
import tqdm

from alibi.atomic import write_whole


class MetricsWriter:
    """Appends rows to metrics.jsonl and points to TensorBoard.

    Args:
      file: of JSON rows, each with its step.
      tensorboard: directory of event files; None: none are written.
      resume_step: rows after this step, of a run that was stopped later than it was saved, are dropped.
    """

    def __init__(self, file: pathlib.Path, tensorboard: pathlib.Path | None, resume_step: int):
        self._file = file
        _drop_after(file, resume_step)
        self._tensorboard = None
        if tensorboard is not None:
            from tensorboardX import SummaryWriter  # takes a second to import

            self._tensorboard = SummaryWriter(str(tensorboard), purge_step=resume_step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One row: the values after `step` updates."""
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


def peak_memory_bytes() -> int:
    """The most memory held so far: on one device, where devices count theirs, else of this process (CPUs)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    if any(peaks):
        return max(peaks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _drop_after(file: pathlib.Path, step: int) -> None:
    if not file.exists():
        return
    kept = []
    for line in file.read_text().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a process that was killed as it wrote
            continue
        if row["step"] <= step:
            kept.append(line)
    write_whole(file, "".join(kept))


class Progress:
    """A progress bar over updates, with tokens per second and the time left, on standard error."""

    def __init__(self, name: str, step: int, steps: int, tokens_per_step: int, *, show: bool):
        self._tokens_per_step = tokens_per_step
        self._start: tuple[float, int] | None = None
        self._latest = (0.0, step)
        terminal = sys.stderr.isatty()
        self._bar = tqdm.tqdm(
            desc=name,
            initial=step,
            total=steps,
            disable=not show,
            unit="update",
            mininterval=0.2 if terminal else 15.0,
            bar_format="{desc}: {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} updates, {remaining} left{postfix}",
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Over the updates since the first, which compiles; None before there are any."""
        if self._start is None or self._latest[1] == self._start[1]:
            return None
        seconds, updates = (now - then for now, then in zip(self._latest, self._start, strict=True))
        return updates * self._tokens_per_step / seconds

    def update(self, step: int, nll: float) -> None:
        """Notes that the metrics of update `step` have arrived."""
        self._latest = (time.perf_counter(), step)
        self._start = self._start or self._latest
        self._bar.n = step
        rate = self.tokens_per_second
        speed = f", {rate:,.0f} tokens/s" if rate else ""
        self._bar.set_postfix_str(f"loss {nll:.3f} nats ({nll / math.log(2):.3f} bits){speed}", refresh=False)
        self._bar.update(0)

    def pause(self, seconds: float) -> None:
        """Leaves `seconds` of validation or saving out of the rate."""
        if self._start is not None:
            self._start = (self._start[0] + seconds, self._start[1])

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if not self._bar.disable:
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
