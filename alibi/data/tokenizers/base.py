"""The contract for tokenizers, and the simplest one: bytes."""

import abc
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer

from alibi.data.corpus import Piece, split_long
from alibi.storage.cache import file_sha256

SAVED = "tokenizer_config.json"
UNFINISHED = "\ufffd"  # stands for the first bytes of a character, and for wrong bytes

Ids = Integer[np.ndarray, " tokens"]  # uint8 for bytes, else int32


class Tokenizer(abc.ABC):
    """A vocabulary, and the rule from text to ids."""

    name: str
    vocab_size: int
    # stands before the first token of a stream, and between documents (words: after each line)
    boundary_id: int
    ends: tuple[int, ...] = ()  # an answer ends at these ids
    file: str = ""  # the name of the vocabulary's file, if there is one
    bos_id: int | None = None  # the token that the tokenizer puts before a text
    # the ids that its template puts before a text and after it, such as [CLS] and [SEP]
    around: tuple[Sequence[int], Sequence[int]] = ((), ())
    unknown_id: int | None = None  # for words outside the vocabulary
    special_ids: Mapping[str, int] = {}  # by names, which a text spells instead
    # Whether a document cut at a `BORDER` has the same ids.
    cuts_documents: bool = True
    changes_text: bool = False  # before it becomes ids: case, ligatures or white space are lost

    @abc.abstractmethod
    def encode_stream(
        self, pieces: Iterable[Piece], *, after_open_line: bool = False
    ) -> Iterator[Ids]:
        """Yields successive documents' ids, a bounded number at a time.

        `after_open_line`: a document without a final line end precedes them in another stream.
        """

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the ids' text. Ids beyond the vocabulary, a model's padded rows, add nothing."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Returns the SHA-256 over everything that decides the ids."""

    def encode(self, text: str) -> Ids:
        """Returns a whole document's ids, with its closing boundary if the method has such."""
        return np.concatenate(
            [np.zeros(0, np.int32), *self.encode_stream(split_long(text.encode("utf-8")))]
        )

    def encode_open(self, text: str) -> list[int]:
        """Returns the ids for a document that goes on after `text`, without a boundary."""
        pieces = [Piece(text.encode("utf-8"), ends_document=False)]
        return np.concatenate([[], *self.encode_stream(pieces)]).astype(int).tolist()

    def encode_whole(self, text: str, name: str, token: int) -> list[int]:
        """Returns a text's ids in the tokenizer's template, with the special token `token` for its `name`."""
        first, *others = map(self.encode_open, text.split(name))
        before, after = self.around
        return [*before, *first, *(x for ids in others for x in (token, *ids)), *after]

    def encode_beginning(self, text: str) -> list[int]:
        """Returns the ids for a document that goes on after `text`, or the boundary for an empty text."""
        return self.encode_open(text) or [self.boundary_id]

    def save(self, directory: str | os.PathLike) -> None:
        """Makes `directory` and writes the files for `load_tokenizer`."""
        folder = pathlib.Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        saved = {"name": self.name} | self._write(folder)
        if self.file:
            saved["sha256"] = file_sha256(folder / self.file)
        (folder / SAVED).write_text(json.dumps(saved) + "\n", encoding="utf-8")

    def _write(self, folder: pathlib.Path) -> dict[str, Any]:
        """Writes the vocabulary, if there is one. Returns further entries for the saved JSON."""
        return {}


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: 256 ids. A newline separates documents, unless the first ends with a newline."""

    name = "bytes"
    vocab_size = 256
    boundary_id = 10

    def encode_stream(
        self, pieces: Iterable[Piece], *, after_open_line: bool = False
    ) -> Iterator[Ids]:
        """Yields the text's bytes, uint8."""
        line_is_open = after_open_line
        for piece in pieces:
            if line_is_open:
                yield np.array([self.boundary_id], np.uint8)
            yield np.frombuffer(piece.utf8, np.uint8)
            line_is_open = piece.leaves_line_open

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text with U+FFFD for bytes that aren't UTF-8."""
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """Returns a constant."""
        return hashlib.sha256(b"bytes").hexdigest()
