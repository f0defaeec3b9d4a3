"""Token files: a split's file is found in the cache by content, or made there."""

import os
import pathlib
from collections.abc import Iterable

from alibi.config import DataConfig
from alibi.data.corpus import REGISTRY, SHARD_BYTES, SPLITS, Corpus
from alibi.data.shards import Making
from alibi.data.tokenfile import TokenFile
from alibi.data.tokenizers import Tokenizer, bpe, given_tokenizer, load_tokenizer, make_tokenizer
from alibi.storage.cache import cache_root, content_key, find_or_make
from alibi.storage.files import local_path


def check_paths(data: DataConfig) -> None:
    """Raises ValueError if a key in the config section `data` names an address."""
    for key, value in vars(data).items():
        if isinstance(value, str):
            local_path(value, f"data.{key}")


def make_corpus(data: DataConfig) -> Corpus:
    """Returns the corpus that the config section `data` names. Reads nothing yet.

    Raises ValueError for an unknown corpus or option, or another corpus's key.
    """
    kind: type[Corpus] = REGISTRY.load(data.corpus)
    if data.document_end != "file" and not kind.splits_are_files:
        raise ValueError(
            f"data.document_end={data.document_end} needs corpus=text: other corpora have a document a row; "
            "set it to file"
        )
    if data.isolate_documents and data.tokenizer != "bpe" and not kind.tokens_have_ends:
        raise ValueError(
            f"data.isolate_documents={data.isolate_documents} needs the ends of documents among the tokens, which "
            f"data.tokenizer={data.tokenizer} does not write; use bpe, or leave it empty"
        )
    made: Corpus = REGISTRY.make(data.corpus, data.options, data, data=data)
    return made


def check_sources(data: DataConfig, splits: Iterable[str]) -> None:
    """Raises ValueError if `prepare` would refuse the options, or a split's text is missing. It is cheap.

    Text may be missing if its tokens are in the cache.
    """
    check_paths(data)
    corpus, tokenizer = make_corpus(data), given_tokenizer(data)
    if tokenizer is None and _tokenizer_directory(data, corpus).is_dir():
        tokenizer = find_tokenizer(data, corpus)

    def is_cached(split: str) -> bool:
        return tokenizer is not None and _making(data, corpus, split, tokenizer).directory.is_dir()

    corpus.check([split for split in splits if data[split] and not is_cached(split)])


def prepare(
    data: DataConfig,
    split: str,
    tokenizer: Tokenizer | None = None,
    *,
    progress: bool = True,
    workers: int = 1,
) -> TokenFile:
    """Finds or makes a split's token file ("train", "valid" or "test") for the config section `data`.

    Args:
      tokenizer: replaces the config's, for example with a trained run's.
      progress: show a bar on stderr.
      workers: processes that make it.

    Raises:
      ValueError: an unreadable or empty corpus, or an unwritable cache.
    """
    corpus = make_corpus(data)
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; use one of {', '.join(SPLITS)}")
    if not data[split]:
        # The config of a trained run stays as it is.
        remedy = (
            "set it"
            if split == "train"
            else f"train with data.{split}=..., or score a file by --text_file"
        )
        raise ValueError(f"the config names no {split} text: data.{split} is empty; {remedy}")
    tokenizer = tokenizer or find_tokenizer(data, corpus, progress)
    return _making(data, corpus, split, tokenizer).find_or_make(workers, progress=progress)


def prepare_text(
    corpus: Corpus,
    tokenizer: Tokenizer,
    cache_dir: str | os.PathLike = "",
    *,
    progress: bool = True,
) -> TokenFile:
    """Finds or makes the token file for a user's own text, the split "file" in `corpus`."""
    making = Making(corpus, "file", -1, tokenizer, SHARD_BYTES, cache_dir)
    return making.find_or_make(progress=progress)


def _making(data: DataConfig, corpus: Corpus, split: str, tokenizer: Tokenizer) -> Making:
    limit = data.max_train_bytes if split == "train" else data.max_valid_bytes
    return Making(corpus, split, limit, tokenizer, SHARD_BYTES, data.cache_dir)


def _tokenizer_directory(data: DataConfig, corpus: Corpus) -> pathlib.Path:
    """Returns the cache's directory for a tokenizer made from text."""
    content = {
        "train": corpus.cached_as("train"),
        "max_bytes": data.max_train_bytes,
        "tokenizer": data.tokenizer,
    }
    if data.tokenizer == "bpe":
        sample = data.tokenizer_train_bytes
        content |= {
            "vocab_size": data.bpe_vocab_size,
            "library": bpe.library().__version__,
            "sample_bytes": sample,
        }
    return cache_root(data.cache_dir) / "tokenizers" / content_key(content)


def find_tokenizer(data: DataConfig, corpus: Corpus, progress: bool = False) -> Tokenizer:
    """Returns the tokenizer for `data`. The cache keeps one made from text."""
    if tokenizer := given_tokenizer(data):
        return tokenizer
    directory = _tokenizer_directory(data, corpus)
    find_or_make(
        directory, lambda folder: make_tokenizer(data, corpus, progress=progress).save(folder)
    )
    return load_tokenizer(directory, f"delete {directory} and run again")
