"""Tasks of EleutherAI's harness on a trained run: multiple choice, text, perplexity.

    python scripts/lm_eval.py --workdir=workdirs/alibi-512 --tasks=arc_easy,wikitext --length=2048

Prints a table, and writes a JSON line for each metric to harness/ in the output directory. It needs
the package lm-eval, and the tasks' data in the cache of the hub or a network once; tasks of your own
are YAML files in --include_path, with local data. A task runs the Python functions that its YAML names
(`!function`): read the tasks of others first. --position, --position_options and --window test a run
as another method, as in eval_extrapolation.py.
"""

import pathlib
import sys

import clone  # noqa: F401

# The folder of a script comes first among those of imports, and this file would hide the package
# lm_eval, which has its name.
_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:] = [folder for folder in sys.path if pathlib.Path(folder).resolve() != _HERE]

from absl import flags

from alibi.cli import command_line, evaluation_flags

_WORKDIR = flags.DEFINE_string("workdir", None, "work directory of train.py")
_TASKS = flags.DEFINE_list("tasks", None, "tasks of the harness, separated by commas")
_INCLUDE_PATH = flags.DEFINE_string(
    "include_path", None, "folder of YAML files of further tasks; runs their Python (!function)"
)
_LENGTH = flags.DEFINE_integer(
    "length", None, "tokens of a window; default: the length of training", lower_bound=1
)
_NUM_FEWSHOT = flags.DEFINE_integer(
    "num_fewshot", None, "examples before each question; default: as the task says"
)
_LIMIT = flags.DEFINE_float("limit", None, "samples of each task; below 1: their share")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", None, "directory of the results; default: the work directory"
)
evaluation_flags.define_model()
command_line.own_flags(__name__)


def main() -> None:
    # Imported here, so that a wrong flag is reported at once.
    from alibi.evaluation.tasks import Options, evaluate_tasks
    from alibi.runs import RunDirectory

    # a mistyped name must not become a directory of results
    RunDirectory(_WORKDIR.value).config()
    options = Options(
        _OUTPUT_DIR.value or _WORKDIR.value,
        lengths=(_LENGTH.value,) if _LENGTH.value else (),
        tasks=tuple(_TASKS.value),
        include_path=_INCLUDE_PATH.value,
        num_fewshot=_NUM_FEWSHOT.value,
        limit=_LIMIT.value,
        **evaluation_flags.model_options(),
    )
    evaluate_tasks(_WORKDIR.value, options)


if __name__ == "__main__":
    command_line.run(main, required=("workdir", "tasks"), addresses=("workdir", "output_dir"))
