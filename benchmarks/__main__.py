"""Measures training and attention on this machine, against PyTorch and Flax, and between the
position methods.

    python -m benchmarks train --peer=torch    # tokens/s of a training step at two shapes
    python -m benchmarks train --shapes=124M --dtype=bfloat16 --peer=torch_flex,flax  # for a GPU
    python -m benchmarks train                 # and at 128 to 8,192 tokens, with attention's share of the time
    python -m benchmarks profile               # the time of a training step by part of the model
    python -m benchmarks positions             # training, scoring and memory of each position method
    python -m benchmarks attention --lengths=1024,4096,16384 --peer=torch,flax
    python -m benchmarks skipping --workdirs=A,B  # the tiles that the bias of trained runs leaves out
    python -m benchmarks decode                # us of one token against caches of 1k to 64k
    python -m benchmarks generate --peer=torch # tokens/s of reading a prompt and of decoding after it
    python -m benchmarks evaluate              # windows/s of sliding windows; --peer=torch: the paper's way
    python -m benchmarks adaptive              # words/s of adaptive embeddings; --size=paper: a step of 247M
    python -m benchmarks compiled              # a step's cycles on TPUs, as libtpu estimates them
    python -m benchmarks data --text=FILE      # MB/s of making token files, beside numpy and tokenizers

Each contender lives in a process of its own. In every round each is timed in turn while the others
sleep, and so is a float32 matrix product, because the speed of a shared machine drifts: compare
only numbers of the same run. Printed are medians over the rounds, and medians of the rounds' ratios;
--json=FILE writes them as rows with the machine, the versions and the date.
"""

import argparse
import json
import os
import pathlib
import sys

from alibi.storage.files import local_path
from benchmarks import (
    adaptive,
    attention,
    compiled,
    data,
    evaluate,
    generate,
    positions,
    profile,
    skipping,
    training,
)

# before JAX starts: contenders share a GPU's memory
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

ROUNDS = {"train": 15, "positions": 7, "data": 5, "skipping": 5}  # of short turns
COMMANDS = {
    "train": (
        "the training step, against PyTorch and Flax, or at several lengths",
        training.add_arguments,
    ),
    "profile": ("the time of a training step by part of the model", profile.add_arguments),
    "positions": ("the position methods, against each other", positions.add_arguments),
    "attention": (
        "attention alone at several lengths, against PyTorch and Flax",
        attention.add_arguments,
    ),
    "skipping": ("the tiles that the bias of trained runs leaves out", skipping.add_arguments),
    "decode": ("attention of one token against long caches", attention.add_decode_arguments),
    "generate": (
        "reading a prompt and decoding after it, against PyTorch",
        generate.add_arguments,
    ),
    "evaluate": ("sliding windows of the paper's small model or of a run", evaluate.add_arguments),
    "adaptive": (
        "adaptive embeddings: training, and the loss against a dense softmax",
        adaptive.add_arguments,
    ),
    "compiled": (
        "a step's cycles on TPUs, as their compiler estimates them",
        compiled.add_arguments,
    ),
    "data": ("text made into tokens, by tokenizer and workers", data.add_arguments),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (text, add_arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        add_arguments(command)
        command.add_argument(
            "--rounds",
            type=int,
            default=ROUNDS.get(name, 7),
            help="at least 5 for reliable figures",
        )
        command.add_argument("--json", help="file to write the rows to")
    arguments = parser.parse_args()
    try:
        _check(arguments)
        rows = arguments.command(arguments)
        if arguments.json is not None:
            pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for mistakes of the user, before anything is measured."""
    for name, value in vars(arguments).items():
        if type(value) is int and value < 1:
            raise ValueError(f"--{name}={value} must be at least 1")
    if arguments.json is not None:
        file = local_path(arguments.json, "--json")
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ValueError(
                f"--json={arguments.json} can't be written; name a file in a folder that exists"
            )


if __name__ == "__main__":
    sys.exit(main())
