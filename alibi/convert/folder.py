"""A folder in the format of the Hugging Face hub: config.json, weights in files, a tokenizer."""

import dataclasses
import functools
import json
import logging
import os
import pathlib
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from alibi.data.hosted import reachable
from alibi.errors import masked
from alibi.extras import needs

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = f"{WEIGHTS}.index.json"
FORMS = WEIGHTS, INDEX, PICKLED, f"{PICKLED}.index.json"  # as transformers looks for them
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model")
FILE_BYTES = 4 << 30  # of the files that are written
# Code is copied as text, for those who load an export by it; nothing here runs it.
KEPT = re.compile(r"(?!\.)(config\.json|generation_config\.json|.*token.*\.json|.*\.py)")
MOST_KEPT = 1 << 20  # bytes of such a file
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
FLOATS = tuple(DTYPES.values())


@dataclasses.dataclass(frozen=True)
class Listed:
    """A tensor in a file of safetensors."""

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str


class HubFolder:
    """The tensors of a folder, read one by one.

    Attributes:
      kept: the small files beside the weights, of which an export has copies.

    Raises:
      ValueError: a missing, truncated or unreadable file, or one that lies elsewhere; the error
        names it.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.config = read_json(own_file(path, CONFIG))
        about = [own_file(path, name) for name in os.listdir(path) if KEPT.fullmatch(name)]
        self.kept = [file for file in about if file.exists() and file.stat().st_size < MOST_KEPT]
        self.files, index = self._found()
        self._tensors: dict[str, Any] = {}
        for file in self.files:
            _check_not_a_pointer(file)
            read = self._pickled if file.suffix == ".bin" else self._listed
            self._tensors |= {  # of copies the index's
                name: tensor
                for name, tensor in read(file).items()
                if path / index.get(name, index.get("", "")) == file
            }

    def _found(self) -> tuple[list[pathlib.Path], dict[str, str]]:
        """Returns the files with weights, and the name of each tensor's; "" stands for all tensors.

        Raises:
          ValueError: one of the files is missing.
        """
        there = [name for name in FORMS if (self.path / name).exists()]
        if not there:
            raise ValueError(
                f"{self.path} has no weights: neither {WEIGHTS} nor {PICKLED}, whole or in several files with an index"
            )
        if there[1:]:
            logging.warning("%s: read %s, not %s", self.path, there[0], ", ".join(there[1:]))
        index: Any = {"": there[0]}
        file = own_file(self.path, there[0])
        if file.suffix == ".json":
            index = read_json(file).get("weight_map")
        named = list(index.values()) if isinstance(index, dict) else []
        if not named or not all(isinstance(name, str) for name in named):
            raise ValueError(f"{file} has no weight_map from tensors to files; download it again")
        files = [own_file(self.path, name) for name in sorted({*named})]
        if lost := [file.name for file in files if not file.exists()]:
            raise ValueError(
                f"{self.path} lacks {', '.join(lost)} of its {len(files)} files with weights; download it again"
            )
        return files, index

    def _listed(self, file: pathlib.Path) -> dict[str, Any]:
        with _opened(file) as opened:
            slices = ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118
            return {
                name: Listed(file, tuple(part.get_shape()), part.get_dtype())
                for name, part in slices
            }

    def _pickled(self, file: pathlib.Path) -> dict[str, Any]:
        needs(f"{file.name}, which is no file of safetensors,", "torch")
        import torch

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a pickle's protocol
                # PyTorch before 1.6 wrote no zip, which can't be mapped.
                mapped = zipfile.is_zipfile(file)
                content = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
            if mapped and (part := zipfile.ZipFile(file).testzip()):  # unseen by PyTorch
                raise ValueError(f"{part} has another checksum")
        except Exception as error:  # PyTorch's reader meets damage with many classes
            if isinstance(error, pickle.UnpicklingError) and "unsupported" in str(error).lower():
                raise ValueError(
                    f"{file} is no file of tensors alone: it might run something, so it was not loaded; download it "
                    "again, or convert it to safetensors where it is trusted"
                ) from error
            told = "" if isinstance(error, KeyError) else str(error)
            reason = told.partition("\n")[0].partition(". ")[0] or type(error).__name__
            raise ValueError(
                f"{file} is truncated or damaged ({reason}); download it again"
            ) from error
        by_name = isinstance(content, dict) and all(
            isinstance(name, str)
            and isinstance(tensor, torch.Tensor)
            and (tensor.layout, tensor.device.type) == (torch.strided, "cpu")  # with its numbers
            for name, tensor in content.items()
        )
        if not by_name:
            raise ValueError(
                f"{file} holds no dense tensors by name, as a model's file of the hub does; give a folder written by "
                "save_pretrained"
            )
        return {name: tensor.detach().resolve_neg() for name, tensor in content.items()}

    @property
    def ends(self) -> list[int]:
        """The ids that end an answer: `eos_token_id` of generation_config.json, else of config.json.

        Raises ValueError if it is neither an id nor a list of ids.
        """
        file = own_file(self.path, GENERATION)
        about = [read_json(file), self.config] if file.exists() else [self.config]
        given = [
            content["eos_token_id"] for content in about if content.get("eos_token_id") is not None
        ]
        ids = given[0] if given and isinstance(given[0], list) else given[:1]
        if not all(type(token) is int for token in ids):
            raise ValueError(
                f"{self.path} has eos_token_id={given[0]!r}, which is neither a token's id nor a list of ids"
            )
        return ids

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        """Returns the name of a tensor's dtype, such as "bfloat16"."""
        dtype = str(self._tensors[name].dtype).removeprefix("torch.")
        return DTYPES.get(dtype, dtype)

    def read(self, name: str, index: Any = ...) -> Float[np.ndarray, "..."]:
        """Returns a part of a tensor, in its own dtype."""
        tensor = self._tensors[name]
        if isinstance(tensor, Listed):
            # Opened for each tensor: pages of a file that stays open stay in memory.
            with _opened(tensor.file) as opened:
                part = opened.get_slice(name)
                return part[:] if index is ... else part[index]
        part = tensor[index]
        if self.dtype(name) == "bfloat16":  # NumPy has no such dtype, and ml_dtypes the same bits
            import ml_dtypes
            import torch

            return part.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return part.numpy()

    def tokenizer_file(self) -> pathlib.Path:
        """Returns the tokenizer's file; ValueError if there is none."""
        for name in TOKENIZERS:
            if (file := own_file(self.path, name)).exists():
                return file
        raise ValueError(
            f"{self.path} has no {', '.join(TOKENIZERS[:-1])} or {TOKENIZERS[-1]}; give the tokenizer's file by "
            "--tokenizer_file (transformers writes tokenizer.json by AutoTokenizer.from_pretrained(...)."
            "save_pretrained(FOLDER))"
        )


def own_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a folder's file, which may be missing.

    Raises:
      ValueError: it lies outside the folder (and the blobs of the hub's cache, to which a snapshot
        links), or is no regular file.
    """
    place, real = (pathlib.Path(os.path.realpath(path)) for path in (folder, folder / name))
    cached = re.search(r"/models--[^/]+/snapshots/[^/]+$", os.fspath(place))
    places = (place, place.parents[1] / "blobs") if cached else (place,)
    inside = any(real.is_relative_to(path) for path in places)
    if (
        not inside
        or {"..", "/"} & {*pathlib.PurePath(name).parts}
        or (real.exists() and not real.is_file())
    ):
        raise ValueError(
            f"{folder / name} is no regular file inside the folder, and nothing else is read or copied; put a copy "
            "there if you trust it"
        )
    return folder / name


def _check_not_a_pointer(file: pathlib.Path) -> None:
    """Raises ValueError for what git leaves in place of a large file."""
    with file.open("rb") as opened:
        if opened.read(40).startswith(b"version https://git-lfs."):
            raise ValueError(
                f"{file} is a pointer of Git LFS, not the weights; run `git lfs pull` in {file.parent}, or download "
                "it again"
            )


def _opened(file: pathlib.Path) -> Any:
    """Returns a file of safetensors; ValueError if it is damaged."""
    needs(f"{file}", "safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(os.fspath(file), "np")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is truncated, or no file of safetensors ({error}); download it again"
        ) from error


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; ValueError, which names it, for anything else."""
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
    """Returns a folder, or the copy in the cache of a model on the hub, which is downloaded.

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

    # Without an answer the library would try again for minutes.
    offline = (
        "HF_HUB_OFFLINE is set"
        if constants.HF_HUB_OFFLINE
        else ""
        if reachable([constants.ENDPOINT])
        else f"{constants.ENDPOINT} doesn't answer"
    )
    wanted = ["*.json", "*.safetensors", "*.model", "*.py"]
    download = functools.partial(
        huggingface_hub.snapshot_download,
        model,
        revision=revision or None,
        local_files_only=bool(offline),
    )
    try:
        found = pathlib.Path(download(allow_patterns=wanted))
        if not any(found.glob("*.safetensors")):
            found = pathlib.Path(download(allow_patterns=[*wanted, "*.bin"]))
    except Exception as error:  # of the hub's library and of its HTTP client
        told = f"{offline}, and this machine has no copy" if offline else str(error).strip()
        reason = masked(told.partition("\n")[0]) or type(error).__name__
        raise ValueError(
            f"the hub's model {model} can't be had ({reason}); where there is a network, run "
            f"`hf download {model} --local-dir FOLDER`, copy the folder here, and give --model=FOLDER"
        ) from error
    return found


def write_weights(
    folder: pathlib.Path,
    tensors: Iterator[tuple[str, Float[np.ndarray, "..."]]],
    sizes: Mapping[str, int],
) -> None:
    """Writes tensors as model.safetensors, or in several files with an index, beside config.json.

    Args:
      tensors: names and arrays, in the order of `sizes`.
      sizes: bytes of each tensor.
    """
    needs("a folder of the hub", "safetensors")
    from safetensors.numpy import save_file

    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    files = (
        [WEIGHTS]
        if len(groups) == 1
        else [
            f"model-{number:05}-of-{len(groups):05}.safetensors"
            for number in range(1, len(groups) + 1)
        ]
    )
    for file, names in zip(files, groups, strict=True):
        save_file(dict(next(tensors) for _ in names), folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG, folder / file)  # safetensors lets only the owner read it
    if len(files) > 1:
        places = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
