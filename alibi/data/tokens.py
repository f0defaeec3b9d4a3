"""Token files: a split of a corpus as ids on disk, memory-mapped, with a manifest of what they are."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_collections
import numpy as np
import tokenizers as hf

from alibi.data.cache import cache_root, content_key, file_sha256, find_or_make
from alibi.data.corpora import make_corpus
from alibi.data.pieces import SPLITS, Corpus, Piece, read_split
from alibi.data.textfiles import TextFiles
from alibi.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer

FORMAT_VERSION = 2  # of token files
TOKENIZER_FORMAT_VERSION = 1
# Below this many bytes a token file is hashed when a process first opens it; above, only its size is checked.
VERIFY_BYTES = 1 << 30  # WikiText-103 has 0.4 GB; hashing takes about a second
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
    dtype: str  # of the file: <u2 or <u4
    sha256: str  # of the file
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

    tokens: np.memmap  # 1-D, uint16 or uint32
    manifest: Manifest
    directory: pathlib.Path

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return load_tokenizer(self.directory / "tokenizer", f"delete {self.directory} and run again")


def check_sources(data: ml_collections.ConfigDict, splits: Iterable[str]) -> None:
    """Raises ValueError where the text of one of `splits` is named but not there; cheap, so for before `prepare`."""
    corpus = make_corpus(data)
    for split in splits:
        if data[split]:
            corpus.source(split)


def prepare(
    data: ml_collections.ConfigDict, split: str, tokenizer: Tokenizer | None = None, *, progress: bool = True
) -> TokenFile:
    """Finds or makes the token file of `split` ("train", "valid" or "test") of the config section `data`.

    `tokenizer`: one that exists, such as that of a trained run, in place of the config's. `progress` shows a bar on
    stderr while it is made. Raises ValueError for a corpus that can't be read, is empty, or a cache that can't be
    written.
    """
    corpus = make_corpus(data)
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; use one of {', '.join(SPLITS)}")
    if not data[split]:
        # What a run was trained with stays as it is, the text that it would be tested on too.
        remedy = "set it" if split == "train" else f"train with data.{split}=..., or score a file by --text_file"
        raise ValueError(f"the config names no {split} text: data.{split} is empty; {remedy}")
    max_bytes = data.max_train_bytes if split == "train" else data.max_valid_bytes
    tokenizer = tokenizer or _find_tokenizer(data, corpus, progress)
    return _find_or_make(corpus, split, max_bytes, tokenizer, cache_root(data.cache_dir), progress)


def prepare_text(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    tokenizer: Tokenizer,
    cache_dir: str | os.PathLike = "",
    *,
    progress: bool = True,
) -> TokenFile:
    """The token file of a user's own text: a path, a comma-separated string with globs, or a list of paths."""
    place = os.fspath(paths) if isinstance(paths, str | os.PathLike) else list(paths)
    if not place:
        raise ValueError("no text file is named; give a path, a glob or a comma-separated list of them")
    return _find_or_make(TextFiles({"file": place}), "file", -1, tokenizer, cache_root(cache_dir), progress)


def load(directory: str | os.PathLike) -> TokenFile:
    """Opens a token file; ValueError when it was truncated, altered or damaged since it was made."""
    folder = pathlib.Path(directory)
    try:
        manifest = Manifest(**json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
        status = (folder / "tokens.bin").stat()
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"the token file in {folder} is damaged ({error}); {_MADE_AGAIN}") from error
    needed = manifest.tokens * np.dtype(manifest.dtype).itemsize
    if status.st_size != needed:
        raise ValueError(
            f"{folder / 'tokens.bin'} has {status.st_size:,} bytes, but its manifest says {needed:,}: "
            f"it was truncated or altered; {_MADE_AGAIN}"
        )
    if needed <= VERIFY_BYTES:
        _verify(folder, manifest.sha256, status.st_mtime_ns)
    tokens = np.memmap(folder / "tokens.bin", dtype=manifest.dtype, mode="r")
    return TokenFile(tokens, manifest, folder)


@functools.cache
def _verify(folder: pathlib.Path, sha256: str, changed_ns: int) -> None:
    """Once a process and state of the file: its hash must be the manifest's."""
    if file_sha256(folder / "tokens.bin") != sha256:
        raise ValueError(f"{folder / 'tokens.bin'} was altered: its SHA-256 is not its manifest's; {_MADE_AGAIN}")


def _find_tokenizer(data: ml_collections.ConfigDict, corpus: Corpus, progress: bool) -> Tokenizer:
    """`make_tokenizer`, but one that is made from text is kept in the cache."""
    if data.tokenizer not in ("words", "bpe") or data.tokenizer_file:
        return make_tokenizer(data, corpus)
    content = {"format": TOKENIZER_FORMAT_VERSION, "train": corpus.description("train")}
    content |= {"max_bytes": data.max_train_bytes, "tokenizer": data.tokenizer}
    if data.tokenizer == "bpe":
        content |= {"vocab_size": data.bpe_vocab_size, "library": hf.__version__}
    directory = cache_root(data.cache_dir) / "tokenizers" / content_key(content)

    def write(folder: pathlib.Path) -> None:
        tokenizer = make_tokenizer(data, corpus, progress=progress)
        tokenizer.revision = corpus.revision
        tokenizer.save(folder)

    find_or_make(directory, write)
    return load_tokenizer(directory, f"delete {directory} and run again")


def _find_or_make(
    corpus: Corpus, split: str, max_bytes: int, tokenizer: Tokenizer, root: pathlib.Path, progress: bool
) -> TokenFile:
    description, fingerprint = corpus.description(split), tokenizer.fingerprint()
    content = {"format": FORMAT_VERSION, "text": description, "split": split, "max_bytes": max_bytes}
    directory = root / "tokens" / content_key(content | {"tokenizer": fingerprint})

    def write(folder: pathlib.Path) -> None:
        tokenizer.save(folder / "tokenizer")
        pieces = read_split(corpus, split, max_bytes, progress=progress)
        counts = _write_tokens(folder / "tokens.bin", pieces, tokenizer)
        if not counts["bytes"]:
            raise ValueError(f"{corpus.source(split)} is empty: it has no text to make tokens of; check data.{split}")
        manifest = Manifest(
            corpus=corpus.name,
            split=split,
            source=corpus.source(split),
            max_bytes=max_bytes,
            tokenizer=tokenizer.name,
            tokenizer_fingerprint=fingerprint,
            vocab_size=tokenizer.vocab_size,
            boundary_id=tokenizer.boundary_id,
            description=description,
            revision=corpus.revision,
            **counts,
        )
        text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
        (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")

    find_or_make(directory, write)
    return load(directory)


def _write_tokens(path: pathlib.Path, pieces: Iterable[Piece], tokenizer: Tokenizer) -> dict[str, Any]:
    """Writes the ids and returns what the manifest says of them; memory is bounded by a few pieces."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    counts: dict[str, Any] = {"tokens": 0, "words": 0, "bytes": 0, "documents": 0, "unknown_words": 0, "unk_in_text": 0}
    hasher = hashlib.sha256()
    with path.open("wb") as stream:
        for ids in tokenizer.encode_stream(_count(pieces, counts)):
            block = ids.astype(dtype).tobytes()
            hasher.update(block)
            stream.write(block)
            counts["tokens"] += len(ids)
            if tokenizer.unknown_id is not None:
                counts["unknown_words"] += int(np.count_nonzero(ids == tokenizer.unknown_id))
        stream.flush()
        os.fsync(stream.fileno())
    return counts | {"dtype": dtype.str, "sha256": hasher.hexdigest()}


def _count(pieces: Iterable[Piece], counts: dict[str, Any]) -> Iterator[Piece]:
    for piece in pieces:
        words = piece.text.split()
        counts["bytes"] += len(piece.text.encode("utf-8"))
        counts["words"] += len(words)
        counts["unk_in_text"] += words.count("<unk>")
        counts["documents"] += piece.ends_document
        yield piece
