"""The package's books, plain or with passkeys, and prompts with a passkey each."""

import functools
import json
import lzma
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from alibi.config import DataConfig
from alibi.data.corpus import Corpus, Piece, split_long

BOOKS = pathlib.Path(__file__).parent / "books"

# A key as the text states it, and the question with the answer, which a model knows from its
# context alone. Both begin with signs that are rare in books: with whole sentences, small models
# found no key after 3,000 updates.
STATEMENT, QUESTION = " #{}.", " ={}."
DIGITS = 5
MAX_GAP = 24  # bytes at most from a question to the next key
BEFORE_KEY = STATEMENT.index("{")  # bytes of the statement before its key
LEAST_DISTANCE = 32  # the smallest distance that is measured, a power of two
NEAREST = DIGITS + 1 + QUESTION.index("{")  # the distance without text between key and question


class Books(Corpus):
    """Whole public-domain books, packed inside the package (see alibi/data/books/README.md)."""

    name = "books"

    def pieces(self, split: str) -> Iterator[Piece]:
        """Yields each book as a document."""
        books = self._books(split)
        with lzma.open(BOOKS / f"{self._data[split]}.txt.xz") as stream:
            for book in books:
                yield from split_long(stream.read(book["bytes"]))

    def description(self, split: str) -> dict[str, Any]:
        """Returns the books' hashes."""
        return {"corpus": self.name, "books": [book["sha256"] for book in self._books(split)]}

    def source(self, split: str) -> str:
        """Returns the titles."""
        return "books: " + "; ".join(book["title"] for book in self._books(split))

    def size(self, split: str) -> int | None:
        """Returns the books' UTF-8 bytes."""
        return sum(book["bytes"] for book in self._books(split))

    def _books(self, split: str) -> list[dict[str, Any]]:
        name = self._data[split]
        if name not in _index():
            raise ValueError(
                f"data.{split}={name!r} is no split of the embedded books, {', '.join(_index())}; to read files, set "
                "data.corpus=text"
            )
        return _index()[name]


@functools.cache
def _index() -> dict[str, list[dict[str, Any]]]:
    return json.loads((BOOKS / "index.json").read_text(encoding="utf-8"))


class PassKeys(Books):
    """The books with passkeys: a number, and its question up to `data.passkey_distance` bytes later.

    Keys and places depend on the split and the piece alone, so the text is always the same. The task
    follows Mohtashami & Jaggi 2023 (arXiv 2305.16300), where repeated sentences surround the key.
    """

    name = "passkeys"

    def __init__(self, data: DataConfig):
        super().__init__(data)
        self.distance = data.passkey_distance
        if self.distance < 1:
            raise ValueError(
                f"data.passkey_distance={self.distance} must be at least 1 byte with data.corpus=passkeys; it should "
                "leave room for key and question in a training sequence, as configs/passkey.py does"
            )

    def pieces(self, split: str) -> Iterator[Piece]:
        """Yields each book as a document with keys and questions."""
        for index, piece in enumerate(super().pieces(split)):
            random = np.random.default_rng([index, *self._data[split].encode()])
            yield Piece(
                b"".join(_with_keys(piece.utf8, self.distance, random)), piece.ends_document
            )

    def description(self, split: str) -> dict[str, Any]:
        """Returns the books' hashes and the keys' form."""
        return super().description(split) | {
            "keys": [STATEMENT, QUESTION, DIGITS, MAX_GAP, self.distance]
        }

    def size(self, split: str) -> int | None:
        """Returns None: how many keys there are is unknown before they are drawn."""
        return None


def _with_keys(text: bytes, distance: int, random: np.random.Generator) -> Iterator[bytes]:
    """Yields the text, and at spaces in it in turn a key and its question."""
    start = 0
    while True:
        key = _draw_key(random)
        for sentence, farthest in ((STATEMENT, MAX_GAP), (QUESTION, distance)):
            stop = text.find(b" ", start + random.integers(farthest + 1))
            if stop < 0:
                yield text[start:]
                return
            yield text[start:stop]
            yield sentence.format(key).encode()
            start = stop


def _draw_key(random: np.random.Generator) -> str:
    """Returns `DIGITS` different digits: each shows its place in the key."""
    return "".join(map(str, random.choice(10, DIGITS, replace=False)))


def distances(length: int) -> list[int]:
    """Returns the distances to measure in windows of `length` tokens: powers of two from
    `LEAST_DISTANCE` on.
    """
    powers = range(LEAST_DISTANCE.bit_length() - 1, length.bit_length())
    return [1 << power for power in powers if 1 << power <= _farthest(length)]


def _farthest(length: int) -> int:
    return length + 1 - DIGITS - BEFORE_KEY


def why_too_short(text: bytes, length: int) -> str:
    """Returns why no window of `length` tokens can be cut from `text`, or an empty text if some can."""
    if length <= len(text):
        return ""
    return (
        f"windows of {length:,} tokens are longer than their text of {len(text):,} bytes; "
        f"use lengths up to {len(text):,}"
    )


def make_prompts(
    text: bytes, length: int, distance: int, prompts: int
) -> Int[np.ndarray, "prompts length+1"]:
    """Returns windows of `length` inputs and the next token: book text with a key, and its question
    at the end. The last five tokens are the answer.

    Args:
      text: a book. Each prompt takes another part.
      distance: tokens from each digit of the key to the same digit of the answer.

    Raises:
      ValueError: a distance too short for the question or too long for the window, or a text
        shorter than `length`.
    """
    if not NEAREST <= distance <= _farthest(length):
        raise ValueError(
            f"distance={distance} must be from {NEAREST} to {_farthest(length)} in a window of {length}"
        )
    if why := why_too_short(text, length):
        raise ValueError(why)
    random, made = np.random.default_rng([length, distance]), []
    before = _farthest(length) - distance
    after = before + distance - NEAREST
    for start in np.linspace(0, len(text) - length, prompts).astype(int):
        book, key = text[start : start + length], _draw_key(random)
        statement, question = (form.format(key).encode() for form in (STATEMENT, QUESTION))
        prompt = book[:before] + statement + book[before:after] + question.removesuffix(b".")
        made.append(np.frombuffer(prompt, np.uint8))
    return np.stack(made)
