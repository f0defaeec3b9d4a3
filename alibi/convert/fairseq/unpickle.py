"""The pickle of a PyTorch checkpoint, read without importing or running anything that it names."""

import builtins
import dataclasses
import io
import math
import pickle
import pickletools
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

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
# Python makes room for all entries of its memo up to the one that these name.
INDEXED = ("PUT", "BINPUT", "LONG_BINPUT")
EXTENSIONS = ("EXT1", "EXT2", "EXT4")  # look classes up in a registry, past `find_class`
LARGEST = 2**48  # of sizes, strides and offsets: beyond any file, and in bytes still an int64
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


class UnsafePickleError(ValueError):
    """The pickle names a function that no checkpoint needs."""


def shown(value: Any) -> str:
    """`value`, which a pickle may have made of any size and depth, in a few words of one line."""
    return _SHORT.repr(value)


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

    def __repr__(self) -> str:  # that of a dict would write out all it holds, however deep
        return f"<OrderedDict of {len(self)}>"


class Stateless:
    """What a pickle may hold but not alter: without this it could set attributes past all checks."""

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"it sets attributes of a {type(self).__name__}")


@dataclasses.dataclass(frozen=True)
class Storage(Stateless):
    """Numbers of one type, in the file under `key`.

    Raises:
      ValueError: a key that is no number as a str, or a size that is none.
    """

    key: str
    dtype: np.dtype
    size: int

    def __post_init__(self) -> None:
        if not (isinstance(self.key, str) and self.key.isdecimal() and len(self.key) < 100 and _is_size(self.size)):
            raise ValueError(
                f"a storage has the key {shown(self.key)} and the size {shown(self.size)}; "
                "a numeral as a str and an int of at least 0 are needed"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor(Stateless):
    """A view of a storage, which `read` loads; strides and offset count numbers.

    Raises:
      ValueError: a view that reaches beyond its storage, or has more numbers than it: none
        that is expanded (stride 0), which a small file could make fill the memory.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    load: Callable[[Storage], Shaped[np.ndarray, " numbers"]] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        whole = isinstance(self.storage, Storage) and all(map(_is_size, (self.offset, *self.shape, *self.strides)))
        if not whole or len(self.shape) != len(self.strides):
            raise ValueError(
                f"a tensor has the shape {shown(self.shape)}, the strides {shown(self.strides)} and the offset "
                f"{shown(self.offset)} in {shown(self.storage)}; ints of at least 0 and a storage are needed"
            )
        self._check_lies_in(self.storage.size)

    def _check_lies_in(self, size: int) -> None:
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        if 0 not in self.shape and (last >= size or math.prod(self.shape) > size):
            raise ValueError(
                f"a tensor of shape {shown(self.shape)} and strides {shown(self.strides)} from {self.offset} on "
                f"doesn't lie in its storage of {size} numbers"
            )

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype

    def read(self) -> Shaped[np.ndarray, "..."]:
        """The numbers, a read-only view of the storage's."""
        strides = [step * self.dtype.itemsize for step in self.strides]
        numbers = self.load(self.storage)
        self._check_lies_in(numbers.size)  # once more: what follows looks at no bounds
        return np.lib.stride_tricks.as_strided(numbers[self.offset :], self.shape, strides, writeable=False)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def unpickle(content: bytes, load: Callable[[Storage], Shaped[np.ndarray, " numbers"]]) -> Any:
    """What the pickle holds: containers and numbers as they are, each tensor a `Tensor`, all else `Record`s.

    Args:
      load: reads a storage.

    Raises:
      UnsafePickleError: see there. Nothing of it was called.
      ValueError: a pickle that is damaged, or that no PyTorch writes.
    """
    try:
        _check_opcodes(content)
        return _Unpickler(io.BytesIO(content), load).load()
    except UnsafePickleError:
        raise
    except Exception as error:  # of a damaged pickle, whatever its bytes happen to mean
        raise ValueError(f"its pickle is damaged: {type(error).__name__}: {str(error)[:300]}") from error


def _check_opcodes(content: bytes) -> None:
    """Refuses a small pickle that would fill the memory; genops also finds lengths beyond the pickle's end."""
    for opcode, argument, position in pickletools.genops(content):
        if opcode.name in EXTENSIONS:
            raise UnsafePickleError(f"its pickle has the opcode {opcode.name}, which no checkpoint needs")
        if opcode.name in INDEXED and (argument or 0) > len(content):
            raise pickle.UnpicklingError(f"entry {shown(argument)} of the memo, at byte {position}, is beyond its size")


class _Unpickler(pickle.Unpickler):
    """Calls nothing but what `find_class` gives, and that gives only what is defined here."""

    def __init__(self, stream: io.BytesIO, load: Callable[[Storage], Shaped[np.ndarray, " numbers"]]):
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
        root, known = module.partition(".")[0], sys.stdlib_module_names | set(sys.builtin_module_names)
        harmless = root not in known or module in HARMLESS_MODULES or path in HARMLESS
        if module in ("builtins", "__builtin__"):
            harmless = isinstance(getattr(builtins, name, None), type)
        if not harmless:
            raise UnsafePickleError(
                f"its pickle names {shown(path)[1:-1]}, which no checkpoint needs and which can run code; "
                "nothing was run"
            )
        return type("Record", (Record,), {"path": path})

    def persistent_load(self, pid: Any) -> Storage:
        kind, of_class, key, _, size = pid
        if kind != "storage" or of_class.path not in STORAGES:
            raise pickle.UnpicklingError(f"{shown(pid)} is no storage of a known type; known: {', '.join(STORAGES)}")
        return Storage(key, STORAGES[of_class.path], size)
