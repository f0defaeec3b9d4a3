"""Passkey retrieval of trained runs, by the key's distance and the window's length.

    python train.py --config=configs/passkey.py:position=alibi,length=128 --workdir=workdirs/passkey-alibi
    python scripts/passkey.py --workdirs=workdirs/passkey-alibi --multiples=1,2,4,8 --output_dir=OUT

Train the runs on text with keys, as in configs/passkey.py; for several methods at once:
scripts/sweep.py --sweep=configs/sweeps/passkey.py. Adds rows to OUT and a table and passkey.png to
its report. --position, --position_options and --window test a run as another method, as in
eval_extrapolation.py.
"""

from absl import flags

from alibi.cli import command_line, evaluation_flags

evaluation_flags.define("1,2,4,8")
_PROMPTS = flags.DEFINE_integer("prompts", 200, "keys to be found at each length and distance")
command_line.define_host_flags()
command_line.own_flags(__name__)


def main() -> int:
    # Imported here, so that a wrong flag is reported at once.
    from alibi.evaluation.passkey import Options, evaluate_passkeys

    options = Options(**evaluation_flags.options(), prompts=_PROMPTS.value)
    command_line.join_hosts()
    return 1 if evaluate_passkeys(flags.FLAGS.workdirs, options) else 0


def run() -> None:
    """Runs the command on the words of its command line, and exits."""
    command_line.run(
        main,
        required=("workdirs",),
        addresses=("workdirs", "output_dir"),
        resumes=command_line.RESUMES,
    )


if __name__ == "__main__":
    run()
