"""Trains, evaluates and reports all runs in a sweep. alibi/cli/sweep.py has the flags, and `--help` prints them."""

import clone  # noqa: F401, it sets the path of imports

from alibi.cli import run_sweep

if __name__ == "__main__":
    run_sweep()
