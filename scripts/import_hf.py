"""Makes a work directory from a model of the Hugging Face hub, or from a folder in the hub's format.

    python scripts/import_hf.py --model=FOLDER --workdir=DIR
    python scripts/import_hf.py --model=bigscience/bloom-560m --revision=main --workdir=DIR
    python eval_extrapolation.py --workdirs=DIR --text_file=test.txt --multiples=1,2,4,8 --output_dir=OUT
    python train.py --config=DIR/config.py:length=4096,train.batch_tokens=65536 --workdir=NEW   # trains on from it

docs/importing.md lists the architectures. The folder holds config.json, files of safetensors (or
.bin, by PyTorch with weights_only=True, which runs no code from them), and tokenizer.json or a
SentencePiece model. A key of config.json that is unknown, or that asks for something that is not
implemented, is an error. On several hosts, run the command on each with --multihost. Each needs
the folder.
"""

import clone
from absl import flags

from alibi.cli import command_line

_MODEL = flags.DEFINE_string("model", None, "a folder, or a model's name on the hub")
_REVISION = flags.DEFINE_string("revision", "", "a branch, tag or commit of the hub")
_WORKDIR = flags.DEFINE_string("workdir", None, "work directory to make; may be gs://BUCKET/PATH")
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "keep",
    ["keep", "float32", "bfloat16", "float16"],
    "dtype of the saved parameters; keep means the files' dtype",
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer_file", "", "tokenizer.json or SentencePiece model in place of the folder's"
)
_IGNORE = flags.DEFINE_list("ignore", [], "keys of config.json that don't change the logits")
_LENGTH = flags.DEFINE_integer(
    "train_length",
    0,
    "tokens of a sequence in an encoder's training; defaults to config.json's length",
    lower_bound=0,
)
command_line.define_host_flags()
_CONFIG = command_line.define_config_flag(
    str(clone.ROOT / "configs" / "base.py"),
    help="mesh, text and settings of further training; model, position and length are the folder's",
)
command_line.own_flags(__name__)


def main() -> None:
    # Imported here, so that a wrong flag is reported at once.
    from alibi.convert.importing import import_model
    from alibi.parallel.hosts import is_primary

    command_line.join_hosts()
    run = import_model(
        _MODEL.value,
        _WORKDIR.value,
        _CONFIG.value,
        revision=_REVISION.value,
        dtype=_DTYPE.value,
        tokenizer_file=_TOKENIZER.value,
        ignored=tuple(_IGNORE.value),
        train_length=_LENGTH.value,
    )
    if not is_primary():
        return
    config, made = run.config(), run.provenance()
    model = config.model
    kv_heads = f" ({model.kv_heads} of keys)" if model.num_kv_heads else ""
    print(
        f"{run}: {made['parameters']:,} parameters in {model.param_dtype}; {model.num_layers} layers, width "
        f"{model.width}, {model.num_heads} heads{kv_heads}, feed-forward {model.feed_forward}, "
        f"{made['vocab_size']:,} tokens"
    )
    options = ", ".join(f"{name}={value}" for name, value in config.position_options.items())
    origin = made["imported_from"]
    print(
        f"{origin['architecture']}: position={config.position}{f' ({options})' if options else ''}, "
        f"L={config.train_length}"
    )
    if origin["lengths"] and not _LENGTH.value:
        print(
            f"config.json doesn't say the length of training: L={config.train_length} is its longest text, or a "
            "buffer's size; --train_length=N sets it"
        )
    if config.objective.name == "masked" and not model.masked_head:
        print("the files have no head for masked tokens: the model gives vectors, not words")
    if aside := origin["set_aside"]:
        print(f"not in the model, and kept for an export: {', '.join(aside)}")
    tokenizer = run.tokenizer()
    answers = f"; answers at ids {', '.join(map(str, tokenizer.ends))}"
    print(
        f"documents end with {tokenizer.decode([tokenizer.boundary_id])!r}"
        + ("" if config.objective.name == "masked" else answers)
    )


if __name__ == "__main__":
    command_line.run(main, required=("model", "workdir"), addresses=("workdir",))
