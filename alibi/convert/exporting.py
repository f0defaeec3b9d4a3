"""A work directory becomes a folder in the format of the Hugging Face hub."""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath

from alibi.config import Config, replaced
from alibi.config.fields import did_you_mean
from alibi.convert.families import FAMILIES, Family
from alibi.convert.families.base import GENERIC
from alibi.convert.folder import CONFIG, read_json, write_weights
from alibi.convert.importing import HUB, by_path, cast, model_entries
from alibi.convert.work_directory import check_empty
from alibi.data.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer
from alibi.data.tokenizers.bpe import library
from alibi.model.layers import is_stacked, unstacked
from alibi.runs.trained import TrainedRun
from alibi.storage.cache import file_sha256
from alibi.storage.claims import LOCK_FILE, Claim
from alibi.storage.files import listed, made_whole, resolve

if TYPE_CHECKING:
    import tokenizers as hf


def export_model(
    workdir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    family: str = "",
    checkpoint: str = "latest",
    dtype: str = "keep",
) -> tuple[pathlib.Path, Family, list[str]]:
    """Writes the model of a run as a folder of the hub: config.json, safetensors and the tokenizer.

    Args:
      output_dir: must be empty or absent.
      family: by name; empty: that of the import, or the first whose config has words for the run's.
      checkpoint: "latest", "best" or a step.
      dtype: of the files: float32, bfloat16, float16, or "keep" for the run's own.

    Returns:
      The folder, the family, and what a reader of the folder must know, a line each.

    Raises:
      ValueError: no family has words for the model (the error says what it lacks); an
        unknown family; several processes; a folder with files; see also `TrainedRun`.
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
    kept = _kept(run)
    config = replaced(run.config, {"model.scan_layers": False})
    if config.model.embedding != "adaptive":  # which no family has words for
        rows = max(config.model.vocab_rows, run.tokenizer.vocab_size)
        config = replaced(config, {"model.vocab_rows": rows})
    chosen, content = _describe(run, config, family)
    of_files = run.config.model.param_dtype if dtype == "keep" else dtype
    params = unstacked(run.params) if is_stacked(run.params) else run.params
    leaves = by_path(params)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    entries = model_entries(chosen, content, config, shapes)
    itemsize = np.dtype(jax.numpy.dtype(of_files)).itemsize
    sizes = {one.theirs: int(np.prod(one.shape(shapes))) * itemsize for one in entries}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for one in entries:
            yield one.theirs, cast(one.to_theirs(leaves), of_files, one.theirs)

    ends = run.tokenizer.ends or (run.tokenizer.boundary_id,)
    content |= {"dtype": of_files, "eos_token_id": [*ends] if len(ends) > 1 else ends[0]}
    notes = []
    if keys := chosen.unread(config):
        notes.append(
            f"transformers' own {chosen.architectures[0]} doesn't read {', '.join(keys)} of config.json, so it "
            "computes another model; load the folder by the code of the model's authors (trust_remote_code=True)"
        )
    with made_whole(out) as partial:
        claim = Claim(resolve(partial), "exporting")  # which `remove_left` asks for
        for name in kept.keys() - {CONFIG}:
            (partial / name).write_bytes(kept[name].read_bytes())
        notes += _write_tokenizer(run.tokenizer, partial)
        if CONFIG in kept and run.directory.provenance()["imported_from"]["family"] == chosen.name:
            before = read_json(kept[CONFIG])
            before.pop("torch_dtype", None)  # the former name of dtype
            content = {key: value for key, value in before.items() if key in GENERIC} | content
            content["architectures"] = before.get("architectures", content["architectures"])
            content["eos_token_id"] = before.get("eos_token_id", content["eos_token_id"])
        (partial / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
        write_weights(partial, tensors(), sizes)
        claim.release()
        (partial / LOCK_FILE).unlink()
    return pathlib.Path(out), chosen, notes


def _kept(run: TrainedRun) -> dict[str, epath.Path]:
    """Returns the import's other small files; ValueError if one is not as the import wrote it."""
    kept = {file.name: file for file in listed(run.directory.path / HUB)}
    # Imports of earlier versions have recorded none.
    known = (run.directory.provenance().get("imported_from") or {}).get("files", {})
    changed = [
        name
        for name in sorted({*known, *kept} if known else ())
        if name not in kept
        or not kept[name].is_file()
        or file_sha256(kept[name]) != known.get(name)
    ]
    if changed:
        raise ValueError(
            f"{run.directory.path / HUB / changed[0]} is not as the import wrote it (changed, cut, lost or added); "
            "restore it, or import the model again"
        )
    return kept


def _describe(run: TrainedRun, config: Config, name: str) -> tuple[Family, dict[str, Any]]:
    """Returns the family of an export and its config.json."""
    imported = run.directory.provenance().get("imported_from")
    name = name or (imported or {}).get("family", "")
    if name:
        return FAMILIES[name], FAMILIES[name].describe(config)
    refused = []
    for family in FAMILIES.values():
        try:
            content = family.describe(config)
            if not (keys := family.unread(config)):
                return family, content
            refused.append(
                f"{family.architectures[0]}, whose {', '.join(keys)} transformers doesn't read; name it by "
                f"--family={family.name} for other readers"
            )
        except ValueError as error:
            refused.append(str(error))
    # One that names what differs, if any does.
    nearest = min(refused, key=lambda reason: ("would become" not in reason, reason.count(";")))
    raise ValueError(
        f"no family of the hub that is known here has words for {run}; the nearest: {nearest}"
    )


def _write_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> list[str]:
    """Writes the tokenizer; returns a line if transformers has no such tokenizer."""
    if isinstance(tokenizer, BpeTokenizer):
        name, written = tokenizer.hub_file()
        (folder / name).write_bytes(written)
    elif isinstance(tokenizer, ByteTokenizer):
        (folder / "tokenizer.json").write_text(of_bytes().to_str())
    else:
        return [
            "the folder has no tokenizer: transformers has none for words of the run's tokenizer/dict.txt"
        ]
    if not (folder / "tokenizer_config.json").exists():
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if isinstance(tokenizer, BpeTokenizer):
            about["eos_token"] = tokenizer.boundary
        (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    return []


def of_bytes() -> "hf.Tokenizer":
    """Returns a tokenizer whose ids are the bytes of the text."""
    # GPT-2's letters of bytes: visible ones of Latin-1 are their own, others follow from 256 on.
    visible = [
        byte for byte in range(256) if byte in {*range(33, 127), *range(161, 173), *range(174, 256)}
    ]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    letters |= {chr(256 + number): byte for number, byte in enumerate(hidden)}
    hf = library()
    tokenizer = hf.Tokenizer(hf.models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    return tokenizer
