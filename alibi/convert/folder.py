"""A folder in the format of the Hugging Face hub: config.json, weights in files, a tokenizer."""

import dataclasses
import json
import os
import pathlib
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

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
            read = self._pickled if file.suffix == ".bin" else self._listed
            self._tensors |= read(file)

    def _found(self) -> list[pathlib.Path]:
        """Returns the files with weights; ValueError if one of them is missing."""
        for index, whole in ((INDEX, WEIGHTS), (PICKLED_INDEX, PICKLED)):
            if (self.path / index).exists():
                listed = sorted(set(read_json(self.path / index)["weight_map"].values()))
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
        try:
            import torch
        except ImportError:
            raise ValueError(
                f"reading {file.name} needs PyTorch; install it by bash scripts/setup.sh --extra=torch, or give a "
                "folder with files of safetensors"
            ) from None
        try:
            return dict(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{file} is a pickle with more than tensors, which might run something, so it was not loaded; convert "
                "it to safetensors where it is trusted"
            ) from error
        except (OSError, RuntimeError, EOFError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{file} is truncated or damaged ({reason}); download it again"
            ) from error

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


def _opened(file: pathlib.Path) -> Any:
    """Returns a file of safetensors; ValueError if it is damaged."""
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
      ValueError: no such folder, or a hub that can't be reached or lacks the model.
    """
    path = pathlib.Path(model).expanduser()
    if path.is_dir():
        return path
    if model.count("/") != 1 or model.startswith((".", "~", "/")):
        raise ValueError(
            f"{model} is no folder, nor a model's name on the hub such as bigscience/bloom-560m"
        )
    import huggingface_hub

    wanted = ["*.json", "*.safetensors", "*.model"]
    download = huggingface_hub.snapshot_download
    try:
        if not huggingface_hub.try_to_load_from_cache(model, CONFIG, revision=revision or None):
            huggingface_hub.HfApi().model_info(model, revision=revision or None, timeout=4)
        found = pathlib.Path(download(model, revision=revision or None, allow_patterns=wanted))
        if not any(found.glob("*.safetensors")):
            found = pathlib.Path(
                download(model, revision=revision or None, allow_patterns=[*wanted, "*.bin"])
            )
    except Exception as error:  # of the hub's library and of its HTTP client
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
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
    """Writes tensors as model.safetensors, or in several files with an index.

    Args:
      tensors: names and arrays, in the order of `sizes`.
      sizes: bytes of each tensor.
    """
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
    if len(files) > 1:
        places = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
