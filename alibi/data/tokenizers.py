"""Text to token ids: bytes, words by the paper's dictionary rule, or byte-level BPE."""

import abc
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tokenizers as hf
from jaxtyping import Integer

from alibi.config import DataConfig
from alibi.data.bpe import BATCH_CHARS, END_OF_TEXT, cut_chunks, find_end_of_text, read_bpe, train_bpe
from alibi.data.cache import file_sha256
from alibi.data.dictionary import SPECIALS, count_words, make_dictionary, read_dictionary, write_dictionary
from alibi.data.pieces import Corpus, Piece, limit_bytes, make_bar, split_long, watched

_SAVED = "tokenizer_config.json"

Ids = Integer[np.ndarray, " tokens"]  # uint8 of bytes, else int32


class Tokenizer(abc.ABC):
    """A vocabulary and how text becomes ids of it."""

    name: str
    vocab_size: int
    boundary_id: int  # stands before the first token of a stream, and between documents (words: after each line)
    file: str = ""  # that `save` writes the vocabulary to, where there is one
    unknown_id: int | None = None  # of words outside the vocabulary
    revision: str = ""  # `Corpus.revision` of the text that it was made from

    @abc.abstractmethod
    def encode_stream(self, pieces: Iterable[Piece], *, after_open_line: bool = False) -> Iterator[Ids]:
        """The ids of successive documents; memory stays bounded by the piece.

        `after_open_line`: whether a document without a line end at its end came before, in another stream.
        """

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the ids."""

    def encode(self, text: str) -> Ids:
        """The ids of one whole document, with the boundary that closes it where the method has one."""
        return np.concatenate([np.zeros(0, np.int32), *self.encode_stream(split_long(text.encode("utf-8")))])

    def save(self, directory: str | os.PathLike) -> None:
        """Writes what `load_tokenizer` needs into `directory`, which is made."""
        folder = pathlib.Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        about = {"name": self.name} | self._write(folder)
        if self.file:
            about["sha256"] = file_sha256(folder / self.file)
        if self.revision:
            about["revision"] = self.revision
        (folder / _SAVED).write_text(json.dumps(about) + "\n", encoding="utf-8")

    def _write(self, folder: pathlib.Path) -> dict[str, Any]:
        """Writes the vocabulary, where there is one; returns what else must be saved."""
        return {}


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: 256 ids. A newline separates documents, unless the first one ends in a newline already."""

    name = "bytes"
    vocab_size = 256
    boundary_id = 10

    def encode_stream(self, pieces: Iterable[Piece], *, after_open_line: bool = False) -> Iterator[Ids]:
        """The bytes of the text, uint8; that of one document holds nothing else."""
        line_is_open = after_open_line
        for piece in pieces:
            if line_is_open:
                yield np.array([self.boundary_id], np.uint8)
            yield np.frombuffer(piece.utf8, np.uint8)
            line_is_open = piece.leaves_line_open

    def decode(self, ids: Iterable[int]) -> str:
        """The text; bytes that aren't UTF-8 become U+FFFD."""
        return bytes(map(int, ids)).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """SHA-256 of the method's name."""
        return hashlib.sha256(b"bytes").hexdigest()


class _Known(dict[str, int]):
    """Ids by word; of one that it lacks the unknown id: looked up without a call of Python for each word."""

    def __missing__(self, word: str) -> int:
        return WordTokenizer.unknown_id


class WordTokenizer(Tokenizer):
    """Words between white space by a fixed dictionary, `</s>` after every line (arXiv 2108.12409; fairseq)."""

    name = "words"
    file = "dict.txt"
    boundary_id = SPECIALS.index("</s>")
    unknown_id = SPECIALS.index("<unk>")

    def __init__(self, counts: dict[str, int]):
        """`counts` by symbol: the whole dictionary in the order of its ids, specials first."""
        self.counts, self.symbols, self.vocab_size = counts, list(counts), len(counts)
        self._ids = _Known((symbol, i) for i, symbol in enumerate(counts))

    def encode_stream(self, pieces: Iterable[Piece], *, after_open_line: bool = False) -> Iterator[Ids]:
        """The words of each line, then `</s>`, blank lines and the last line included; unknown words are `<unk>`."""
        for piece in pieces:
            text = piece.text.replace("\n", " </s> ")
            if piece.leaves_line_open:
                text += " </s>"
            yield np.array(list(map(self._ids.__getitem__, text.split())), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """The words with one space between them, and a line end for each `</s>`."""
        text = " ".join("\n" if i == self.boundary_id else self.symbols[i] for i in ids)
        return text.replace(" \n", "\n").replace("\n ", "\n")

    def fingerprint(self) -> str:
        """SHA-256 of the symbols in their order."""
        return hashlib.sha256("\n".join(["words", *self.symbols]).encode("utf-8")).hexdigest()

    def _write(self, folder: pathlib.Path) -> dict[str, Any]:
        write_dictionary(folder / self.file, self.counts)
        return {}


class BpeTokenizer(Tokenizer):
    """A tokenizer of Hugging Face's `tokenizers`; each document is followed by its end-of-text token."""

    name = "bpe"
    file = "tokenizer.json"

    def __init__(self, tokenizer: hf.Tokenizer, boundary: str):
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if boundary not in vocabulary:
            raise ValueError(
                f"the tokenizer has no token {boundary!r} to stand between documents; add it or make another"
            )
        # Text that spells a special token is text: documents must not be able to forge a boundary.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._boundary = tokenizer, boundary
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.boundary_id = vocabulary[boundary]

    def encode_stream(self, pieces: Iterable[Piece], *, after_open_line: bool = False) -> Iterator[Ids]:
        """The tokens of each document, then the boundary; cut only where byte-level BPE cuts anyway."""
        rest, size = "", 0
        waiting: list[str | None] = []
        for piece in pieces:
            rest += piece.text
            chunks, rest = cut_chunks(rest, piece.ends_document)
            waiting += [*chunks, None] if piece.ends_document else chunks
            size += sum(map(len, chunks)) + 1  # an empty document takes room too
            if size >= BATCH_CHARS:
                yield from self._encode(waiting)
                waiting, size = [], 0
        yield from self._encode([*waiting, *cut_chunks(rest, True)[0]])  # a shard may end within a document

    def _encode(self, chunks: list[str | None]) -> Iterator[Ids]:
        """The tokens of each chunk, those of many on all cores at a time; the boundary for each None."""
        texts = [chunk for chunk in chunks if chunk is not None]
        encodings = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for chunk in chunks:
            yield np.array([self.boundary_id] if chunk is None else next(encodings).ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text, boundaries spelt out."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's JSON and its boundary."""
        return hashlib.sha256(f"{self._boundary}\n{self._tokenizer.to_str()}".encode()).hexdigest()

    def _write(self, folder: pathlib.Path) -> dict[str, Any]:
        self._tokenizer.save(str(folder / self.file))
        return {"boundary": self._boundary}


_KINDS: dict[str, type[Tokenizer]] = {"bytes": ByteTokenizer, "words": WordTokenizer, "bpe": BpeTokenizer}


def check_options(data: DataConfig) -> None:
    """Raises ValueError for an unknown `data.tokenizer`, or an option that is set and that it doesn't use."""
    if data.tokenizer_file and data.tokenizer == "bytes":
        raise ValueError(
            f"data.tokenizer_file={data.tokenizer_file} is not used by data.tokenizer=bytes; leave it empty, or set "
            "data.tokenizer to words (a dict.txt) or bpe (a tokenizer.json)"
        )
    sample = data.tokenizer_train_bytes
    if sample > 0 and (data.tokenizer != "bpe" or data.tokenizer_file):
        unused = "data.tokenizer_file" if data.tokenizer_file else f"data.tokenizer={data.tokenizer}"
        raise ValueError(
            f"data.tokenizer_train_bytes={sample} is not used with {unused}: only a BPE that is made from the train "
            "text has a sample of it; set it to -1"
        )


def given_tokenizer(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of the config section `data`; None where it is made from text. ValueError as `make_tokenizer`."""
    check_options(data)
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if not data.tokenizer_file:
        return None
    if data.tokenizer == "words":
        return WordTokenizer(read_dictionary(data.tokenizer_file))
    path = pathlib.Path(data.tokenizer_file).expanduser()
    tokenizer = read_bpe(path)
    return BpeTokenizer(tokenizer, find_end_of_text(tokenizer, path))


def make_tokenizer(data: DataConfig, corpus: Corpus, *, progress: bool = False) -> Tokenizer:
    """The tokenizer of the config section `data`, made from the corpus's train split unless a file is given.

    `progress` shows a bar on stderr while that is read. Raises ValueError for options that don't fit together or a
    `data.tokenizer_file` that doesn't fit.
    """
    if tokenizer := given_tokenizer(data):
        return tokenizer
    limit, sample = data.max_train_bytes, data.tokenizer_train_bytes
    shown = limit if sample < 0 else sample if limit < 0 else min(sample, limit)
    pieces = limit_bytes(corpus.pieces("train"), limit) if sample < 0 else corpus.sample("train", limit, sample)
    with make_bar(corpus, "train", shown, f"reading for {data.tokenizer}", progress=progress) as bar:
        train = watched(pieces, bar)
        if data.tokenizer == "words":
            return WordTokenizer(make_dictionary(count_words(train)))
        return BpeTokenizer(train_bpe((piece.text for piece in train), data.bpe_vocab_size), END_OF_TEXT)


def load_tokenizer(
    directory: str | os.PathLike, remedy: str = "give the directory that a tokenizer's save() wrote"
) -> Tokenizer:
    """The tokenizer that `save` wrote into `directory`; ValueError, with `remedy`, when it isn't there or damaged."""
    folder = pathlib.Path(directory)
    try:
        saved = json.loads((folder / _SAVED).read_text(encoding="utf-8"))
        name = saved.get("name") if isinstance(saved, dict) else None
        if name not in _KINDS:
            raise ValueError(f"{_SAVED} gives name={name!r}; it must be one of {', '.join(_KINDS)}")
        file = folder / _KINDS[name].file
        # A dictionary that was cut short would still be one. Older versions saved no hash.
        if "sha256" in saved and file_sha256(file) != saved["sha256"]:
            raise ValueError(f"{file} was altered or damaged: its SHA-256 is not that of {_SAVED}")
        tokenizer: Tokenizer = ByteTokenizer()
        if name == "words":
            tokenizer = WordTokenizer(read_dictionary(file))
        elif name == "bpe":
            tokenizer = BpeTokenizer(read_bpe(file), saved.get("boundary", ""))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder} holds no saved tokenizer, or a damaged one ({error}); {remedy}") from error
    tokenizer.revision = saved.get("revision", "")
    return tokenizer
