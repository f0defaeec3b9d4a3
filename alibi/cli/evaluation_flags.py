"""Flags for evaluating trained runs."""

import os
import re
from typing import Any

from absl import flags

from alibi.cli import command_line
from alibi.config.fields import parsed
from alibi.config.override import MODEL_KEYS, Override
from alibi.config.tree import read_value
from alibi.evaluation.base import Evaluator, help_of, make_evaluators, options_by_name
from alibi.reporting.equivalence import Reference
from alibi.reporting.measure import EVALUATORS
from alibi.runs import RunDirectory

flags.disclaim_key_flags()  # --help shows the flags below under the entry point that defines them


def define_lengths(multiples: str) -> None:
    """Defines the flags for runs, lengths and results.

    Args:
      multiples: the default evaluation lengths, in training lengths.
    """
    # no list of absl, which takes a quotation mark for that of a CSV file
    flags.DEFINE_string("workdirs", None, "work directories of train.py, separated by commas")
    flags.DEFINE_list(
        "multiples",
        None,
        f"evaluation lengths as multiples of each run's own; defaults to {multiples}",
    )
    flags.DEFINE_list("lengths", None, "evaluation lengths in tokens, in place of --multiples")
    flags.DEFINE_string(
        "output_dir",
        None,
        "directory of the results; defaults to the work directory, if --workdirs names a single one",
    )
    flags.DEFINE_bool("report", True, "write and print the tables, and draw the figures")
    flags.DEFINE_string(
        "reference",
        None,
        "the run, by its name in tables, that the report compares the others with",
    )
    flags.DEFINE_float(
        "margin",
        None,
        "largest difference from --reference that does not matter: nats per token, or a table's own unit",
    )


def define_model() -> None:
    """Defines the flags for checkpoint, changed model and batch."""
    flags.DEFINE_string(
        "checkpoint",
        "latest",
        command_line.CHECKPOINTS,
    )
    flags.DEFINE_string(
        "position",
        None,
        "position method of the test, or several in turn over the layers, in place of the method of training, if it "
        "has the same parameters",
    )
    flags.DEFINE_list(
        "position_options",
        [],
        "KEY=VALUE,... of --position or of the run's own method, such as factor=4; others stay",
    )
    flags.DEFINE_string(
        "window",
        None,
        "test with attention that reaches back so many tokens, 0 means all; 32,0 takes turns over the layers",
    )
    flags.DEFINE_string(
        "logit_scale",
        None,
        "test with logits scaled by log_n, log_n_beyond, ssmax, ssmax_queries or llama4, or unscaled (empty)",
    )
    flags.DEFINE_integer(
        "max_position",
        None,
        "test with positions spread below this number; 0 means positions 0, 1, 2, ...",
        lower_bound=0,
    )
    flags.DEFINE_integer(
        "test_draws",
        None,
        "test with positions drawn below the run's model.max_position, with this seed (0: spread evenly)",
        lower_bound=0,
    )
    flags.DEFINE_integer(
        "batch_tokens", None, "tokens a device holds; defaults to the run's eval.batch_tokens"
    )


def define_evaluators() -> None:
    """Defines --evaluators, and a flag for each option of the evaluators in the registry."""
    names = ", ".join(EVALUATORS)
    flags.DEFINE_list(
        "evaluators",
        ["perplexity"],
        f"what is measured: {names}; your own as package.module:Class",
    )
    flags.DEFINE_list(
        "evaluator_options", [], "KEY=VALUE,... of an evaluator of your own, such as bins=8"
    )
    for name, field in options_by_name(EVALUATORS).items():
        text = help_of(field)
        if field.metadata.get("names"):
            flags.DEFINE_enum(name, None, field.metadata["names"], text)
        elif isinstance(field.default, bool):
            flags.DEFINE_bool(name, None, text)
        else:
            flags.DEFINE_string(name, None, text)


def evaluators() -> tuple[Evaluator, ...]:
    """Returns the evaluators of --evaluators, with their options.

    Raises:
      ValueError: an unknown evaluator, a refused value, or an option of none of them.
    """
    names = list(dict.fromkeys(name.strip() for name in flags.FLAGS.evaluators))
    values = {name: flags.FLAGS[name].value for name in options_by_name(EVALUATORS)}
    options = {name: value for name, value in values.items() if value is not None}
    return tuple(make_evaluators(names, options | _pairs("evaluator_options")))


def whole_numbers(flag: str) -> tuple[int, ...]:
    """Returns the numbers of a flag. Raises ValueError for others than positive whole ones."""
    words = flags.FLAGS[flag].value or []
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise ValueError(
            f"--{flag}={','.join(words)} must be positive whole numbers, such as 1,2,4"
        )
    return tuple(map(int, words))


def length_options() -> dict[str, Any]:
    """Returns the flags of `define_lengths` as fields of `alibi.evaluation.evaluate.LengthOptions`.

    Raises:
      ValueError: two flags contradict each other, a length is no number, or several runs have no
        directory for their results.
    """
    values = flags.FLAGS
    if values.lengths is not None and values.multiples is not None:
        raise ValueError("--lengths and --multiples are two ways to say the same; give one of them")
    values["workdirs"].value = _whole_names(values.workdirs.split(","))
    if values.output_dir is None and len(values.workdirs) > 1:
        raise ValueError("several --workdirs need an --output_dir for their common results")
    if values.output_dir is None:
        # a mistyped name must not become a directory of results
        RunDirectory(values.workdirs[0]).config()
    options: dict[str, Any] = {}
    for flag in ("lengths", "multiples"):
        options |= {flag: numbers} if (numbers := whole_numbers(flag)) else {}
    reference, margin = values.reference, values.margin
    if (reference is None) != (margin is None) or (margin is not None and margin <= 0):
        raise ValueError(
            f"--reference={reference} and --margin={margin} say together what is equivalent to what; give both, the "
            "margin above 0, or neither"
        )
    if reference is not None:
        options["reference"] = Reference(reference, margin)
    return {
        "output_dir": values.output_dir or values.workdirs[0],
        **options,
        "report": values.report,
    }


def model_options() -> dict[str, Any]:
    """Returns the flags of `define_model` as fields of `alibi.evaluation.evaluate.EvaluationOptions`. Raises
    ValueError for refused values.
    """
    values = flags.FLAGS
    changed = {key: value for key in MODEL_KEYS if (value := values[key].value) is not None}
    model = {key: read_value(f"model.{key}", value) for key, value in changed.items()}
    options = tuple((key, parsed(value)) for key, value in _pairs("position_options").items())
    return {
        "checkpoint": values.checkpoint,
        "batch_tokens": values.batch_tokens,
        "override": Override(values.position, options, **model),
    }


def _whole_names(words: list[str]) -> list[str]:
    """Returns the work directories. A name with commas, such as runs/lr=1,wd=2, came as several
    words.
    """
    for count in range(len(words), 0, -1):
        name = ",".join(words[:count])
        if os.path.isdir(os.path.expanduser(name)):
            return [name, *_whole_names(words[count:])]
    return [words[0].strip(), *_whole_names(words[1:])] if words else []


def _pairs(flag: str) -> dict[str, str]:
    """Returns the text of each key in a flag KEY=VALUE,...."""
    options = {}
    # A comma in [0.5,0.25] or (0.5,0.25) separates no options.
    for word in filter(None, re.split(r",(?=\s*\w+\s*=)", ",".join(flags.FLAGS[flag].value or []))):
        name, separator, value = word.partition("=")
        if not (name and separator):
            raise ValueError(f"--{flag}={word} is not KEY=VALUE; write for example factor=4")
        options[name.strip()] = value
    return options
