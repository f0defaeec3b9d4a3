"""Signals that ask a run to stop."""

import os
import signal

from alibi.training.interrupt import Interrupt


def test_a_hangup_asks_to_stop_unless_it_was_ignored_before() -> None:
    """`nohup` starts a process with the hangup of its terminal ignored, so that it goes on."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        for ignored in (True, False):
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            with Interrupt() as interrupt:
                os.kill(os.getpid(), signal.SIGHUP)
                assert interrupt.requested(1) is not ignored
    finally:
        signal.signal(signal.SIGHUP, before)
