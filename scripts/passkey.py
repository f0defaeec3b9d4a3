"""Whether trained runs find a key again in their context, by the key's distance and the window's length.

    python train.py --config=configs/passkey.py:position=alibi,length=128 --workdir=workdirs/passkey-alibi
    python scripts/passkey.py --workdirs=workdirs/passkey-alibi --multiples=1,2,4,8 --output_dir=OUT

The runs must have been trained on text with keys, as configs/passkey.py has it; several methods at once:
scripts/sweep.py --sweep=configs/sweeps/passkey.py. Adds rows to OUT and a table and passkey.png to its report.
--position, --position_options and --window test a run as another method, as in eval_extrapolation.py.
"""

import pathlib
import sys

from absl import flags

# A clone works without being installed: python scripts/passkey.py has only scripts/ on its path.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from alibi import command_line

_WORKDIRS = flags.DEFINE_list("workdirs", None, "work directories of train.py, separated by commas")
_MULTIPLES = flags.DEFINE_list("multiples", ["1", "2", "4", "8"], "lengths of windows as multiples of each run's own")
_LENGTHS = flags.DEFINE_list("lengths", None, "lengths of windows in tokens, in place of --multiples")
_PROMPTS = flags.DEFINE_integer("prompts", 200, "keys to be found at each length and distance")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", "latest, best (by validation NLL) or a step")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "where rows and report go")
_REPORT = flags.DEFINE_bool("report", True, "write and print the tables, and draw the figures")
command_line.define_override_flags()
command_line.define_host_flags()


def main() -> int:
    # Only now, so that a wrong flag is reported at once.
    from alibi.evaluation.passkey import Options, evaluate_passkeys

    options = Options(
        output_dir=_OUTPUT_DIR.value,
        lengths=() if _LENGTHS.value is None else command_line.parse_numbers("lengths", _LENGTHS.value),
        multiples=command_line.parse_numbers("multiples", _MULTIPLES.value),
        prompts=_PROMPTS.value,
        checkpoint=_CHECKPOINT.value,
        override=command_line.override(),
        report=_REPORT.value,
    )
    command_line.join_hosts()
    return 1 if evaluate_passkeys(_WORKDIRS.value, options) else 0


if __name__ == "__main__":
    named = ("workdirs", "output_dir")
    command_line.run(main, required=named, addresses=named, resumes=command_line.RESUMES)
