"""A PyTorch checkpoint file: a zip archive of one pickle and the storages of its tensors."""

import os
import pathlib
import zipfile
from typing import Any

import numpy as np
from jaxtyping import Shaped

from alibi.convert.fairseq.unpickle import Storage, unpickle

PICKLE_BYTES = 2**26  # of the largest model, a few hundred thousand
OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number with which PyTorch before 1.6 begins


class Archive:
    """The file, open. A storage is read when a tensor of it is, once.

    Attributes:
      content: what was saved, see `alibi.convert.fairseq.unpickle.unpickle`.

    Raises:
      ValueError: no PyTorch checkpoint, one of before PyTorch 1.6, truncated, damaged, or
        one that was made to run code; when it is opened. When a storage is read the message
        lacks the file's name: it is for who reads many to say it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = pathlib.Path(path).expanduser()
        self._loaded: dict[Storage, np.ndarray] = {}
        self._zip = self._open()
        try:
            self._folder = self._find_folder()
            if f"{self._folder}byteorder" in self._zip.namelist() and self._read("byteorder", 16) != b"little":
                raise ValueError("it is big-endian; save it again on a usual machine")
            self.content: Any = unpickle(self._read("data.pkl", PICKLE_BYTES), self._load)
        except ValueError as error:
            self._zip.close()
            raise ValueError(f"checkpoint {self._path} can't be used: {error}") from error

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def _open(self) -> zipfile.ZipFile:
        try:
            with self._path.open("rb") as stream:
                start = stream.read(len(OLD_FORMAT))
            return zipfile.ZipFile(self._path)
        except OSError as error:
            raise ValueError(f"checkpoint {self._path} can't be read: {error.strerror}; check --checkpoint") from error
        # NotImplementedError: a version of the zip format that zipfile lacks.
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            if start == OLD_FORMAT:
                what = "is of the format before PyTorch 1.6; load it with PyTorch and save it again"
            elif start[:4] == b"PK\3\4":
                what = f"is truncated or damaged ({error}); fetch it again"
            else:
                what = "is no PyTorch checkpoint, which would be a zip archive; give the .pt file that fairseq wrote"
            raise ValueError(f"checkpoint {self._path} {what}") from error

    def _find_folder(self) -> str:
        found = [name for name in self._zip.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(found) != 1:
            raise ValueError(
                f"it is no PyTorch checkpoint: the archive has {len(found)} files */data.pkl and needs 1; "
                "give the .pt file that fairseq wrote"
            )
        return found[0].removesuffix("data.pkl")

    def _load(self, storage: Storage) -> Shaped[np.ndarray, " numbers"]:
        if storage not in self._loaded:
            needed = storage.size * storage.dtype.itemsize
            content = self._read(f"data/{storage.key}", needed)
            if len(content) != needed:
                raise ValueError(
                    f"it is damaged: storage {storage.key} has {len(content):,} bytes "
                    f"and {storage.size:,} {storage.dtype} need {needed:,}; fetch it again"
                )
            self._loaded[storage] = np.frombuffer(content, storage.dtype)
        return self._loaded[storage]

    def _read(self, name: str, most: int) -> bytes:
        """One of the archive's files, which PyTorch never compresses: so no small archive takes much memory."""
        try:
            info = self._zip.getinfo(self._folder + name)
        except KeyError:
            raise ValueError(f"it is damaged: {name} is missing in it; fetch it again") from None
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
            raise ValueError(
                f"it is damaged: {name} has {info.file_size:,} bytes and at most {most:,}, "
                "uncompressed, are right; fetch it again"
            )
        try:
            return self._zip.read(info)
        except (zipfile.BadZipFile, OSError, EOFError, RuntimeError) as error:
            raise ValueError(f"it is damaged ({error}); fetch it again") from error
