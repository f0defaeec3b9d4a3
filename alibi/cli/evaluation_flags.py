"""The flags by which entry points evaluate trained runs: which, at what lengths, as what, and where to."""

import re
from collections.abc import Sequence
from typing import Any

from absl import flags

from alibi.config.fields import parsed
from alibi.config.override import Override
from alibi.runs import RunDirectory

flags.disclaim_key_flags()  # they belong to the entry point that asks for them: its --help shows them


def define(multiples: str) -> None:
    """Defines the flags; `multiples` are those of each run's own length that are taken where no lengths are given."""
    flags.DEFINE_list("workdirs", None, "work directories of train.py, separated by commas")
    flags.DEFINE_list("multiples", None, f"evaluation lengths as multiples of each run's own; default: {multiples}")
    flags.DEFINE_list("lengths", None, "evaluation lengths in tokens, in place of --multiples")
    flags.DEFINE_string("checkpoint", "latest", "latest, best (by validation NLL) or a step")
    flags.DEFINE_string(
        "position",
        None,
        "test with this position method in place of the one of training, if it has the same parameters",
    )
    flags.DEFINE_list(
        "position_options", [], "KEY=VALUE,... of --position or of the run's own method, such as factor=4; others stay"
    )
    flags.DEFINE_integer("window", None, "test with attention that reaches back so many tokens (0: all)", lower_bound=0)
    flags.DEFINE_string("output_dir", None, "where the results go; default: the work directory if it is one")
    flags.DEFINE_integer("batch_tokens", None, "tokens a device holds; default: the run's eval.batch_tokens")
    flags.DEFINE_bool("report", True, "write and print the tables, and draw the figures")


def options() -> dict[str, Any]:
    """What the flags say, by the names of the fields of `alibi.evaluation.extrapolation.RunOptions`.

    Raises ValueError where they name no run, contradict each other, or leave open where the results go.
    """
    given = flags.FLAGS
    if not given.workdirs:
        raise ValueError("--workdirs names no work directory; give those of train.py, separated by commas")
    if given.lengths is not None and given.multiples is not None:
        raise ValueError("--lengths and --multiples are two ways to say the same; give one of them")
    if given.output_dir is None and len(given.workdirs) > 1:
        raise ValueError("several --workdirs need an --output_dir for their common results")
    if given.output_dir is None:
        RunDirectory(given.workdirs[0]).config()  # a mistyped name must not become a directory of results
    numbers = {flag: words for flag in ("lengths", "multiples") if (words := given[flag].value) is not None}
    return {
        "output_dir": given.output_dir or given.workdirs[0],
        **{flag: _numbers(flag, words) for flag, words in numbers.items()},
        "checkpoint": given.checkpoint,
        "batch_tokens": given.batch_tokens,
        "override": _override(),
        "report": given.report,
    }


def _override() -> Override:
    """What runs are tested as, options read as the config of train.py reads them."""
    options: dict[str, Any] = {}
    given = flags.FLAGS
    # A comma in [0.5,0.25] or (0.5,0.25) separates no options.
    for word in filter(None, re.split(r",(?=\s*\w+\s*=)", ",".join(given.position_options))):
        name, separator, value = word.partition("=")
        if not (name and separator):
            raise ValueError(f"--position_options={word} is not KEY=VALUE; write for example factor=4")
        options[name] = parsed(value)
    return Override(given.position, tuple(options.items()), given.window)


def _numbers(flag: str, words: Sequence[str]) -> tuple[int, ...]:
    """The positive integers of a comma-separated flag; ValueError for anything else."""
    if not words or any(not word.strip().isdecimal() or int(word) < 1 for word in words):
        raise ValueError(
            f"--{flag}={','.join(words)} must be positive whole numbers, separated by commas, such as 1,2,4"
        )
    return tuple(int(word) for word in words)
