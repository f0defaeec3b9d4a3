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
import tqdm

from alibi.data.cache import cache_root, content_key, find_or_make
from alibi.data.corpora import make_corpus
from alibi.data.pieces import SPLITS, Corpus, Piece, limit_bytes
from alibi.data.progress import WatchedCorpus, byte_bar
from alibi.data.textfiles import TextFiles
from alibi.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer

FORMAT_VERSION = 2  # of token files
TOKENIZER_FORMAT_VERSION = 1
# Below this many bytes a token file is hashed when a process first opens it; above, only its size is checked.
VERIFY_BYTES = 1 << 30  # WikiText-103 has 0.4 GB; hashing takes about a second


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
        return load_tokenizer(self.directory / "tokenizer", _made_again(self.directory))


def check_sources(data: ml_collections.ConfigDict, splits: Iterable[str]) -> None:
    """Raises ValueError where the text of one of `splits` is named but not there; cheap, so for before `prepare`."""
    corpus = make_corpus(data)
    for split in splits:
        if data[split]:
            corpus.source(split)


def prepare(data: ml_collections.ConfigDict, split: str, *, progress: bool = True) -> TokenFile:
    """Finds or makes the token file of `split` ("train", "valid" or "test") of the config section `data`.

    `progress` shows a bar on stderr while it is made. Raises ValueError for a
    corpus that can't be read, is empty, or a cache that can't be written.
    """
    corpus = make_corpus(data)
    return _prepare_split(data, corpus, split, _find_tokenizer(data, corpus, progress), progress)


def prepare_with(
    data: ml_collections.ConfigDict, split: str, tokenizer: Tokenizer, *, progress: bool = True
) -> TokenFile:
    """The same as `prepare`, with a tokenizer that exists, such as that of a trained run."""
    return _prepare_split(data, make_corpus(data), split, tokenizer, progress)


def prepare_text(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    tokenizer: Tokenizer,
    cache_dir: str | os.PathLike = "",
    *,
    progress: bool = True,
) -> TokenFile:
    """The token file of a user's own text: a path, a comma-separated string with globs, or a list of paths."""
    place = os.fspath(paths) if isinstance(paths, str | os.PathLike) else [os.fspath(path) for path in paths]
    if not place:
        raise ValueError("no text file is named; give a path, a glob or a comma-separated list of them")
    return _find_or_make(TextFiles({"file": place}), "file", tokenizer, -1, cache_root(cache_dir), progress)


def load(directory: str | os.PathLike) -> TokenFile:
    """Opens a token file; ValueError when it was truncated, altered or damaged since it was made."""
    folder = pathlib.Path(directory)
    try:
        manifest = Manifest(**json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
        status = (folder / "tokens.bin").stat()
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"the token file in {folder} is damaged ({error}); delete that directory and run again"
        ) from error
    needed = manifest.tokens * np.dtype(manifest.dtype).itemsize
    if status.st_size != needed:
        raise ValueError(
            f"{folder / 'tokens.bin'} has {status.st_size:,} bytes, but its manifest says {needed:,}: "
            "it was truncated or altered; delete that directory and run again"
        )
    if needed <= VERIFY_BYTES:
        _verify(folder, manifest.sha256, status.st_mtime_ns)
    tokens = np.memmap(folder / "tokens.bin", dtype=manifest.dtype, mode="r")
    return TokenFile(tokens, manifest, folder)


@functools.cache
def _verify(folder: pathlib.Path, sha256: str, changed_ns: int) -> None:
    """Once a process and state of the file: its hash must be the manifest's."""
    with (folder / "tokens.bin").open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
            raise ValueError(
                f"{folder / 'tokens.bin'} was altered: its SHA-256 is not its manifest's; "
                "delete that directory and run again"
            )


def _find_tokenizer(data: ml_collections.ConfigDict, corpus: Corpus, progress: bool) -> Tokenizer:
    """`make_tokenizer`, but one that is made from text is kept in the cache."""
    if data.tokenizer not in ("words", "bpe") or data.tokenizer_file:
        return make_tokenizer(data, corpus)
    content = {
        "format": TOKENIZER_FORMAT_VERSION,
        "train": corpus.description("train"),
        "max_bytes": data.max_train_bytes,
        "tokenizer": data.tokenizer,
    }
    if data.tokenizer == "bpe":
        content |= {"vocab_size": data.bpe_vocab_size, "library": hf.__version__}
    directory = cache_root(data.cache_dir) / "tokenizers" / content_key(content)
    read = WatchedCorpus(corpus, f"reading for {data.tokenizer}", data.max_train_bytes) if progress else corpus

    def write(folder: pathlib.Path) -> None:
        tokenizer = make_tokenizer(data, read)
        tokenizer.revision = corpus.revision
        tokenizer.save(folder)

    find_or_make(directory, write)
    return load_tokenizer(directory, _made_again(directory))


def _made_again(directory: pathlib.Path) -> str:
    return f"delete {directory} and run again"


def _prepare_split(
    data: ml_collections.ConfigDict, corpus: Corpus, split: str, tokenizer: Tokenizer, progress: bool
) -> TokenFile:
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; use one of {', '.join(SPLITS)}")
    if not data[split]:
        # What a run was trained with stays as it is, the text that it would be tested on too.
        remedy = "set it" if split == "train" else f"train with data.{split}=..., or score a file by --text_file"
        raise ValueError(f"the config names no {split} text: data.{split} is empty; {remedy}")
    max_bytes = data.max_train_bytes if split == "train" else data.max_valid_bytes
    return _find_or_make(corpus, split, tokenizer, max_bytes, cache_root(data.cache_dir), progress)


def _find_or_make(
    corpus: Corpus, split: str, tokenizer: Tokenizer, max_bytes: int, root: pathlib.Path, progress: bool
) -> TokenFile:
    description = corpus.description(split)
    key = content_key(
        {
            "format": FORMAT_VERSION,
            "text": description,
            "split": split,
            "max_bytes": max_bytes,
            "tokenizer": tokenizer.fingerprint(),
        }
    )
    directory = root / "tokens" / key

    def write(folder: pathlib.Path) -> None:
        tokenizer.save(folder / "tokenizer")
        counts = _write_tokens(folder / "tokens.bin", corpus, split, tokenizer, max_bytes, progress)
        manifest = Manifest(
            corpus=corpus.name,
            split=split,
            source=corpus.source(split),
            max_bytes=max_bytes,
            tokenizer=tokenizer.name,
            tokenizer_fingerprint=tokenizer.fingerprint(),
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


def _write_tokens(
    path: pathlib.Path, corpus: Corpus, split: str, tokenizer: Tokenizer, max_bytes: int, progress: bool
) -> dict[str, Any]:
    """Writes the ids and returns the manifest's counts; memory is bounded by a few pieces."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    counts: dict[str, Any] = {"tokens": 0, "words": 0, "bytes": 0, "documents": 0, "unknown_words": 0, "unk_in_text": 0}
    hasher = hashlib.sha256()
    bar = byte_bar(f"{corpus.name} {split}", corpus.size(split), max_bytes, visible=progress)
    with bar, path.open("wb") as stream:
        pieces = _count(limit_bytes(corpus.pieces(split), max_bytes), counts, bar)
        for ids in tokenizer.encode_stream(pieces):
            block = ids.astype(dtype).tobytes()
            hasher.update(block)
            stream.write(block)
            counts["tokens"] += len(ids)
            if tokenizer.unknown_id is not None:
                counts["unknown_words"] += int(np.count_nonzero(ids == tokenizer.unknown_id))
        stream.flush()
        os.fsync(stream.fileno())
    if not counts["bytes"]:
        raise ValueError(f"{corpus.source(split)} is empty: it has no text to make tokens of; check data.{split}")
    return counts | {"dtype": dtype.str, "sha256": hasher.hexdigest()}


def _count(pieces: Iterator[Piece], counts: dict[str, Any], bar: tqdm.tqdm) -> Iterator[Piece]:
    for piece in pieces:
        size = len(piece.text.encode("utf-8"))
        counts["bytes"] += size
        words = piece.text.split()
        counts["words"] += len(words)
        counts["unk_in_text"] += words.count("<unk>")
        counts["documents"] += piece.ends_document
        bar.update(size)
        yield piece
