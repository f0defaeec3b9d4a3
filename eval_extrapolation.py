"""Perplexity of trained runs at many lengths.

    python eval_extrapolation.py --workdirs=A,B --multiples=1,2,4,8,16 --output_dir=OUT

Makes a row for each run and length in OUT/rows, and of them OUT/results.jsonl, OUT/report.md
and OUT/extrapolation.png; OUT may be gs://BUCKET/PATH or s3://BUCKET/PATH. Rows that exist are
not computed again, so a stopped command, given again, goes on. On several hosts give the same
command on each, as for train.py; the exit codes are train.py's too.
"""

from absl import flags

from alibi import command_line
from alibi.errors import tell

_WORKDIRS = flags.DEFINE_list("workdirs", None, "work directories of train.py, separated by commas")
_MULTIPLES = flags.DEFINE_list("multiples", None, "evaluation lengths as multiples of each run's own (1,2,4,8,16)")
_LENGTHS = flags.DEFINE_list("lengths", None, "evaluation lengths in tokens, in place of --multiples")
_STRIDE = flags.DEFINE_integer("stride", None, "tokens that each window scores; default: the length, without overlap")
_SPLIT = flags.DEFINE_string("split", "valid", "train, valid or test, of each run's own corpus")
_TEXT_FILE = flags.DEFINE_string(
    "text_file", "", "score this text (paths or globs; .gz, .xz, .zst) in place of a split"
)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", "latest, best (by validation NLL) or a step")
_DUMP_NLL = flags.DEFINE_bool("dump_nll", False, "write each token's NLL to nll/RUN-length=l-stride=s.npz")
_CONTEXT_USE = flags.DEFINE_bool(
    "context_use", False, "also score the same tokens at each length, which tells what the longer context gains"
)
_CONTEXT_WINDOWS = flags.DEFINE_integer(
    "context_windows", 512, "of --context_use: windows whose last tokens are scored"
)
command_line.define_override_flags()
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "where the results go; default: the work directory if it is one")
_BATCH_TOKENS = flags.DEFINE_integer(
    "batch_tokens", None, "tokens a device holds; default: the run's eval.batch_tokens"
)
_REPORT = flags.DEFINE_bool("report", True, "write and print the table, and draw the figure")
command_line.define_host_flags()


def main() -> int:
    # Only now, so that a wrong flag is reported at once.
    from alibi.evaluation.extrapolation import evaluate_runs

    options = _options()
    command_line.join_hosts()
    failures = evaluate_runs(_WORKDIRS.value, options)
    if failures and len(_WORKDIRS.value) > 1:
        tell(f"{len(failures)} of {len(_WORKDIRS.value)} work directories failed, see above")
    return 1 if failures else 0


def _options():
    """The flags as the library takes them; ValueError where they contradict each other."""
    from alibi.evaluation.extrapolation import MULTIPLES, Options
    from alibi.runs import RunDirectory

    if not _WORKDIRS.value:
        raise ValueError("--workdirs names no work directory; give those of train.py, separated by commas")
    if _LENGTHS.value is not None and _MULTIPLES.value is not None:
        raise ValueError("--lengths and --multiples are two ways to say the same; give one of them")
    if _OUTPUT_DIR.value is None and len(_WORKDIRS.value) > 1:
        raise ValueError("several --workdirs need an --output_dir for their common results")
    if _OUTPUT_DIR.value is None:
        RunDirectory(_WORKDIRS.value[0]).config()  # a mistyped name must not become a directory of results
    return Options(
        output_dir=_OUTPUT_DIR.value or _WORKDIRS.value[0],
        lengths=() if _LENGTHS.value is None else command_line.parse_numbers("lengths", _LENGTHS.value),
        multiples=MULTIPLES if _MULTIPLES.value is None else command_line.parse_numbers("multiples", _MULTIPLES.value),
        stride=_STRIDE.value,
        split=_SPLIT.value,
        text_file=_TEXT_FILE.value,
        checkpoint=_CHECKPOINT.value,
        context_windows=_CONTEXT_WINDOWS.value if _CONTEXT_USE.value else 0,
        override=command_line.override(),
        dump_nll=_DUMP_NLL.value,
        batch_tokens=_BATCH_TOKENS.value,
        report=_REPORT.value,
    )


if __name__ == "__main__":
    command_line.run(
        main,
        required=("workdirs",),
        addresses=("workdirs", "output_dir"),
        resumes="finished rows are kept, and the same command goes on from there",
    )
