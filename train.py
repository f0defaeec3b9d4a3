"""Trains one run; alibi/cli/train.py has the flags, and `--help` prints them."""

from alibi.cli import run_train

if __name__ == "__main__":
    run_train()
