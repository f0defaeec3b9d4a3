"""Shows the state of runs: python scripts/status.py DIR... [--once]

DIR is the work directory of a run or a sweep, or a directory that holds several, also
gs://BUCKET/PATH. Each run has a line: state, updates, loss in nats a token, tokens/s, time left and
the age of its last status. On a terminal the table is redrawn every --every seconds, elsewhere it is
printed again, until all runs have ended. --once shows it one time.
"""

import sys
import time

import clone  # noqa: F401, it sets the path of imports
from absl import flags

from alibi.cli import command_line

_ONCE = flags.DEFINE_bool("once", False, "show the table one time")
_EVERY = flags.DEFINE_float("every", 5.0, "seconds between two looks", lower_bound=0.1)
command_line.own_flags(__name__)

CLEAR = "\x1b[H\x1b[J"  # of a terminal


def main(*directories: str) -> int:
    import datetime

    import jax

    jax.config.update("jax_platforms", "cpu")  # this process computes nothing
    from alibi.storage.files import resolve
    from alibi.sweeps.watch import holders, standings, summary, table

    refreshed = sys.stdout.isatty() and not _ONCE.value
    while True:
        now, text, over = datetime.datetime.now(datetime.UTC), "", True
        for store in (path for name in directories for path in holders(resolve(name))):
            runs = standings(store, now)
            text += f"{summary(store, runs)}{table(runs, now)}\n"
            over = over and all(one.is_over for one in runs)
        print(CLEAR * refreshed + text.rstrip("\n"), flush=True)
        if _ONCE.value or over:
            return 0
        time.sleep(_EVERY.value)
        if not refreshed:
            print()


if __name__ == "__main__":
    command_line.run(
        main, takes="DIR, the work directory of a run or a sweep, or the directory above them"
    )
