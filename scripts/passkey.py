"""Measures passkey retrieval of trained runs; alibi/cli/passkey.py has the flags, and `--help` prints them."""

import clone  # noqa: F401

from alibi.cli import run_passkey

if __name__ == "__main__":
    run_passkey()
