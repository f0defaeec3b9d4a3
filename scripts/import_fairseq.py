"""Makes a work directory from a checkpoint that the paper's own code (a fork of fairseq) wrote.

    bash scripts/setup.sh --extra=torch
    python scripts/import_fairseq.py --checkpoint=F.pt --dictionary=dict.txt --workdir=DIR
    python eval_extrapolation.py --workdirs=DIR --text_file=valid.txt --lengths=64,512 --output_dir=OUT
    python train.py --config=DIR/config.py --workdir=DIR

Sizes, position method and dropout rates come from the checkpoint. The text and the settings for
further training come from --config. PyTorch reads the file with weights_only=True, which runs no
code from it.
"""

import clone
from absl import flags

from alibi.cli import command_line

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "the .pt file")
_DICTIONARY = flags.DEFINE_string("dictionary", None, "the dict.txt of its training")
_WORKDIR = flags.DEFINE_string("workdir", None, "work directory to make; may be gs://BUCKET/PATH")
_POSITION = flags.DEFINE_enum(
    "position",
    "",
    ["", "alibi", "sinusoidal", "none"],
    "position method; defaults to the one that the checkpoint's settings show",
)
_CONFIG = command_line.define_config_flag(
    str(clone.ROOT / "configs" / "wikitext103.py"),
    help="a config file with the text and settings of further training",
)
command_line.own_flags(__name__)


def main() -> None:
    # Imported here, so that a wrong flag is reported at once.
    from alibi.convert.importing import import_fairseq

    run = import_fairseq(
        _CHECKPOINT.value,
        _DICTIONARY.value,
        _WORKDIR.value,
        _CONFIG.value,
        position=_POSITION.value,
    )
    config, made = run.config(), run.provenance()
    model = config.model
    bands = (
        f", cutoffs {', '.join(map(str, model.cutoffs))}" if model.embedding == "adaptive" else ""
    )
    print(
        f"{run}: {made['parameters']:,} parameters after {run.status()['step']:,} updates at "
        f"L={config.train_length}; {model.num_layers} layers, width {model.width}, {model.num_heads} heads, "
        f"feed-forward {model.feed_forward}, {made['vocab_size']:,} words{bands}"
    )
    reason = made["imported_from"]["position_reason"]
    hint = "" if _POSITION.value else "; --position=NAME overrides it"
    print(f"position method: {config.position} ({reason}{hint})")


if __name__ == "__main__":
    command_line.run(main, required=("checkpoint", "dictionary", "workdir"), addresses=("workdir",))
