"""The pickle of a PyTorch checkpoint, read without importing or running anything that it names."""

import builtins
import dataclasses
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

STORAGES = {
    "torch.DoubleStorage": np.dtype(np.float64),
    "torch.FloatStorage": np.dtype(np.float32),
    "torch.HalfStorage": np.dtype(np.float16),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.LongStorage": np.dtype(np.int64),
    "torch.IntStorage": np.dtype(np.int32),
    "torch.ShortStorage": np.dtype(np.int16),
    "torch.CharStorage": np.dtype(np.int8),
    "torch.ByteStorage": np.dtype(np.uint8),
    "torch.BoolStorage": np.dtype(np.bool_),
}
# What checkpoints name of the standard library: classes that hold data. Any other name of it
# is refused, since only a pickle that was made to run code has one.
HARMLESS_MODULES = ("argparse", "collections", "datetime", "decimal", "enum", "pathlib", "typing", "uuid")
HARMLESS = ("copyreg._reconstructor", "_codecs.encode")


class UnsafePickleError(ValueError):
    """The pickle names a function that no checkpoint needs."""


class Record:
    """Stands for an object of a class that is not imported: what it was made with, and nothing that acts.

    Attributes:
      path: module and name of the class.
      args: what it was called with.
      state: what was to become its attributes.
    """

    path = ""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **keywords: Any) -> "Record":
        record = super().__new__(cls)
        record.args, record.state = args, keywords
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    # Containers of a class of their own are filled item by item. Nobody reads those here.
    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def __repr__(self) -> str:
        return f"<{self.path}>"


class PlainDict(dict):
    """An OrderedDict without the attributes that PyTorch gives it."""

    def __setstate__(self, state: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class Storage:
    """Numbers of one type, in the file under `key`."""

    key: str
    dtype: np.dtype
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A view of a storage, which `read` loads; strides and offset count numbers.

    Raises:
      ValueError: a view that reaches beyond its storage.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    load: Callable[[Storage], Shaped[np.ndarray, " numbers"]] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        sizes = (self.offset, *self.shape, *self.strides)
        whole = all(type(size) is int and size >= 0 for size in sizes) and len(self.shape) == len(self.strides)
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=False))
        if not whole or (0 not in self.shape and last >= self.storage.size):
            raise ValueError(
                f"a tensor of shape {self.shape} and strides {self.strides} from {self.offset} on "
                f"doesn't lie in its storage of {self.storage.size} numbers"
            )

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype

    def read(self) -> Shaped[np.ndarray, "..."]:
        """The numbers, a read-only view of the storage's."""
        strides = [step * self.dtype.itemsize for step in self.strides]
        numbers = self.load(self.storage)[self.offset :]
        return np.lib.stride_tricks.as_strided(numbers, self.shape, strides, writeable=False)


def unpickle(stream: IO[bytes], load: Callable[[Storage], Shaped[np.ndarray, " numbers"]]) -> Any:
    """What the pickle holds: containers and numbers as they are, each tensor a `Tensor`, all else `Record`s.

    Args:
      load: reads a storage.

    Raises:
      UnsafePickleError: see there. Nothing of it was called.
      ValueError: a pickle that is damaged, or that no PyTorch writes.
    """
    try:
        return _Unpickler(stream, load).load()
    except UnsafePickleError:
        raise
    except Exception as error:  # of a damaged pickle, whatever its bytes happen to mean
        raise ValueError(f"its pickle is damaged: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    """Calls nothing but what `find_class` gives, and that gives only what is defined here."""

    def __init__(self, stream: IO[bytes], load: Callable[[Storage], Shaped[np.ndarray, " numbers"]]):
        super().__init__(stream, encoding="utf-8")

        # Made anew for each pickle, which could set attributes of what it is given.
        def rebuild(storage: Storage, offset: int, shape: Any, strides: Any, *others: Any) -> Tensor:
            del others  # requires_grad, hooks
            return Tensor(storage, offset, tuple(shape), tuple(strides), load)

        self._known: Mapping[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor": lambda *args: rebuild(*args),
            "torch._utils._rebuild_tensor_v2": lambda *args: rebuild(*args),
            "torch._utils._rebuild_parameter": lambda tensor, *others: tensor,
            "torch._utils._rebuild_parameter_with_state": lambda tensor, *others: tensor,
            "torch.Size": lambda sizes=(): tuple(sizes),
            "builtins.set": set,
            "__builtin__.set": set,
            "collections.OrderedDict": type("OrderedDict", (PlainDict,), {}),
        }

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path in self._known:
            return self._known[path]
        if not _is_harmless(module, name):
            raise UnsafePickleError(
                f"its pickle names {path}, which no checkpoint needs and which can run code; nothing was run"
            )
        return type("Record", (Record,), {"path": path})

    def persistent_load(self, pid: Any) -> Storage:
        kind, of_class, key, _, size = pid
        if kind != "storage" or of_class.path not in STORAGES:
            raise pickle.UnpicklingError(f"{pid!r} is no storage of a known type; known: {', '.join(STORAGES)}")
        return Storage(key, STORAGES[of_class.path], size)


def _is_harmless(module: str, name: str) -> bool:
    if module in ("builtins", "__builtin__"):
        return isinstance(getattr(builtins, name, None), type)
    root = module.partition(".")[0]
    standard = root in sys.stdlib_module_names or root in sys.builtin_module_names
    return not standard or module in HARMLESS_MODULES or f"{module}.{name}" in HARMLESS
