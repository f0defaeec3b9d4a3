"""A folder in the format of the Hugging Face hub: config.json, weights in files, a tokenizer."""

import dataclasses
import functools
import json
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
from alibi.extras import needs

CONFIG = "config.json"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
PICKLED_INDEX, PICKLED = "pytorch_model.bin.index.json", "pytorch_model.bin"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model")
FILE_BYTES = 4 << 30  # of the files that are written
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

    Raises:
      ValueError: a missing, truncated or unreadable file, which the error names.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.config = read_json(path / CONFIG)
        self._tensors: dict[str, Any] = {}
        self.files = self._found()
        for file in self.files:
            _check_not_a_pointer(file)
            read = self._pickled if file.suffix == ".bin" else self._listed
            self._tensors |= read(file)

    def _found(self) -> list[pathlib.Path]:
        """Returns the files with weights; ValueError if one of them is missing."""
        for index, whole in ((INDEX, WEIGHTS), (PICKLED_INDEX, PICKLED)):
            if (self.path / index).exists():
                places = read_json(self.path / index).get("weight_map")
                named = list(places.values()) if isinstance(places, dict) else []
                if not named or not all(isinstance(name, str) for name in named):
                    raise ValueError(
                        f"{self.path / index} has no weight_map from tensors to files; download it again"
                    )
                listed = sorted(set(named))
            elif (self.path / whole).exists():
                listed = [whole]
            else:
                continue
            if lost := [name for name in listed if not (self.path / name).exists()]:
                raise ValueError(
                    f"{self.path} lacks {', '.join(lost)} of its {len(listed)} files with weights; download it again"
                )
            return [self.path / name for name in listed]
        raise ValueError(
            f"{self.path} has no weights: neither {WEIGHTS} nor {PICKLED}, whole or in several files with an index"
        )

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
            isinstance(name, str) and isinstance(tensor, torch.Tensor)
            for name, tensor in content.items()
        )
        if not by_name:
            raise ValueError(
                f"{file} holds no tensors by name, as a model's file of the hub does; give a folder written by "
                "save_pretrained"
            )
        return {name: tensor.detach() for name, tensor in content.items()}

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
            if (self.path / name).exists():
                return self.path / name
        raise ValueError(
            f"{self.path} has no {', '.join(TOKENIZERS[:-1])} or {TOKENIZERS[-1]}; give the tokenizer's file by "
            "--tokenizer_file (transformers writes tokenizer.json by AutoTokenizer.from_pretrained(...)."
            "save_pretrained(FOLDER))"
        )


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
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file.parent} has no {file.name}: it is no folder of a model") from None
    except (OSError, ValueError) as error:
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
    path = pathlib.Path(model).expanduser()
    if path.is_dir():
        return path
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        raise ValueError(
            f"{model} is no folder, nor a model's name on the hub such as bigscience/bloom-560m"
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
        reason = told.partition("\n")[0] or type(error).__name__
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
