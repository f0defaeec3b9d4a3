"""The updates of a run: between them it validates, saves checkpoints and answers signals."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from alibi.config import Config
from alibi.parallel import hosts
from alibi.parallel.signals import Interrupted
from alibi.runs import RunDirectory
from alibi.runs.checkpoint import Checkpoints, TrainState
from alibi.training.feed import Feed
from alibi.training.interrupt import Interrupt
from alibi.training.record import Record
from alibi.training.step import TrainStep


@dataclasses.dataclass
class Updates:
    """A run between two updates.

    Attributes:
      about: what stands in its provenance and in each checkpoint.
      validator: gives the NLL of the validation text, if there is any.
      state: after the latest update.
    """

    config: Config
    run: RunDirectory
    about: dict[str, Any]
    interrupt: Interrupt
    feed: Feed
    train_step: TrainStep
    validator: Callable[[PyTree], float] | None
    checkpoints: Checkpoints
    record: Record
    state: TrainState

    def finish(self) -> None:
        """All updates that are left, with their validations and checkpoints."""
        step, steps = int(self.state.step), self.config.train.steps
        saved_at = time.monotonic()
        self.interrupt.updating()
        while step < steps:
            self.state, metrics = self.train_step(self.state, *self.feed.get(step, last=step + 1 == steps))
            step += 1
            self.record.dispatched(step, metrics, data_wait_seconds=self.feed.waited)
            stop, save = self.interrupt.requested(step), _is_save_due(self.config, step, saved_at)
            # Not where the run stops: a validation may take longer than there is left to save.
            validate = step == steps or (_due(step, self.config.eval.every_steps) and not stop)
            if (stop or save or validate) and self._saved(step, stop or save, validate):
                saved_at = time.monotonic()
            if stop and step < steps:
                self.checkpoints.wait()
                self.record.write_status("interrupted", step, reason="stopped by a signal")
                raise Interrupted(f"stopped at update {step} of {steps}; the same command goes on there")
        self.checkpoints.wait()
        self.record.write_status("finished", step)
        self.record.close()

    def _saved(self, step: int, save: bool, validate: bool) -> bool:
        """Validates if asked to, and saves if asked to or if that was the best validation; whether it saved."""
        self.record.arrive()  # nothing that is not finite is ever saved
        with self.record.paused():
            nll = self.validator(self.state.params) if validate and self.validator else None
            improved = nll is not None and self.record.validated(step, nll)
            if save or improved:
                hosts.on_first(self.run.check_claim)
                self.checkpoints.save(self.state, step, self.about | self.record.for_checkpoint(), nll)
        return save or improved


def _is_save_due(config: Config, step: int, saved_at: float) -> bool:
    """Whether to save after update `step`; of several hosts the first one's clock counts, where metrics are logged."""
    late = _due(step, config.log.every_steps) or jax.process_count() == 1
    if late and (minutes := config.checkpoint.every_minutes):
        late = hosts.told(lambda: time.monotonic() - saved_at > 60 * minutes)
    else:
        late = False
    return late or step == config.train.steps or _due(step, config.checkpoint.every_steps)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
