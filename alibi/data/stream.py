"""The ids of a split as one array, though they lie in many files; read from disk as they are used."""

import bisect
import functools
import hashlib
import itertools
import mmap
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from jaxtyping import Integer

OPEN_SHARDS = 256  # memory maps that are kept, each of which holds a file open
_HASHED_BYTES = 1 << 18  # at a time
# Only where the system has it: elsewhere reading is slower, and right.
_RANDOM, _WILL_NEED = getattr(mmap, "MADV_RANDOM", None), getattr(mmap, "MADV_WILLNEED", None)


class TokenStream:
    """Token ids over memory-mapped shards; reads like a 1-D array: length, slices without a step, single ids.

    A slice is a view of the map, or a copy where it goes over the end of a shard. The kernel is told that reads are
    random: left to itself it reads a thousand times of what a batch uses.
    """

    def __init__(self, files: Sequence[pathlib.Path], sizes: Sequence[int], dtype: np.dtype):
        """`sizes`: ids in each of the `files`."""
        kept = [(file, size) for file, size in zip(files, sizes, strict=True) if size]  # none can be mapped of nothing
        self._files = [file for file, _ in kept]
        self._starts = [0, *itertools.accumulate(size for _, size in kept)]
        self.dtype = np.dtype(dtype)
        self._shard = functools.lru_cache(OPEN_SHARDS)(self._open)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def size(self) -> int:
        return len(self)

    @overload
    def __getitem__(self, index: int) -> np.integer: ...
    @overload
    def __getitem__(self, index: slice) -> Integer[np.ndarray, " tokens"]: ...
    def __getitem__(self, index: int | slice) -> np.integer | np.ndarray:
        if not isinstance(index, slice):
            at = range(len(self))[index]
            return self[at : at + 1][0]
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"slices of tokens have no step, but {step} was asked for; use np.asarray(tokens) first")
        parts = [self._shard(shard)[1][first:last] for shard, first, last in self._parts(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self.dtype), *parts])

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("tokens that lie in files are copied to become an array")
        return np.array(self[:], dtype)

    def tolist(self) -> list[int]:
        return self[:].tolist()

    def will_read(self, start: int, stop: int) -> None:
        """Has the kernel begin to fetch these ids, and returns at once: so those of several rows come side by side."""
        for shard, first, last in self._parts(start, min(stop, len(self))):
            if _WILL_NEED is not None:
                page = first * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
                self._shard(shard)[0].madvise(_WILL_NEED, page, last * self.dtype.itemsize - page)

    def _parts(self, start: int, stop: int) -> Iterable[tuple[int, int, int]]:
        """The shards that hold `start` to `stop`, each with the range within it."""
        shard = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[shard + 1])
            yield shard, start - self._starts[shard], end - self._starts[shard]
            start, shard = end, shard + 1

    def _open(self, shard: int) -> tuple[mmap.mmap, np.ndarray]:
        with self._files[shard].open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if _RANDOM is not None:
            pages.madvise(_RANDOM)
        return pages, np.frombuffer(pages, self.dtype)


# What tokens may be given as: those of a token file, or an array.
Tokens = TokenStream | Integer[np.ndarray, " tokens"]


def hash_ids(files: Iterable[pathlib.Path], dtype: np.dtype) -> Iterator[str]:
    """SHA-256 of all ids up to the end of each of the files: the last is that of the whole, however it is cut.

    Ids of one byte are hashed as the two bytes that they took in older files, and so have the hash that they had.
    """
    hasher = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(_HASHED_BYTES):
                ids = np.frombuffer(block, dtype)
                hasher.update((ids.astype("<u2") if dtype.itemsize == 1 else ids).data)
        yield hasher.hexdigest()
