"""Tasks of EleutherAI's harness on a trained run: the command line of `lm_eval` with its model `alibi`.

    python -m alibi.cli.harness --model=alibi --model_args=workdir=workdirs/alibi-512,length=2048 \\
        --tasks=arc_easy,wikitext --output_path=results/mine

Needs the package lm-eval, and the data of the tasks in the cache of the hub or a network once. A
task runs the Python functions that its YAML names (`!function`): read the tasks of others first.
"""

import os
import sys

from alibi.errors import FAILED, explain, print_error


def main() -> int:
    # Flags first: --help needs no JAX.
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
    # The processes of the harness would be forks of a process with JAX's threads.
    os.environ["DISABLE_MULTIPROC"] = "1"
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # else local data look for the hub
    try:
        from alibi.evaluation.harness import harness_model

        harness_model()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except Exception as error:
        if not (line := explain(error)):
            raise
        print_error(line)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
