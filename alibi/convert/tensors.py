"""Reads tensors from safetensors or PyTorch files, one after another. Writes safetensors."""

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
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from alibi.extras import needs

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
FILE_BYTES = 4 << 30  # the most that a written file holds, unless a tensor is larger
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
FLOATS = tuple(DTYPES.values())

Array = Shaped[np.ndarray, "..."]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
      dtype: its name, such as "bfloat16".
      read: returns the tensor in its own dtype.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Array]


@dataclasses.dataclass
class Model:
    """Another codebase's model.

    Attributes:
      path: its folder or file, for messages.
      config: its config as its own code reads it.
    """

    path: pathlib.Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def list_safetensors(file: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors in a safetensors file. Raises ValueError if it is damaged."""
    needs(f"{file}", "safetensors")
    from safetensors import SafetensorError, safe_open

    def read(name: str) -> Array:
        # Opened for each tensor: pages of a file that stays open stay in memory.
        with safe_open(os.fspath(file), "np") as opened:
            return opened.get_slice(name)[:]

    try:
        with safe_open(os.fspath(file), "np") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, it is no mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is truncated, or no file of safetensors ({error}); download it again"
        ) from error
    return {
        name: Tensor(
            tuple(tensor.get_shape()),
            DTYPES.get(tensor.get_dtype(), tensor.get_dtype()),
            functools.partial(read, name),
        )
        for name, tensor in parts.items()
    }


def load_pickle(file: pathlib.Path, stand_ins: Mapping[str, type]) -> Any:
    """Returns the content of a file that `torch.save` wrote. Runs nothing from it.

    Args:
      stand_ins: stand for classes that the pickle may name. The keys are packages or full names.

    Raises:
      MissingPackageError: PyTorch is not installed.
      ValueError: a missing or damaged file, or a pickle that names another class or function.
    """
    needs(f"{file.name}, which is no file of safetensors,", "torch")
    import torch

    try:
        # PyTorch before 1.6 wrote no zip, which can't be mapped.
        mapped = zipfile.is_zipfile(file)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if mapped else []
        classes: list[Any] = [
            (stand_ins[key], name)
            for name in names
            for key in {name, name.partition(".")[0]} & stand_ins.keys()
        ]
        with warnings.catch_warnings(), torch.serialization.safe_globals(classes):
            warnings.simplefilter("ignore")  # about the pickle's protocol
            content = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
        if mapped and (member := zipfile.ZipFile(file).testzip()):  # PyTorch compares no checksums
            raise ValueError(f"{member} has another checksum")
    except Exception as error:  # PyTorch's reader meets damage with many classes
        if isinstance(error, pickle.UnpicklingError) and "unsupported" in str(error).lower():
            named = re.search(r"GLOBAL (\S+)", str(error))
            raise ValueError(
                f"{file} is no file of tensors alone: it might run {named[1] if named else 'something'}, so it was not "
                "loaded; download it again, or convert it where it is trusted"
            ) from error
        told = "" if isinstance(error, KeyError) else str(error)
        reason = told.partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise ValueError(
            f"{file} is missing, truncated or damaged ({reason}); download it again"
        ) from error
    return content


def list_dense(content: Any, file: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors in a pickle's `content`. Raises ValueError if it is no dict of dense tensors."""
    import ml_dtypes
    import torch

    def read(tensor: torch.Tensor) -> Array:
        if tensor.dtype is torch.bfloat16:  # NumPy has no such dtype, and ml_dtypes the same bits
            return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    by_name = isinstance(content, dict) and all(
        isinstance(name, str)
        and isinstance(tensor, torch.Tensor)
        and (tensor.layout, tensor.device.type) == (torch.strided, "cpu")  # with its numbers
        for name, tensor in content.items()
    )
    if not by_name:
        raise ValueError(
            f"{file} holds no dense tensors by name, as a model's file does; give the file that its code wrote"
        )
    return {
        name: Tensor(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            functools.partial(read, tensor.detach().resolve_neg()),
        )
        for name, tensor in content.items()
    }


def to_safetensors(tensors: dict[str, Array]) -> bytes:
    """Returns a safetensors file."""
    needs("tensors that a model doesn't use", "safetensors")
    from safetensors.numpy import save

    return save(tensors)


def from_safetensors(content: bytes) -> dict[str, Array]:
    """Returns the tensors in a safetensors file."""
    import ml_dtypes  # noqa: F401  # NumPy then knows bfloat16, which safetensors.numpy doesn't read
    from safetensors import deserialize

    return {
        name: np.frombuffer(one["data"], DTYPES[one["dtype"]]).reshape(one["shape"])
        for name, one in deserialize(content)
    }


def write_safetensors(
    folder: pathlib.Path, read: Callable[[str], Array], sizes: Mapping[str, int]
) -> None:
    """Writes model.safetensors, or several files with an index, beside config.json.

    Args:
      read: returns the tensor with a name.
      sizes: bytes of each tensor.
    """
    needs("a folder of the hub", "safetensors", "huggingface_hub")
    from huggingface_hub import split_state_dict_into_shards_factory as split
    from safetensors.numpy import save_file

    plan = split(
        dict(sizes),
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_BYTES,
    )
    for file, names in plan.filename_to_tensors.items():
        save_file({name: read(name) for name in names}, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG, folder / file)  # safetensors lets only the owner read it
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
