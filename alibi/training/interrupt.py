"""Ctrl-C and termination signals, turned into a request that the loop answers with a checkpoint."""

import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils

# Of the terminal, of launchers and clusters that take a machine back, and of a terminal that is gone.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupt:
    """While entered, SIGNALS ask the run to stop; a second SIGINT stops at once.

    Of several processes each hands them to JAX's preemption service, whose own notice SIGTERM is: it lets all
    processes stop after the same update, the next that none has begun.
    """

    def __init__(self) -> None:
        self._requested = False
        self._alone = jax.process_count() == 1

    def requested(self, step: int) -> bool:
        """Whether to stop after update `step`; of several processes all must ask, after each update."""
        return self._requested if self._alone else multihost_utils.reached_preemption_sync_point(step)

    def __enter__(self) -> "Interrupt":
        # Of several processes JAX has handled SIGTERM since they joined.
        taken = [number for number in SIGNALS if self._alone or number != signal.SIGTERM]
        taken = [number for number in taken if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup has SIGHUP
        self._before = {number: signal.signal(number, self._request) for number in taken}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = True
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nstopping after this update; a checkpoint will be saved (Ctrl-C again: at once)\n")
