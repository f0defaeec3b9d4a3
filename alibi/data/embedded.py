"""The corpora that come with the project: its books, and these with keys that are told and asked for again."""

import functools
import hashlib
import json
import lzma
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_collections
import numpy as np

from alibi.data.pieces import Corpus, Piece, split_long

BOOKS = pathlib.Path(__file__).parent / "books"

# A key as it is told, and its question with the answer, which a model knows only from its context. Two signs that
# books hardly have: where whole sentences told and asked, small models found no key after 3,000 updates.
TOLD, ASKED = " #{}.", " ={}."
DIGITS = 5
MAX_GAP = 24  # bytes from a question to the next key


class Books(Corpus):
    """Whole public-domain books, packed inside the package (see alibi/data/books/README.md)."""

    name = "books"

    def pieces(self, split: str) -> Iterator[Piece]:
        """Each book as a document; ValueError when a packed file is damaged."""
        name = self._name(split)
        with lzma.open(BOOKS / f"{name}.txt.xz") as stream:
            for book in _index()[name]:
                try:
                    text = stream.read(book["bytes"])
                except (lzma.LZMAError, EOFError):
                    text = b""
                if hashlib.sha256(text).hexdigest() != book["sha256"]:
                    raise ValueError(
                        f"{BOOKS / name}.txt.xz is damaged at the book {book['title']!r} (its SHA-256 differs from "
                        "index.json); restore the file from version control or install the package again"
                    )
                yield from split_long(text)

    def description(self, split: str) -> dict[str, Any]:
        """The hashes of the books."""
        return {"corpus": self.name, "books": [book["sha256"] for book in _index()[self._name(split)]]}

    def source(self, split: str) -> str:
        """The titles."""
        return "books: " + "; ".join(book["title"] for book in _index()[self._name(split)])

    def size(self, split: str) -> int | None:
        """UTF-8 bytes of the books together."""
        return sum(book["bytes"] for book in _index()[self._name(split)])

    def _name(self, split: str) -> str:
        name = self._data[split]
        if name not in _index():
            raise ValueError(
                f"data.{split}={name!r} is no split of the embedded books; use one of {', '.join(_index())}"
            )
        return name


@functools.cache
def _index() -> dict[str, list[dict[str, Any]]]:
    return json.loads((BOOKS / "index.json").read_text(encoding="utf-8"))


class PassKeys(Books):
    """The embedded books with keys: a number is told, and asked for after up to `data.passkey_distance` bytes of text.

    Keys and places are drawn by the split and the number of the piece: the text is always the same.
    """

    name = "passkeys"

    def __init__(self, data: ml_collections.ConfigDict):
        super().__init__(data)
        self.distance = data.passkey_distance
        if self.distance < 1:
            raise ValueError(
                f"data.passkey_distance={self.distance} must be at least 1 byte with data.corpus=passkeys; it should "
                "leave room for key and question in a training sequence, as configs/passkey.py does"
            )

    def pieces(self, split: str) -> Iterator[Piece]:
        """Each book as a document, in which keys are told and asked for."""
        for number, piece in enumerate(super().pieces(split)):
            random = np.random.default_rng([number, *self._data[split].encode()])
            yield Piece(b"".join(with_keys(piece.utf8, self.distance, random)), piece.ends_document)

    def description(self, split: str) -> dict[str, Any]:
        return super().description(split) | {"keys": [TOLD, ASKED, DIGITS, MAX_GAP, self.distance]}

    def size(self, split: str) -> int | None:
        """Not known before the keys are in the text."""
        return None


def with_keys(text: bytes, distance: int, random: np.random.Generator) -> Iterator[bytes]:
    """The parts of `text` and between them, at spaces, in turn a key that is told and its question."""
    start = 0
    while True:
        key = draw_key(random)
        for sentence, farthest in ((TOLD, MAX_GAP), (ASKED, distance)):
            stop = text.find(b" ", start + random.integers(farthest + 1))
            if stop < 0:
                yield text[start:]
                return
            yield text[start:stop]
            yield sentence.format(key).encode()
            start = stop


def draw_key(random: np.random.Generator) -> str:
    """A key: `DIGITS` digits, none of them twice, so that each tells where in the key it stands."""
    return "".join(map(str, random.choice(10, DIGITS, replace=False)))
