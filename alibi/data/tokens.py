"""Token files by content: those of a split of a corpus are found in the cache, or made there."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers as hf

from alibi.config import DataConfig
from alibi.data.cache import cache_root, check_paths, claimed, content_key, find_or_make
from alibi.data.corpora import make_corpus
from alibi.data.dictionary import make_dictionary
from alibi.data.making import ALONE, Makers, Making, count_in_workers, dtype_of, read_abouts, shard_file
from alibi.data.pieces import SHARD_BYTES, SPLITS, Corpus
from alibi.data.shared import SharedCache
from alibi.data.stream import hash_ids
from alibi.data.textfiles import TextFiles
from alibi.data.tokenfile import CHECKSUM, Manifest, TokenFile, load
from alibi.data.tokenizers import Tokenizer, WordTokenizer, check_options, load_tokenizer, make_tokenizer

# Part of what a directory is named by. Format 3 of token files has the same ids as format 2, which is found and read.
IDS_VERSION = 2
TOKENIZER_FORMAT_VERSION = 1


class UnfinishedError(ValueError):
    """The shards of this host are made, and those of others are not."""


def check_sources(data: DataConfig, splits: Iterable[str]) -> None:
    """Raises ValueError where `data` can't be made into tokens; cheap, so for before `prepare`.

    That is where options don't fit together, or the text of one of `splits` is named but not there. Of text whose
    tokens are in the cache nothing is fetched.
    """
    check_paths(data)
    SharedCache(data.cache_dir)
    check_options(data)
    corpus = make_corpus(data)
    corpus.check([split for split in splits if data[split] and not _is_made(data, corpus, split)])


def prepare(
    data: DataConfig,
    split: str,
    tokenizer: Tokenizer | None = None,
    *,
    progress: bool = True,
    makers: Makers = ALONE,
) -> TokenFile:
    """Finds or makes the token file of `split` ("train", "valid" or "test") of the config section `data`.

    Where data.cache_dir is an address the file is fetched from there to the local cache, or made here and put there.

    Args:
      tokenizer: one that exists, such as that of a trained run, in place of the config's.
      progress: show a bar on stderr while it is made.
      makers: of several hosts each calls this, with a cache directory that all of them see.

    Raises:
      ValueError: a corpus that can't be read or is empty, or a cache that can't be written.
      UnfinishedError: other hosts have not made their shards yet; the last one to do so gets the file.
    """
    corpus = make_corpus(data)
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; use one of {', '.join(SPLITS)}")
    if not data[split]:
        # What a run was trained with stays as it is, the text that it would be tested on too.
        remedy = "set it" if split == "train" else f"train with data.{split}=..., or score a file by --text_file"
        raise ValueError(f"the config names no {split} text: data.{split} is empty; {remedy}")
    if makers.hosts > 1 and SharedCache(data.cache_dir):
        raise ValueError(
            f"{makers.hosts} hosts make shards in one directory, and data.cache_dir={data.cache_dir} is an address; "
            "prepare on one host, from which the others fetch the files, or give a directory that all see"
        )
    tokenizer = tokenizer or _find_tokenizer(data, corpus, progress, makers.workers)
    place = _Place(corpus, split, _limit(data, split), tokenizer, data.cache_dir)
    return _find_or_make(place, progress, makers)


def prepare_text(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    tokenizer: Tokenizer,
    cache_dir: str | os.PathLike = "",
    *,
    progress: bool = True,
) -> TokenFile:
    """The token file of a user's own text: a path, a comma-separated string with globs, or a list of paths."""
    named = os.fspath(paths) if isinstance(paths, str | os.PathLike) else list(paths)
    if not named:
        raise ValueError("no text file is named; give a path, a glob or a comma-separated list of them")
    place = _Place(TextFiles({"file": named}), "file", -1, tokenizer, cache_dir)
    return _find_or_make(place, progress, ALONE)


def _limit(data: DataConfig, split: str) -> int:
    return data.max_train_bytes if split == "train" else data.max_valid_bytes


def _made_tokenizer(data: DataConfig, corpus: Corpus) -> pathlib.Path | None:
    """The place where the cache has, or will have, the tokenizer of `data`; None of one that isn't made from text."""
    if data.tokenizer not in ("words", "bpe") or data.tokenizer_file:
        return None
    content = {"format": TOKENIZER_FORMAT_VERSION, "train": corpus.description("train")}
    content |= {"max_bytes": data.max_train_bytes, "tokenizer": data.tokenizer}
    if data.tokenizer == "bpe":
        content |= {"vocab_size": data.bpe_vocab_size, "library": hf.__version__}
    if data.tokenizer_train_bytes > 0:
        content |= {"sample_bytes": data.tokenizer_train_bytes}
    return cache_root(data.cache_dir) / "tokenizers" / content_key(content)


def _find_tokenizer(data: DataConfig, corpus: Corpus, progress: bool = False, workers: int = 1) -> Tokenizer:
    """`make_tokenizer`, but one that is made from text is kept in the cache."""
    check_options(data)
    directory, shared = _made_tokenizer(data, corpus), SharedCache(data.cache_dir)
    if directory is None:
        return make_tokenizer(data, corpus)

    def write(folder: pathlib.Path) -> None:
        if data.tokenizer == "words" and workers > 1:
            counted = count_in_workers(corpus, "train", data.max_train_bytes, workers)
            tokenizer: Tokenizer = WordTokenizer(make_dictionary(counted))
        else:
            tokenizer = make_tokenizer(data, corpus, progress=progress)
        tokenizer.revision = corpus.revision
        tokenizer.save(folder)

    shared.fetch(directory)
    find_or_make(directory, write)
    shared.publish(directory)
    return load_tokenizer(directory, f"delete {directory} and run again")


def _is_made(data: DataConfig, corpus: Corpus, split: str) -> bool:
    """Whether the tokens of `split` are in the cache; its text need not be there then."""
    directory = _made_tokenizer(data, corpus)
    shared = SharedCache(data.cache_dir)
    if directory is not None and not directory.is_dir() and not shared.has(directory):
        return False
    place = _Place(corpus, split, _limit(data, split), _find_tokenizer(data, corpus), data.cache_dir)
    return place.directory.is_dir() or shared.has(place.directory)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A token file that is or will be in the cache, on this machine and, where `cache_dir` is an address, there."""

    corpus: Corpus
    split: str
    max_bytes: int
    tokenizer: Tokenizer
    cache_dir: str | os.PathLike

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        return self.corpus.description(self.split)

    @functools.cached_property
    def directory(self) -> pathlib.Path:
        content = {"format": IDS_VERSION, "text": self.description, "split": self.split, "max_bytes": self.max_bytes}
        key = content_key(content | {"tokenizer": self.tokenizer.fingerprint()})
        return cache_root(self.cache_dir) / "tokens" / key

    @property
    def parts(self) -> pathlib.Path:
        """The place of the shards as long as not all of them are made."""
        return self.directory.with_name(f".{self.directory.name}.parts")


def _find_or_make(place: _Place, progress: bool, makers: Makers) -> TokenFile:
    directory, shared = place.directory, SharedCache(place.cache_dir)
    made_before = directory.is_dir()
    shared.fetch(directory)
    if not directory.is_dir():
        own = f"-{makers.host}-of-{makers.hosts}" if makers.hosts > 1 else ""
        with claimed(directory, own) as alone:
            if not directory.is_dir():
                shards = _make_shards(place, progress, makers, alone=alone and makers.hosts == 1)
                if not own:
                    _assemble(place, *shards)
        if own:
            with claimed(directory):
                if not directory.is_dir():
                    _assemble(place, *shards)
    shared.publish(directory)
    return load(directory, verify=made_before)


def _make_shards(place: _Place, progress: bool, makers: Makers, *, alone: bool) -> tuple[Making, int]:
    """Makes this host's shards, and says how many there are; where that fails, those that are whole are kept."""
    parts = place.parts
    shards = Making(place.corpus, place.split, place.max_bytes, SHARD_BYTES, parts)
    if alone:  # so nobody is writing: what is half written was left by processes that were killed
        for stale in parts.glob(".tokens*"):
            stale.unlink()
    try:
        find_or_make(parts / "tokenizer", place.tokenizer.save)
        return shards, shards.run(makers, place.tokenizer, progress=progress)
    except BaseException:
        if alone and not any(parts.glob("*.json")):
            shutil.rmtree(parts, ignore_errors=True)
        raise


def _assemble(place: _Place, shards: Making, total: int) -> None:
    """Makes the directory of shards that are all there; UnfinishedError where some are not."""
    abouts = read_abouts(shards, total)
    if abouts is None:
        missing = sum(not shards.about(number).exists() for number in range(total))
        raise UnfinishedError(
            f"{place.split}: {missing} of {total} shards are still to be made by other hosts, in {place.parts}"
        )
    if not sum(about["bytes"] for about in abouts):
        shutil.rmtree(place.parts)
        raise ValueError(
            f"{place.corpus.source(place.split)} is empty: it has no text to make tokens of; check data.{place.split}"
        )
    hashes = list(hash_ids((place.parts / shard_file(number) for number in range(total)), dtype_of(place.tokenizer)))
    listed = [[about["tokens"], sha256] for about, sha256 in zip(abouts, hashes, strict=True)]
    manifest = dataclasses.asdict(_manifest(place, abouts, hashes[-1])) | {"shards": listed}
    text = json.dumps(manifest | {CHECKSUM: content_key(manifest)}, indent=2, ensure_ascii=False)
    (place.parts / "manifest.json").write_text(text + "\n", encoding="utf-8")
    place.parts.replace(place.directory)
    for path in (*place.directory.glob("[0-9]*.json"), *place.directory.glob(".*")):  # not needed, and not missed
        path.unlink()


def _manifest(place: _Place, abouts: Sequence[dict[str, Any]], sha256: str) -> Manifest:
    counted = ("tokens", "words", "bytes", "documents", "unknown_words", "unk_in_text")
    sums = {name: sum(about[name] for about in abouts) for name in counted}
    corpus, split, tokenizer = place.corpus, place.split, place.tokenizer
    return Manifest(
        corpus=corpus.name,
        split=split,
        source=corpus.source(split),
        max_bytes=place.max_bytes,
        dtype=dtype_of(tokenizer).str,
        sha256=sha256,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint(),
        vocab_size=tokenizer.vocab_size,
        boundary_id=tokenizer.boundary_id,
        description=place.description,
        revision=abouts[0]["revision"],
        **sums,
    )
