"""Signals, answered by a run as soon as nothing is lost by it."""

import contextlib
import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils

from alibi.parallel import peers
from alibi.parallel.signals import Interrupted


class Interrupt:
    """How a run answers the first signal, by its method `request`; a second SIGINT stops it at once.

    Before `updating` is called, it raises Interrupted wherever the main thread is: what lies on the disk is as
    whole then as after a kill. From then on the run stops after an update, with a checkpoint. Of several processes
    each hands its signals to JAX's preemption service, by which all stop after the same update, the next that none
    has begun.
    """

    def __init__(self) -> None:
        self._requested = self._updating = False
        self._alone = jax.process_count() == 1

    def updating(self) -> None:
        """Updates begin; raises Interrupted where a signal has come before."""
        self._updating = True
        if self._requested:  # what it raised may have been lost in a destructor, or in a library's callback
            raise self._interrupted()

    def requested(self, step: int) -> bool:
        """Whether to stop after update `step`; of several processes all must ask, after each update."""
        return self._requested if self._alone else multihost_utils.reached_preemption_sync_point(step)

    def request(self, number: int, frame: FrameType | None) -> None:
        """The handler of a signal."""
        again, self._requested = self._requested, True
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._updating:
            if not again:
                raise self._interrupted()
            return  # it is on its way out
        if not self._alone:
            peers.announce_preemption()
        # Not print: the signal may have come in the middle of one. And who reads it may be gone.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after this update; a checkpoint will be saved (Ctrl-C again: at once)\n")

    def _interrupted(self) -> Interrupted:
        return Interrupted("stopped before the first update; the same command goes on")
