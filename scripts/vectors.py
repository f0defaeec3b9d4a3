"""Writes vectors of lines. alibi/cli/vectors.py has the flags, and `--help` prints them."""

import clone  # noqa: F401, it sets the path of imports

from alibi.cli import run_vectors

if __name__ == "__main__":
    run_vectors()
