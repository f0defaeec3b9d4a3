"""Signals that ask a process to stop."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

# Of the terminal, of launchers and clusters that take a machine back, and of a terminal that is gone.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to stop; what was done is saved, and the same command goes on from there."""


@contextlib.contextmanager
def answered(answer: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While entered, `answer` is the handler of SIGNALS; a hangup that was ignored, as by `nohup`, stays ignored."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {number: signal.signal(number, answer) for number in SIGNALS if number not in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore() -> None:
    """Ignores SIGNALS from now on, of a process that ends: launchers send theirs to a job, and pass them on too."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """While entered, the first signal raises Interrupted wherever the main thread is; of later ones only a Ctrl-C."""
    came: list[int] = []

    def answer(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1 or number == signal.SIGINT:
            raise Interrupted

    with answered(answer):
        yield
