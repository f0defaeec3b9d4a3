"""Text to token ids: bytes, words under the paper's dictionary rule, or byte-level BPE."""

import contextlib
import json
import os
from collections.abc import Sequence

from etils import epath

from alibi.config import DataConfig
from alibi.data.corpus import Corpus, limit_bytes, make_bar, watched
from alibi.data.tokenizers.base import SAVED, ByteTokenizer, Tokenizer
from alibi.data.tokenizers.bpe import (
    END_OF_TEXT,
    END_OF_TEXT_NAMES,
    MOST_IDS,
    BpeTokenizer,
    check_unknown,
    fitting,
    read_bpe,
    spaced,
    train_bpe,
)
from alibi.data.tokenizers.words import WordTokenizer, make_dictionary, read_dictionary
from alibi.storage.cache import file_sha256

__all__ = [
    "BpeTokenizer",
    "ByteTokenizer",
    "Tokenizer",
    "WordTokenizer",
    "given_tokenizer",
    "load_tokenizer",
    "make_dictionary",
    "make_tokenizer",
    "read_dictionary",
    "read_tokenizer",
    "train_bpe",
]

_KINDS: dict[str, type[Tokenizer]] = {
    "bytes": ByteTokenizer,
    "words": WordTokenizer,
    "bpe": BpeTokenizer,
}


def given_tokenizer(data: DataConfig) -> Tokenizer | None:
    """Returns the tokenizer that the config section `data` names, or None if it is made from text.

    Raises ValueError for an option that `data.tokenizer` does not use, or for another file.
    """
    if data.tokenizer_file and data.tokenizer == "bytes":
        raise ValueError(
            f"data.tokenizer_file={data.tokenizer_file} is not used by data.tokenizer=bytes; leave it empty, or set "
            "data.tokenizer to words (a dict.txt) or bpe (a tokenizer.json)"
        )
    sample = data.tokenizer_train_bytes
    if sample > 0 and (data.tokenizer != "bpe" or data.tokenizer_file):
        unused = (
            "data.tokenizer_file" if data.tokenizer_file else f"data.tokenizer={data.tokenizer}"
        )
        raise ValueError(
            f"data.tokenizer_train_bytes={sample} is not used with {unused}: only a BPE made from the train text "
            "reads a sample; set it to -1"
        )
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if not data.tokenizer_file:
        return None
    if data.tokenizer == "words":
        return WordTokenizer(read_dictionary(data.tokenizer_file))
    path = epath.Path(data.tokenizer_file).expanduser()
    if path.name == BpeTokenizer.file:
        with contextlib.suppress(ValueError):
            return load_tokenizer(path.parent)
    return read_tokenizer(path)


def read_tokenizer(
    path: str | os.PathLike, ends: Sequence[int] = (), rows: int = MOST_IDS
) -> BpeTokenizer:
    """Returns the tokenizer in a tokenizer.json or a SentencePiece model.

    Args:
      ends: an answer ends at these ids. One stands between documents: the one with a common name,
        else the first.
      rows: the model's rows for tokens.

    Raises:
      ValueError: another file, or one without a token between documents or for unknown text, or with
        more tokens than rows.
    """
    path = epath.Path(path).expanduser()
    tokenizer = fitting(read_bpe(path), rows, path)
    tokens = tokenizer.get_vocab()
    names = {token: name for name, token in tokens.items()}
    common = [name for name in END_OF_TEXT_NAMES if name in tokens]
    named = [names[end] for end in ends if end in names]
    boundaries = [name for name in common if name in named] or [*named, *common]
    if not boundaries:
        raise ValueError(
            f"{path} has no end-of-text token, which must stand between documents; add one of "
            f"{', '.join(END_OF_TEXT_NAMES)} to its vocabulary, or, of a model of the hub, eos_token_id to config.json"
        )
    check_unknown(tokenizer, tokens[boundaries[0]], path)
    return BpeTokenizer(tokenizer, boundaries[0], ends)


def make_tokenizer(data: DataConfig, corpus: Corpus, *, progress: bool = False) -> Tokenizer:
    """Returns the tokenizer that the config section `data` names, words or bpe, made from the train
    split of `corpus`. `progress` shows a bar on stderr.
    """
    limit, sample = data.max_train_bytes, data.tokenizer_train_bytes
    shown = limit if sample < 0 else sample if limit < 0 else min(sample, limit)
    pieces = (
        limit_bytes(corpus.pieces("train"), limit)
        if sample < 0
        else corpus.sample("train", limit, sample)
    )
    with make_bar(
        corpus, "train", shown, f"reading for {data.tokenizer}", progress=progress
    ) as bar:
        train = watched(pieces, bar)
        if data.tokenizer == "words":
            return WordTokenizer(make_dictionary(train))
        texts = (piece.text for piece in spaced(train))
        return BpeTokenizer(train_bpe(texts, data.bpe_vocab_size), END_OF_TEXT)


def load_tokenizer(
    directory: str | os.PathLike, remedy: str = "give the directory that a tokenizer's save() wrote"
) -> Tokenizer:
    """Returns the tokenizer that `save` wrote. Raises ValueError, with the `remedy`, if it is damaged."""
    folder = epath.Path(directory)
    try:
        saved = json.loads((folder / SAVED).read_text(encoding="utf-8"))
        name = saved["name"]
        file = folder / _KINDS[name].file
        # half a dictionary would be another one
        if name != "bytes" and file_sha256(file) != saved["sha256"]:
            raise ValueError(f"{file} was altered: its SHA-256 is not that of {SAVED}")
        if name == "words":
            return WordTokenizer(read_dictionary(file))
        if name == "bpe":
            return BpeTokenizer(read_bpe(file), saved["boundary"], saved.get("ends", ()))
        return ByteTokenizer()
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{folder} holds no saved tokenizer, or a damaged one ({error}); {remedy}"
        ) from error
