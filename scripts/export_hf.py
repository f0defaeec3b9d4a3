"""Writes the model of a run as a folder in the format of the Hugging Face hub.

    python scripts/export_hf.py --workdir=DIR --output_dir=FOLDER

transformers loads the folder where it has the architecture. A model that no architecture of
docs/importing.md can say (a position method, an adaptive embedding) is an error that names what
differs.
"""

import clone  # noqa: F401, it sets the path of imports
from absl import flags

from alibi.cli import command_line

_WORKDIR = flags.DEFINE_string("workdir", None, "work directory of the run")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "folder to make; may be gs://BUCKET/PATH")
_FAMILY = flags.DEFINE_string(
    "family",
    "",
    "architecture to write, such as llama; defaults to the import's, or the first that fits",
)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "latest", "latest, best or a step")
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "keep",
    ["keep", "float32", "bfloat16", "float16"],
    "dtype of the files; keep means the dtype of the run's saved parameters",
)
command_line.own_flags(__name__)


def main() -> None:
    from alibi.convert.exporting import export_model

    *_, notes = export_model(
        _WORKDIR.value,
        _OUTPUT_DIR.value,
        family=_FAMILY.value,
        checkpoint=_CHECKPOINT.value,
        dtype=_DTYPE.value,
    )
    for note in notes:
        print(note)


if __name__ == "__main__":
    command_line.run(main, required=("workdir", "output_dir"), addresses=("workdir", "output_dir"))
