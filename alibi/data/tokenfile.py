"""A token file as it lies on disk: shards of ids, a manifest of what they are, and their tokenizer."""

import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import numpy as np

from alibi.data.cache import content_key
from alibi.data.making import shard_file
from alibi.data.stream import TokenStream, hash_ids
from alibi.data.tokenizers import Tokenizer, load_tokenizer

FORMAT_VERSION = 3  # since 3 the ids lie in shards, and those of bytes in one byte each
# Below this many bytes a token file is hashed when a process first opens it; above, only its size is checked.
VERIFY_BYTES = 1 << 30  # WikiText-103 has 0.4 GB; hashing takes about a second
CHECKSUM = "checksum"  # in the manifest, of all else in it; older ones have none
_MADE_AGAIN = "delete that directory and run again"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a token file holds."""

    corpus: str
    split: str
    source: str  # for people: files, titles or a dataset's name
    tokens: int
    words: int  # between white space
    bytes: int  # of the text in UTF-8
    documents: int
    unknown_words: int  # tokens that are <unk>: words that the dictionary lacks, and
    unk_in_text: int  # words of the text that are <unk> itself
    max_bytes: int  # the limit the text was cut at (-1: none)
    dtype: str  # of the files: |u1, <u2 or <u4
    sha256: str  # of the ids (`hash_ids`)
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    boundary_id: int
    description: dict[str, Any]  # what identifies the text
    format_version: int = FORMAT_VERSION
    # That the text was read at: the hub's commit or TFDS's version, where data.revision is not the same.
    revision: str = ""


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """The ids of a split, read from disk as they are used."""

    tokens: TokenStream  # uint8, uint16 or uint32
    manifest: Manifest
    directory: pathlib.Path

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return load_tokenizer(self.directory / "tokenizer", f"delete {self.directory} and run again")


def load(directory: str | os.PathLike, *, verify: bool = True) -> TokenFile:
    """Opens a token file; ValueError when it was truncated, altered or damaged since it was made.

    `verify`: also by its hash, once a process and if it has no more than `VERIFY_BYTES`.
    """
    folder = pathlib.Path(directory)
    try:
        fields = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if fields.pop(CHECKSUM, None) not in (None, content_key(fields)):
            raise ValueError("its manifest is not what was written")
        shards = fields.pop("shards", None) or [[fields["tokens"], fields["sha256"]]]  # older ones have one, unnamed
        manifest, dtype = Manifest(**fields), np.dtype(fields["dtype"])
        files = [folder / shard_file(number) for number in range(len(shards))]
        for file, (tokens, _) in zip(files, shards, strict=True):
            _check_size(file, tokens * dtype.itemsize)
        if verify and manifest.tokens * dtype.itemsize <= VERIFY_BYTES:
            states = tuple(
                (file, sha256, file.stat().st_mtime_ns) for file, (_, sha256) in zip(files, shards, strict=True)
            )
            _check_hashes(states, dtype)
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, _DamagedError):
            raise
        raise ValueError(f"the token file in {folder} is damaged ({error}); {_MADE_AGAIN}") from error
    return TokenFile(TokenStream(files, [tokens for tokens, _ in shards], dtype), manifest, folder)


class _DamagedError(ValueError):
    """A message that says all, to be told from what only a damaged manifest leads to."""


def _check_size(file: pathlib.Path, needed: int) -> None:
    if (got := file.stat().st_size) != needed:
        raise _DamagedError(
            f"{file} has {got:,} bytes, but its manifest says {needed:,}: it was truncated or altered; {_MADE_AGAIN}"
        )


@functools.cache
def _check_hashes(states: tuple[tuple[pathlib.Path, str, int], ...], dtype: np.dtype) -> None:
    """Checks, once a process and state of the files, that the hash of all up to the end of each is the manifest's."""
    found = hash_ids((file for file, _, _ in states), dtype)
    for (file, sha256, _), got in zip(states, found, strict=True):
        if got != sha256:
            raise _DamagedError(f"{file} was altered: its SHA-256 is not its manifest's; {_MADE_AGAIN}")
