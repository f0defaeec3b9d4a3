"""Ctrl-C and termination signals, turned into a request that the loop answers with a checkpoint."""

import os
import signal
from types import FrameType


class Interrupt:
    """While entered, SIGINT and SIGTERM set `requested`; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nstopping after this update; a checkpoint will be saved (Ctrl-C again: at once)\n")
