"""A folder in the format of the Hugging Face hub: config.json, weights in files, a tokenizer."""

import json
import os
import pathlib
import re
from typing import Any

from alibi.convert.tensors import CONFIG, INDEX, Model, list_dense, list_safetensors, load_pickle
from alibi.data.hosted import reachable
from alibi.errors import masked
from alibi.extras import needs

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
FORMS = WEIGHTS, INDEX, PICKLED, f"{PICKLED}.index.json"  # as transformers looks for them
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model")
# Code is copied as text, for those who load an export by it; nothing here runs it.
KEPT = re.compile(r"(?!\.)(config\.json|generation_config\.json|.*token.*\.json|.*\.py)")
MOST_KEPT = 1 << 20  # bytes of such a file


class HubFolder(Model):
    """The model in a folder.

    Attributes:
      files: the files with weights.
      kept: the small files beside the weights. An export has copies.
      ends: the ids that end an answer: `eos_token_id` in generation_config.json, else in config.json.

    Raises:
      ValueError: a missing, truncated or unreadable file, or one that lies elsewhere. The error
        names it.
    """

    def __init__(self, path: pathlib.Path):
        super().__init__(path, read_json(own_file(path, CONFIG)), {})
        small = [own_file(path, name) for name in os.listdir(path) if KEPT.fullmatch(name)]
        self.kept = [file for file in small if file.exists() and file.stat().st_size < MOST_KEPT]
        self.ends = self._find_ends()
        self.files, index = self._find_files()
        copies: dict[str, dict[pathlib.Path, Any]] = {}
        for file in self.files:
            with file.open("rb") as opened:
                if opened.read(40).startswith(b"version https://git-lfs."):
                    raise ValueError(
                        f"{file} is a pointer of Git LFS, not the weights; run `git lfs pull` in {path}, or download "
                        "it again"
                    )
            pickled = file.suffix == ".bin"
            tensors = list_dense(load_pickle(file, {}), file) if pickled else list_safetensors(file)
            for name, tensor in tensors.items():
                copies.setdefault(name, {})[file] = tensor
        self.tensors |= {  # a tensor in two files is read from the index's
            # TensorFlow's names, in BERT's first files
            name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
                "LayerNorm.beta", "LayerNorm.bias"
            ): tensor
            for name, by_file in copies.items()
            for file, tensor in by_file.items()
            if len(by_file) == 1 or path / index.get(name, "") == file
        }

    def _find_files(self) -> tuple[list[pathlib.Path], dict[str, str]]:
        """Returns the files with weights, and the file's name for each tensor, or for "" (all).

        Raises:
          ValueError: one of the files is missing.
        """
        forms = [name for name in FORMS if (self.path / name).exists()]
        if not forms:
            raise ValueError(
                f"{self.path} has no weights: neither {WEIGHTS} nor {PICKLED}, whole or in several files with an index"
            )
        index: Any = {"": forms[0]}
        file = own_file(self.path, forms[0])
        if file.suffix == ".json":
            index = read_json(file).get("weight_map")
        if not (
            isinstance(index, dict) and index and all(isinstance(x, str) for x in index.values())
        ):
            raise ValueError(f"{file} has no weight_map from tensors to files; download it again")
        files = [own_file(self.path, name) for name in sorted({*index.values()})]
        if lost := [file.name for file in files if not file.exists()]:
            raise ValueError(
                f"{self.path} lacks {', '.join(lost)} of its {len(files)} files with weights; download it again"
            )
        return files, index

    def _find_ends(self) -> list[int]:
        configs = [self.config]
        if (file := own_file(self.path, "generation_config.json")).exists():
            configs.insert(0, read_json(file))
        told = [ids for config in configs if (ids := config.get("eos_token_id")) is not None]
        ends = told[0] if told and isinstance(told[0], list) else told[:1]
        if not all(type(token) is int for token in ends):
            raise ValueError(
                f"{self.path} has eos_token_id={told[0]!r}, which is neither a token's id nor a list of ids"
            )
        return ends

    def tokenizer_file(self) -> pathlib.Path:
        """Returns the tokenizer's file. Raises ValueError if there is none."""
        for name in TOKENIZERS:
            if (file := own_file(self.path, name)).exists():
                return file
        raise ValueError(
            f"{self.path} has no {', '.join(TOKENIZERS[:-1])} or {TOKENIZERS[-1]}; give the tokenizer's file by "
            "--tokenizer_file (transformers writes tokenizer.json by AutoTokenizer.from_pretrained(...)."
            "save_pretrained(FOLDER))"
        )


def own_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path to a folder's file, which may be missing.

    Raises:
      ValueError: it lies outside the folder (and outside the blobs in the hub's cache, to which a
        snapshot links, and a --local-dir of earlier versions), or is no regular file.
    """
    home, real = (pathlib.Path(os.path.realpath(path)) for path in (folder, folder / name))
    is_cached = re.search(r"/models--[^/]+/blobs/[^/]+$", os.fspath(real))
    leads_out = {"..", "/"} & {*pathlib.PurePath(name).parts}
    is_other = real.exists() and not real.is_file()
    if leads_out or is_other or not (is_cached or real.is_relative_to(home)):
        raise ValueError(
            f"{folder / name} is no regular file inside the folder, and nothing else is read or copied; put a copy "
            "there if you trust it"
        )
    return folder / name


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ValueError for anything else."""
    try:
        content = json.loads(file.read_bytes())  # of any UTF, with a byte order mark or without
    except FileNotFoundError:
        raise ValueError(f"{file.parent} has no {file.name}: it is no folder of a model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} can't be read ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no object; download it again")
    return content


def find_folder(model: str, revision: str = "") -> pathlib.Path:
    """Returns a folder, or downloads a model of the hub and returns its copy in the cache.

    Args:
      model: a folder, or a name on the hub such as "bigscience/bloom-560m".
      revision: a branch, tag or commit on the hub.

    Raises:
      ValueError: no such folder, or a hub that doesn't answer within 3 s or lacks the model.
    """
    path = pathlib.Path(os.path.expanduser(model))
    if path.is_dir():
        return path
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        raise ValueError(
            f"{masked(model)} is no folder, nor a model's name on the hub such as bigscience/bloom-560m"
        )
    needs(f"the model {model} of the hub", "huggingface_hub")
    import huggingface_hub
    from huggingface_hub import constants

    offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    if not offline and not reachable([constants.ENDPOINT]):  # it would be asked for minutes
        offline = f"{constants.ENDPOINT} doesn't answer"
    how: Any = {"revision": revision or None, "local_files_only": bool(offline)}
    wanted = ["*.json", "*.safetensors", "*.model", "*.py"]
    try:
        copy: Any = huggingface_hub.snapshot_download(model, allow_patterns=wanted, **how)
        if not any(pathlib.Path(copy).glob("*.safetensors")):
            wanted.append("*.bin")
            copy = huggingface_hub.snapshot_download(model, allow_patterns=wanted, **how)
    except Exception as error:  # of the hub's library and of its HTTP client
        told = f"{offline}, and this machine has no copy" if offline else str(error).strip()
        reason = masked(told.partition("\n")[0]) or type(error).__name__
        raise ValueError(
            f"the hub's model {model} can't be had ({reason}); where there is a network, run "
            f"`hf download {model} --local-dir FOLDER`, copy the folder here, and give --model=FOLDER"
        ) from error
    return pathlib.Path(copy)
