"""A vector for each line of a text, from a model that sees both sides.

    python scripts/vectors.py --workdir=workdirs/jina --text_file=lines.txt --output=vectors.npy

The file holds float32 [lines, width], which numpy.load reads. Lines are read in batches of like
lengths. What a stopped command has computed is kept beside the output, and the same command goes on
from there. --cosines shows how alike lines 1 and 2, 3 and 4, ... are.
"""

import numpy as np
from absl import flags

from alibi.cli import command_line
from alibi.storage.files import local_path, resolve

flags.DEFINE_string("workdir", None, "work directory of train.py or import_hf.py")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", command_line.CHECKPOINTS)
flags.DEFINE_string("text_file", None, "a file with a text in each line, in UTF-8")
flags.DEFINE_string("output", None, "the .npy file to write, which must not exist")
_POOLING = flags.DEFINE_enum(
    "pooling", "mean", ["mean", "first"], "the mean over a line's tokens, or its first token"
)
_NORMALISED = flags.DEFINE_bool("normalised", True, "divide each vector by its norm")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens",
    0,
    "the most tokens of a line; 0 means the training length, or the longest text of an import",
    lower_bound=0,
)
_CUT = flags.DEFINE_bool("cut", False, "cut longer lines; otherwise they are errors")
_COSINES = flags.DEFINE_integer(
    "cosines", 0, "show the cosine of so many pairs of lines: 1 and 2, 3 and 4, ...", lower_bound=0
)
command_line.own_flags(__name__)


def main() -> None:
    # Imported here, so that a wrong flag is reported at once.
    from alibi.generation.encoders import Vectors, write_vectors
    from alibi.progress import print_line
    from alibi.runs.trained import TrainedRun

    values = flags.FLAGS
    try:
        lines = resolve(values.text_file).read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text_file={values.text_file} can't be read: {error}") from None
    lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    run = TrainedRun(values.workdir, _CHECKPOINT.value)
    how = Vectors(_POOLING.value, _NORMALISED.value, _MAX_TOKENS.value, _CUT.value)
    vectors = write_vectors(run, lines, local_path(values.output, "--output"), how, show=True)
    print(f"{values.output}: {vectors.shape[0]:,} vectors of {vectors.shape[1]:,} numbers")
    pairs = min(_COSINES.value, len(lines) // 2)
    unit = vectors[: 2 * pairs] / np.linalg.norm(vectors[: 2 * pairs], axis=1, keepdims=True)
    for pair, cosine in enumerate((unit[::2] * unit[1::2]).sum(axis=1)):
        print(f"lines {2 * pair + 1} and {2 * pair + 2}: {cosine:.4f}")
    if pairs < _COSINES.value:
        print_line(f"the text has {len(lines)} lines, so {pairs} pairs")


def run() -> None:
    """Runs the command on the words of its command line, and exits."""
    command_line.run(
        main,
        required=("workdir", "text_file", "output"),
        addresses=("workdir", "text_file"),
        resumes=command_line.RESUMES,
    )


if __name__ == "__main__":
    run()
