"""Writes text with a trained run. alibi/cli/generate.py has the flags, and `--help` prints them."""

import clone  # noqa: F401, it sets the path of imports

from alibi.cli import run_generate

if __name__ == "__main__":
    run_generate()
