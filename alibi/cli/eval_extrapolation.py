"""Evaluates trained runs at many lengths: perplexity, or whatever --evaluators names.

    python eval_extrapolation.py --workdirs=A,B --multiples=1,2,4,8,16 --output_dir=OUT
    python eval_extrapolation.py --workdirs=A,B --evaluators=perplexity,context_use --output_dir=OUT

Writes a row for each result to OUT/rows, then OUT/results.jsonl, OUT/report.md and figures such as
OUT/extrapolation.png. OUT may be gs://BUCKET/PATH or s3://BUCKET/PATH. Existing rows are not
computed again, so the same command goes on after a stop. On several hosts give the same command on
each, as for train.py. The exit codes are train.py's too.
"""

from absl import flags

from alibi.cli import command_line, evaluation_flags
from alibi.errors import print_error

evaluation_flags.define_lengths("1,2,4,8,16")
evaluation_flags.define_model()
evaluation_flags.define_evaluators()
_EVALUATION = flags.DEFINE_string(
    "evaluation",
    None,
    "evaluators, lengths and override as a sweep writes them, in place of their flags",
)
command_line.define_host_flags()
command_line.own_flags(__name__)


def main() -> int:
    values = evaluation_flags.length_options() | evaluation_flags.model_options()
    if _EVALUATION.value is None:
        values["evaluators"] = evaluation_flags.evaluators()
    else:
        from alibi.sweeps.definition import Evaluation

        evaluation = Evaluation.from_json(_EVALUATION.value)
        values |= {
            name: getattr(evaluation, name) for name in ("evaluators", "lengths", "override")
        }
    # Imported only now: a wrong flag is reported at once.
    from alibi.evaluation.evaluate import EvaluationOptions, evaluate_runs

    options = EvaluationOptions(**values)
    command_line.join_hosts()
    workdirs = flags.FLAGS.workdirs
    failures = evaluate_runs(workdirs, options)
    if failures and len(workdirs) > 1:
        print_error(f"{len(failures)} of {len(workdirs)} work directories failed, see above")
    return 1 if failures else 0


def run() -> None:
    """Runs the command on the words of its command line, and exits."""
    command_line.run(
        main,
        required=("workdirs",),
        addresses=("workdirs", "output_dir"),
        resumes="finished rows are kept, and the same command goes on from there",
        absent={"config": "the config of a run is read from its work directory"},
    )


if __name__ == "__main__":
    run()
