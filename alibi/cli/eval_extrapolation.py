"""Perplexity of trained runs at many lengths.

    python eval_extrapolation.py --workdirs=A,B --multiples=1,2,4,8,16 --output_dir=OUT

Writes a row for each run and length to OUT/rows, then OUT/results.jsonl, OUT/report.md and
OUT/extrapolation.png; OUT may be gs://BUCKET/PATH or s3://BUCKET/PATH. Existing rows are not
computed again, so the same command goes on after a stop. On several hosts give the same command on
each, as for train.py; the exit codes are train.py's too.
"""

from absl import flags

from alibi.cli import command_line, evaluation_flags
from alibi.errors import print_error

CONTEXT_WINDOWS = 512  # for --context_use

evaluation_flags.define("1,2,4,8,16")
_STRIDE = flags.DEFINE_integer(
    "stride", None, "tokens that each window scores; default: the length, without overlap"
)
_SPLIT = flags.DEFINE_string("split", "valid", "train, valid or test, of each run's own corpus")
_TEXT_FILE = flags.DEFINE_string(
    "text_file",
    "",
    "score this text in place of a split: paths or globs of texts, or of .jsonl, .csv and .parquet files, whose rows "
    "are documents; .gz, .xz, .zst, .bz2",
)
_DOCUMENT_END = flags.DEFINE_enum(
    "document_end",
    "",
    ["", "file", "blank_line", "line"],
    "end of the documents in --text_file; default: the run's data.document_end",
)
_COLUMN = flags.DEFINE_string(
    "column", "", "column of the rows in --text_file; default: the run's data.column"
)
_SEPARATELY = flags.DEFINE_bool(
    "separately", False, "score each document on its own, and write the NLL of its tokens"
)
_DUMP_NLL = flags.DEFINE_bool(
    "dump_nll", False, "write each token's NLL to nll/RUN-length=l-stride=s.npz"
)
_CONTEXT_USE = flags.DEFINE_bool(
    "context_use", False, "also score the same tokens at each length: the gain of a longer context"
)
_CONTEXT_WINDOWS = flags.DEFINE_integer(
    "context_windows",
    None,
    f"for --context_use: windows whose last tokens are scored; default: {CONTEXT_WINDOWS}",
)
command_line.define_host_flags()
command_line.own_flags(__name__)


def _check_flags() -> None:
    """Raises ValueError for a flag without effect."""
    if _CONTEXT_WINDOWS.value is not None and not _CONTEXT_USE.value:
        raise ValueError(
            f"--context_windows={_CONTEXT_WINDOWS.value} is for --context_use; add it, or leave both out"
        )
    if _SPLIT.present and _TEXT_FILE.value:
        raise ValueError(
            f"--split={_SPLIT.value} names a split of each run's own corpus, --text_file={_TEXT_FILE.value} another "
            "text; give one of them"
        )
    for flag in (_DOCUMENT_END, _COLUMN):
        if flag.value and not _TEXT_FILE.value:
            raise ValueError(
                f"--{flag.name}={flag.value} is for --text_file; name the files of a split there to read it otherwise"
            )


def main() -> int:
    # Imported only now: a wrong flag is reported at once.
    from alibi.evaluation.extrapolation import Options, evaluate_runs

    _check_flags()
    windows = CONTEXT_WINDOWS if _CONTEXT_WINDOWS.value is None else _CONTEXT_WINDOWS.value
    options = Options(
        **evaluation_flags.options(),
        stride=_STRIDE.value,
        split=_SPLIT.value,
        text_file=_TEXT_FILE.value,
        document_end=_DOCUMENT_END.value,
        column=_COLUMN.value,
        separately=_SEPARATELY.value,
        context_windows=windows if _CONTEXT_USE.value else 0,
        dump_nll=_DUMP_NLL.value,
    )
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
