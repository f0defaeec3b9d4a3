"""A token file on disk: shards that read as one array, a manifest and the tokenizer."""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import mmap
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer

from alibi.data.tokenizers import Tokenizer, load_tokenizer
from alibi.storage.cache import content_key

FORMAT_VERSION = 4
# A token file up to this size is hashed when a process first opens it; of a larger one only the
# sizes are checked.
VERIFY_BYTES = 1 << 30  # WikiText-103 has 0.4 GB; hashing takes about a second
OPEN_SHARDS = 256  # memory maps that are kept, each of which holds a file open
_HASHED_BYTES = 1 << 18  # at a time


class TokenStream:
    """Token ids in memory-mapped shards. Reads like a 1-D array: length, slices without a step, ids.

    A slice is a view, or a copy if it crosses shards. The kernel is told to expect random reads:
    otherwise it reads a thousand times as much as a batch uses.
    """

    def __init__(self, files: Sequence[pathlib.Path], sizes: Sequence[int], dtype: np.dtype):
        """`sizes`: the ids in each file."""
        # an empty file has no map
        filled = [(file, size) for file, size in zip(files, sizes, strict=True) if size]
        self._files = [file for file, _ in filled]
        self._starts = [0, *itertools.accumulate(size for _, size in filled)]
        self.dtype = np.dtype(dtype)
        self._shard = functools.lru_cache(OPEN_SHARDS)(self._open)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            at = range(len(self))[index]
            return self[at : at + 1][0]
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(
                f"slices of tokens have no step, but got {step}; use np.asarray(tokens) first"
            )
        slices = [self._shard(shard)[1][i:j] for shard, i, j in self._ranges(start, stop)]
        return slices[0] if len(slices) == 1 else np.concatenate([np.zeros(0, self.dtype), *slices])

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype)

    def will_read(self, start: int, stop: int) -> None:
        """Asks the kernel to fetch these ids and returns at once, so that it fetches several rows side
        by side.
        """
        for shard, first, last in self._ranges(start, min(stop, len(self))):
            page = first * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            self._shard(shard)[0].madvise(
                mmap.MADV_WILLNEED, page, last * self.dtype.itemsize - page
            )

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields the shards with the ids `start` to `stop`, and the range within each."""
        shard = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[shard + 1])
            yield shard, start - self._starts[shard], end - self._starts[shard]
            start, shard = end, shard + 1

    def _open(self, shard: int) -> tuple[mmap.mmap, np.ndarray]:
        with self._files[shard].open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        pages.madvise(mmap.MADV_RANDOM)
        return pages, np.frombuffer(pages, self.dtype)


Tokens = TokenStream | Integer[np.ndarray, " tokens"]


def hash_ids(files: Iterable[pathlib.Path], dtype: np.dtype) -> str:
    """Returns the SHA-256 over the ids in all `files`, wherever they are cut. One-byte ids are hashed
    as two bytes.
    """
    hasher = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(_HASHED_BYTES):
                ids = np.frombuffer(block, dtype)
                hasher.update((ids.astype("<u2") if dtype.itemsize == 1 else ids).data)
    return hasher.hexdigest()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A token file's description.

    Attributes:
      source: files, titles or a dataset's name, for people.
      words: the text's words between white space.
      bytes: the text's bytes in UTF-8.
      unknown_words: <unk> tokens: words outside the dictionary, and `unk_in_text`.
      unk_in_text: words <unk> in the text itself.
      max_bytes: the limit at which the text was cut, -1 for none.
      dtype: the files' dtype: |u1, <u2 or <u4.
      sha256: `hash_ids`.
      description: identifies the text.
      revision: the hub's commit or TFDS's version, unless data.revision names it.
    """

    corpus: str
    split: str
    source: str
    tokens: int
    words: int
    bytes: int
    documents: int
    unknown_words: int
    unk_in_text: int
    max_bytes: int
    dtype: str
    sha256: str
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    boundary_id: int
    description: dict[str, Any]
    format_version: int = FORMAT_VERSION
    revision: str = ""

    @property
    def text_hash(self) -> str:
        """Twelve digits that identify the text up to its limit in result rows."""
        return content_key({"text": self.description, "max_bytes": self.max_bytes})[:12]

    @property
    def identity(self) -> dict[str, Any]:
        """Entries that are equal for equal tokens only. Their names have the split."""
        return {
            f"{self.split}'s {key}": getattr(self, key)
            for key in ("sha256", "tokenizer_fingerprint", "tokens")
        }


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A split's ids, read from disk as they are used."""

    tokens: TokenStream  # uint8, uint16 or uint32
    manifest: Manifest
    directory: pathlib.Path

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that made the ids."""
        return load_tokenizer(
            self.directory / "tokenizer", f"delete {self.directory} and run again"
        )


def shard_file(index: int) -> str:
    """Returns a shard's file name."""
    return f"tokens-{index:05d}.bin"


def write_manifest(folder: pathlib.Path, manifest: Manifest, shards: Sequence[int]) -> None:
    """Writes manifest.json. `shards`: the ids in each."""
    fields = dataclasses.asdict(manifest) | {"shards": list(shards)}
    text = json.dumps(fields | {"checksum": content_key(fields)}, indent=2, ensure_ascii=False)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def load(directory: str | os.PathLike, *, verify: bool = True) -> TokenFile:
    """Opens a token file. Raises ValueError if it was truncated, altered or damaged.

    `verify`: compare its hash, once a process, unless it is larger than `VERIFY_BYTES`.
    """
    folder = pathlib.Path(directory)
    try:
        fields = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if fields.pop("checksum") != content_key(fields):
            raise ValueError("manifest.json was altered")
        sizes = fields.pop("shards")
        manifest, dtype = Manifest(**fields), np.dtype(fields["dtype"])
        files = [folder / shard_file(index) for index in range(len(sizes))]
        for file, size in zip(files, sizes, strict=True):
            if (got := file.stat().st_size) != size * dtype.itemsize:
                raise ValueError(
                    f"{file.name} has {got:,} bytes and needs {size * dtype.itemsize:,}"
                )
        if verify and manifest.tokens * dtype.itemsize <= VERIFY_BYTES:
            states = tuple((file, file.stat().st_mtime_ns) for file in files)
            if _hash_once(states, dtype) != manifest.sha256:
                raise ValueError("the SHA-256 of its ids is not that of manifest.json")
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the token file in {folder} is damaged ({error}); delete that directory and run again"
        ) from error
    return TokenFile(TokenStream(files, sizes, dtype), manifest, folder)


@functools.cache
def _hash_once(states: tuple[tuple[pathlib.Path, int], ...], dtype: np.dtype) -> str:
    """Returns `hash_ids` for files with these change times."""
    return hash_ids((file for file, _ in states), dtype)
