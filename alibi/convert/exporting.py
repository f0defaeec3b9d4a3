"""A work directory becomes a folder in the format of the Hugging Face hub."""

import json
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np
from etils import epath

from alibi.config import Config, replaced
from alibi.config.fields import did_you_mean
from alibi.convert.families import FAMILIES, Family
from alibi.convert.families.base import GENERIC
from alibi.convert.folder import read_json
from alibi.convert.importing import HUB, KEPT, MASKS, cast, model_entries
from alibi.convert.tensors import CONFIG, from_safetensors, write_safetensors
from alibi.convert.work_directory import check_empty
from alibi.data.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer
from alibi.data.tokenizers.bpe import library
from alibi.model.layers import unstacked
from alibi.objectives import make_objective
from alibi.parallel.axes import by_path
from alibi.runs.trained import TrainedRun
from alibi.storage.cache import file_sha256
from alibi.storage.claims import LOCK_FILE, Claim
from alibi.storage.files import listed, made_whole, resolve

# transformers' keys of an encoder's special tokens
SPECIAL = {
    "[MASK]": "mask_token",
    "<mask>": "mask_token",
    "[CLS]": "cls_token",
    "[SEP]": "sep_token",
    "[PAD]": "pad_token",
    "[UNK]": "unk_token",
}


def export_model(
    workdir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    family: str = "",
    checkpoint: str = "latest",
    dtype: str = "keep",
) -> tuple[epath.Path, Family, list[str]]:
    """Writes a run's model as a folder for the hub: config.json, safetensors and the tokenizer.

    Args:
      output_dir: empty or absent.
      family: its name. Defaults to the import's, or to the first with a config that can say the run's: the
        parent's, then the others.
      checkpoint: "latest", "best" or a step.
      dtype: files have float32, bfloat16, float16, or with "keep" the run's own dtype.

    Returns:
      The folder, the family, and lines for the folder's readers.

    Raises:
      ValueError: no family can say the model (the error names the keys), an unknown family, several
        processes, a folder with files. See also `TrainedRun`.
    """
    out = resolve(output_dir)
    check_empty(out, str(out), "--output_dir")
    if family and family not in FAMILIES:
        raise ValueError(
            f"--family={family} is unknown; {did_you_mean(family, FAMILIES)}there are: {', '.join(FAMILIES)}"
        )
    if jax.process_count() > 1:
        raise ValueError(
            "an export runs on a single host; start it on one, with devices for the model"
        )
    run = TrainedRun(workdir, checkpoint)
    record = run.directory.provenance()
    origin = record.get("imported_from") or {}
    parent = record.get("parent") or {}
    small = _small_files(run.directory.path / HUB, origin.get("files", {}))
    config = replaced(
        run.config,
        {"train_length": run.config.last_length, "changes": (), "model.scan_layers": False},
    )
    if config.model.embedding != "adaptive":  # which no family can say
        tokens = run.tokenizer.vocab_size + make_objective(config).added_tokens
        config = replaced(config, {"model.vocab_rows": max(config.model.vocab_rows, tokens)})
    chosen, content = _describe(
        run, config, family or origin.get("family", ""), parent.get("family", "")
    )
    file_dtype = run.config.model.param_dtype if dtype == "keep" else dtype
    leaves = by_path(unstacked(run.params))
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    # A model without a head is saved alone, and without the prefix.
    bare = bool(chosen.masked_head) and not config.model.masked_head
    entries = {
        one.theirs.removeprefix(chosen.prefix if bare else ""): one
        for one in model_entries(chosen, content, config, shapes)
    }
    kept = from_safetensors(small.pop(KEPT).read_bytes()) if KEPT in small else {}
    kept = {name.removeprefix(chosen.prefix if bare else ""): kept[name] for name in kept}
    itemsize = np.dtype(jax.numpy.dtype(file_dtype)).itemsize
    sizes = {name: math.prod(one.shape(shapes)) * itemsize for name, one in entries.items()}
    sizes |= {name: kept[name].size * itemsize for name in kept}

    def tensor(name: str) -> np.ndarray:
        array = kept[name] if name in kept else entries[name].to_theirs(leaves)
        return cast(array, file_dtype, name)

    ends = run.tokenizer.ends or (run.tokenizer.boundary_id,)
    content |= {"dtype": file_dtype, "eos_token_id": [*ends] if len(ends) > 1 else ends[0]}
    for key, length in (origin or parent).get("lengths", {}).items():
        if key in content:
            content[key] = max(content[key], length)
    notes = []
    if lost := parent.get("set_aside"):
        notes.append(f"the files lack tensors that the imported model had: {', '.join(lost)}")
    if bare and not config.imported_from:
        notes.append(
            f"{chosen.architectures[1]} has no head for masked tokens, and the run predicted them by its embedding; "
            "model.masked_head=true trains a head that files can hold"
        )
    if keys := chosen.unread(config):
        notes.append(
            f"transformers' own {chosen.architectures[0]} doesn't read {', '.join(keys)} of config.json, so it "
            "computes another model; load the folder by the code of the model's authors (trust_remote_code=True)"
        )
    with made_whole(out) as partial:
        claim = Claim(resolve(partial), "exporting")  # `remove_left` looks for it
        for name in small.keys() - {CONFIG}:
            (partial / name).write_bytes(small[name].read_bytes())
        mask_id = config.objective.mask_id if chosen.masked_head else None
        notes += write_tokenizer(run.tokenizer, partial, mask_id)
        if CONFIG in small and origin["family"] == chosen.name:
            before = read_json(small[CONFIG])
            before.pop("torch_dtype", None)  # the former name of dtype
            content = {key: value for key, value in before.items() if key in GENERIC} | content
            content |= {
                key: before[key] for key in ("architectures", "eos_token_id") if key in before
            }
        if chosen.own_code and "auto_map" not in content:
            notes.append(
                f"transformers reads {chosen.architectures[0]} by its authors' code alone, which is not in the folder: "
                "add auto_map to config.json and the .py files from the model on the hub, else another model is built"
            )
        (partial / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
        write_safetensors(partial, tensor, sizes)
        claim.release()
        (partial / LOCK_FILE).unlink()
    size = sum(sizes.values()) / 1e6
    return out, chosen, [*notes, f"{out}: {content['architectures'][0]}, {size:,.1f} MB of tensors"]


def _small_files(folder: epath.Path, hashes: dict[str, str]) -> dict[str, epath.Path]:
    """Returns the import's other files under their names. Raises ValueError if one is not as the import wrote it.

    `hashes`: SHA-256 for each name. Earlier versions recorded none.
    """
    small = {file.name: file for file in listed(folder)}
    for name in sorted({*hashes, *small} if hashes else ()):
        is_whole = name in small and small[name].is_file()
        if not is_whole or file_sha256(small[name]) != hashes.get(name):
            raise ValueError(
                f"{folder / name} is not as the import wrote it (changed, cut, lost or added); "
                "restore it, or import the model again"
            )
    return small


def _describe(
    run: TrainedRun, config: Config, name: str, preferred: str
) -> tuple[Family, dict[str, Any]]:
    """Returns the family `name` and its config.json. Without a name returns the first that can say the
    model, `preferred` before others.
    """
    if name:
        return FAMILIES[name], FAMILIES[name].describe(config)
    refused = []
    for family in sorted(FAMILIES.values(), key=lambda family: family.name != preferred):
        try:
            content = family.describe(config)
        except ValueError as error:
            refused.append(str(error))
            continue
        if not (keys := family.unread(config)):
            return family, content
        refused.append(
            f"{family.architectures[0]}, whose {', '.join(keys)} transformers doesn't read; name it by "
            f"--family={family.name} for other readers"
        )
    # One that names what differs, if any does.
    nearest = min(refused, key=lambda reason: ("would become" not in reason, reason.count(";")))
    raise ValueError(
        f"no family of the hub that is known here has words for {run}; the nearest: {nearest}"
    )


def write_tokenizer(
    tokenizer: Tokenizer, folder: pathlib.Path, mask_id: int | None = None
) -> list[str]:
    """Writes the tokenizer, and of a model of masked tokens the names of its special tokens.

    Args:
      mask_id: the mask token's id, -1 for one after the vocabulary, which the file gets too.

    Returns:
      A line if transformers has no such tokenizer, or the file no mask token.
    """
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, BpeTokenizer):
        name, content = tokenizer.hub_file()
        settings["eos_token"] = tokenizer.boundary
    elif isinstance(tokenizer, ByteTokenizer):
        name, content = "tokenizer.json", of_bytes().to_str().encode()
    else:
        return [
            "the folder has no tokenizer: transformers has none for words of the run's tokenizer/dict.txt"
        ]
    special = {*tokenizer.special_ids}
    if mask_id == -1 and name == "tokenizer.json":
        made = library().Tokenizer.from_str(content.decode())
        made.add_special_tokens([MASKS[0]])
        if (token := made.token_to_id(MASKS[0])) != tokenizer.vocab_size:
            raise ValueError(
                f"{MASKS[0]} would be token {token} of the exported tokenizer, and the run has it after its "
                f"{tokenizer.vocab_size:,} tokens; train with a tokenizer that has {MASKS[0]}"
            )
        content = made.to_str(pretty=True).encode()
        special.add(MASKS[0])
    (folder / name).write_bytes(content)
    settings |= {key: x for x, key in SPECIAL.items() if x in special}
    if not (folder / "tokenizer_config.json").exists():
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    lacks_mask = mask_id == -1 and name != "tokenizer.json"
    return ["a SentencePiece model takes no mask token; add one by hand"] if lacks_mask else []


def of_bytes() -> Any:
    """Returns a tokenizer with the text's bytes for ids."""
    # GPT-2's letters of bytes: visible ones of Latin-1 are their own, others follow from 256 on.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    letters |= {chr(256 + code): byte for code, byte in enumerate(hidden)}
    hf = library()
    tokenizer = hf.Tokenizer(hf.models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    return tokenizer
