"""Fills masked tokens. alibi/cli/fill_mask.py has the flags, and `--help` prints them."""

import clone  # noqa: F401, it sets the path of imports

from alibi.cli import run_fill_mask

if __name__ == "__main__":
    run_fill_mask()
