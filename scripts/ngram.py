"""N-grams of the train text, of any order with two smoothings, as a baseline for trained runs.

    python scripts/ngram.py --workdirs=A,B --output_dir=OUT

Prints perplexity and bits per byte for each order. Adds the best order with Witten-Bell and with
modified Kneser-Ney smoothing to the rows, tables and figures in OUT, at the runs' evaluation lengths.
The runs need no checkpoint. --unit=tokens counts tokens of the run's tokenizer in place of bytes.
--order=10 goes up to order 10.
--cache=128,512 --tune=FILES mixes in the unigrams and bigrams of the last tokens.
"""

import clone  # noqa: F401, it sets the path of imports
from absl import flags

from alibi.cli import command_line, evaluation_flags

evaluation_flags.define_lengths("1,2,4,8,16")
_SPLIT = flags.DEFINE_string("split", "valid", "train, valid or test, of each run's own corpus")
_STRIDE = flags.DEFINE_integer(
    "stride", None, "stride of the evaluation beside which the rows stand; changes no number"
)
_UNIT = flags.DEFINE_enum(
    "unit", "bytes", ["bytes", "tokens"], "bytes, or tokens of the run's tokenizer"
)
_TRAIN_BYTES = flags.DEFINE_integer(
    "train_bytes", None, "count only the beginning of the train text", lower_bound=1
)
_ORDER = flags.DEFINE_integer(
    "order", 8, "the highest order; order n sees n - 1 bytes or tokens", lower_bound=1
)
flags.DEFINE_list(
    "cache",
    [],
    "adds the best Kneser-Ney order mixed with counts of the last N bytes or tokens, for each N, such as 128,512",
)
_TUNE = flags.DEFINE_string(
    "tune", "", "texts, other than the scored one, on which the weights of --cache are fitted"
)
_CONTEXT_WINDOWS = flags.DEFINE_integer(
    "context_windows",
    512,
    "windows whose last tokens show what a wider cache gains, as in eval_extrapolation.py",
    lower_bound=2,
)
_DUMP_NLL = flags.DEFINE_bool("dump_nll", False, "write each token's NLL to nll/, as of runs")
command_line.own_flags(__name__)


def main() -> int:
    # Imported here, so that a wrong flag is reported at once.
    from alibi.evaluation.ngram_runs import NGramOptions, evaluate_ngrams

    options = NGramOptions(
        **evaluation_flags.length_options(),
        split=_SPLIT.value,
        stride=_STRIDE.value,
        unit=_UNIT.value,
        train_bytes=_TRAIN_BYTES.value,
        order=_ORDER.value,
        cache=evaluation_flags.whole_numbers("cache"),
        tune=_TUNE.value,
        context_windows=_CONTEXT_WINDOWS.value,
        dump_nll=_DUMP_NLL.value,
    )
    return 1 if evaluate_ngrams(flags.FLAGS.workdirs, options) else 0


if __name__ == "__main__":
    command_line.run(main, required=("workdirs",), addresses=("workdirs", "output_dir"))
