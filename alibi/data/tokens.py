"""Token files by content: the file of a split is found in the cache, or made there."""

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Sequence

import tokenizers as hf

from alibi.config import DataConfig
from alibi.data.cache import cache_root, check_paths, claimed, content_key, find_or_make
from alibi.data.corpora import make_corpus
from alibi.data.corpus import SHARD_BYTES, SPLITS, Corpus
from alibi.data.shards import ALONE, Makers, Making, dtype_of
from alibi.data.textfiles import TextFiles
from alibi.data.tokenfile import FORMAT_VERSION, Manifest, TokenFile, hash_ids, load, shard_file, write_manifest
from alibi.data.tokenizers import Tokenizer, check_options, load_tokenizer, make_tokenizer


class UnfinishedError(ValueError):
    """This host has made its shards, and other hosts have not made theirs."""


def check_sources(data: DataConfig, splits: Iterable[str]) -> None:
    """Raises ValueError if `prepare` would refuse the options, or a split's text is missing; cheap.

    If the tokens are in the cache, their text need not be there.
    """
    check_paths(data)
    check_options(data)
    corpus = make_corpus(data)
    corpus.check([split for split in splits if data[split] and not _is_cached(data, corpus, split)])


def prepare(
    data: DataConfig,
    split: str,
    tokenizer: Tokenizer | None = None,
    *,
    progress: bool = True,
    makers: Makers = ALONE,
) -> TokenFile:
    """Finds or makes the token file of `split` ("train", "valid" or "test") of the config section `data`.

    Args:
      tokenizer: replaces the config's, for example by a trained run's.
      progress: show a bar on stderr.
      makers: each of several hosts calls this, with a shared cache directory.

    Raises:
      ValueError: an unreadable or empty corpus, or an unwritable cache.
      UnfinishedError: other hosts have not made their shards yet; the last host gets the file.
    """
    corpus = make_corpus(data)
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; use one of {', '.join(SPLITS)}")
    if not data[split]:
        # The config of a trained run stays as it is.
        remedy = "set it" if split == "train" else f"train with data.{split}=..., or score a file by --text_file"
        raise ValueError(f"the config names no {split} text: data.{split} is empty; {remedy}")
    tokenizer = tokenizer or _find_tokenizer(data, corpus, progress)
    return _find_or_make(_text(data, corpus, split, tokenizer), progress, makers)


def prepare_text(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    tokenizer: Tokenizer,
    cache_dir: str | os.PathLike = "",
    *,
    progress: bool = True,
) -> TokenFile:
    """Finds or makes the token file of a user's own text: a path, a comma-separated string with globs, or a list."""
    named = os.fspath(paths) if isinstance(paths, str | os.PathLike) else list(paths)
    if not named:
        raise ValueError("no text file is named; give a path, a glob or a comma-separated list of them")
    return _find_or_make(_Text(TextFiles({"file": named}), "file", -1, tokenizer, cache_dir), progress, ALONE)


@dataclasses.dataclass(frozen=True)
class _Text:
    """The text of a split, cut at `max_bytes` (-1: whole), its tokenizer, and the cache for its token file."""

    corpus: Corpus
    split: str
    max_bytes: int
    tokenizer: Tokenizer
    cache_dir: str | os.PathLike

    def directory(self) -> pathlib.Path:
        """Returns the place of the token file, which its content names."""
        content = {"format": FORMAT_VERSION, "text": self.corpus.description(self.split), "split": self.split}
        content |= {"max_bytes": self.max_bytes, "tokenizer": self.tokenizer.fingerprint()}
        return cache_root(self.cache_dir) / "tokens" / content_key(content)


def _text(data: DataConfig, corpus: Corpus, split: str, tokenizer: Tokenizer) -> _Text:
    limit = data.max_train_bytes if split == "train" else data.max_valid_bytes
    return _Text(corpus, split, limit, tokenizer, data.cache_dir)


def _made_tokenizer(data: DataConfig, corpus: Corpus) -> pathlib.Path | None:
    """Returns the place in the cache of the tokenizer of `data`; None if it is not made from text."""
    if data.tokenizer not in ("words", "bpe") or data.tokenizer_file:
        return None
    content = {"train": corpus.description("train"), "max_bytes": data.max_train_bytes, "tokenizer": data.tokenizer}
    if data.tokenizer == "bpe":
        sample = data.tokenizer_train_bytes
        content |= {"vocab_size": data.bpe_vocab_size, "library": hf.__version__, "sample_bytes": sample}
    return cache_root(data.cache_dir) / "tokenizers" / content_key(content)


def _find_tokenizer(data: DataConfig, corpus: Corpus, progress: bool = False) -> Tokenizer:
    """Returns `make_tokenizer`'s result; a tokenizer that is made from text is kept in the cache."""
    check_options(data)
    directory = _made_tokenizer(data, corpus)
    if directory is None:
        return make_tokenizer(data, corpus)
    find_or_make(directory, lambda folder: make_tokenizer(data, corpus, progress=progress).save(folder))
    return load_tokenizer(directory, f"delete {directory} and run again")


def _is_cached(data: DataConfig, corpus: Corpus, split: str) -> bool:
    """Returns whether the tokens of `split` are in the cache."""
    directory = _made_tokenizer(data, corpus)
    if directory is not None and not directory.is_dir():
        return False
    return _text(data, corpus, split, _find_tokenizer(data, corpus)).directory().is_dir()


def _find_or_make(text: _Text, progress: bool, makers: Makers) -> TokenFile:
    directory = text.directory()
    if directory.is_dir():
        return load(directory)
    shards = directory.with_name(f".{directory.name}.parts")  # until all of them are made
    making = Making(text.corpus, text.split, text.max_bytes, SHARD_BYTES, shards)
    total = 0
    with claimed(directory, f"-{makers.host}-of-{makers.hosts}" if makers.hosts > 1 else "") as alone:
        if not directory.is_dir():
            total = _make_shards(making, text.tokenizer, progress, makers, alone=alone and makers.hosts == 1)
    with claimed(directory):
        if not directory.is_dir():
            _assemble(making, text.tokenizer, directory, total)
    return load(directory, verify=False)


def _make_shards(making: Making, tokenizer: Tokenizer, progress: bool, makers: Makers, *, alone: bool) -> int:
    """Makes this host's shards and returns the number of all shards; keeps whole shards if it fails."""
    if alone:  # no other process writes here: half a file was left by a killed one
        for stale in making.folder.glob(".tokens*"):
            stale.unlink()
    try:
        find_or_make(making.folder / "tokenizer", tokenizer.save)
        return making.run(makers, tokenizer, progress=progress)
    except BaseException:
        if alone and not any(making.folder.glob("*.json")):
            shutil.rmtree(making.folder, ignore_errors=True)
        raise


def _assemble(making: Making, tokenizer: Tokenizer, directory: pathlib.Path, total: int) -> None:
    """Makes the token file `directory` from `total` shards; raises UnfinishedError if some are missing."""
    corpus, split, folder = making.corpus, making.split, making.folder
    files = [making.counts_file(number) for number in range(total)]
    if missing := sum(not file.exists() for file in files):
        raise UnfinishedError(f"{split}: {missing} of {total} shards are still to be made by other hosts, in {folder}")
    counts = [json.loads(file.read_text()) for file in files]
    if not sum(count["bytes"] for count in counts):
        shutil.rmtree(folder)
        raise ValueError(f"{corpus.source(split)} is empty: it has no text for tokens; check data.{split}")
    revisions = sorted({count.pop("revision") for count in counts})
    if len(revisions) > 1:
        raise ValueError(
            f"{corpus.source(split)} changed while its tokens were made: {' and '.join(revisions)}; "
            f"set data.revision to one of them, delete {folder} and run again"
        )
    dtype = dtype_of(tokenizer)
    manifest = Manifest(
        corpus=corpus.name,
        split=split,
        source=corpus.source(split),
        max_bytes=making.max_bytes,
        dtype=dtype.str,
        sha256=hash_ids((folder / shard_file(number) for number in range(total)), dtype),
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint(),
        vocab_size=tokenizer.vocab_size,
        boundary_id=tokenizer.boundary_id,
        description=corpus.description(split),
        revision=revisions[0],
        **{name: sum(count[name] for count in counts) for name in counts[0]},
    )
    write_manifest(folder, manifest, [count["tokens"] for count in counts])
    folder.replace(directory)
    for path in (*directory.glob("[0-9]*.json"), *directory.glob(".*")):
        path.unlink()
