"""The commands: flags in, exit codes and errors of a line out."""

import functools
import importlib
import pathlib
import sys

from alibi.extras import EXTRAS, needs


def start(command: str) -> None:
    """Runs the command of the module `alibi.cli.COMMAND` and exits, with a line and code 1 if a
    package is missing, or JAX is too old or too new.
    """
    try:
        needs(pathlib.Path(sys.argv[0]).name, *EXTRAS["train"])
        importlib.import_module("alibi.numerics")
    except ImportError as error:
        sys.exit(f"error: {error}")
    importlib.import_module(f"alibi.cli.{command}").run()


# The entry points of the installed commands, and of the scripts of a clone.
run_train = functools.partial(start, "train")
run_eval_extrapolation = functools.partial(start, "eval_extrapolation")
run_sweep = functools.partial(start, "sweep")
run_generate = functools.partial(start, "generate")
run_fill_mask = functools.partial(start, "fill_mask")
run_vectors = functools.partial(start, "vectors")
