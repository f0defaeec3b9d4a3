"""Measures perplexity at many lengths; alibi/cli/eval_extrapolation.py has the flags, and `--help` prints them."""

from alibi.cli import run_eval_extrapolation

if __name__ == "__main__":
    run_eval_extrapolation()
