"""The package's books, plain or with passkeys, and prompts with a passkey each."""

import functools
import json
import lzma
import pathlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from alibi.config import DataConfig
from alibi.data.corpus import Corpus, Piece, split_long
from alibi.data.tokenizers.base import ByteTokenizer, Tokenizer

BOOKS = pathlib.Path(__file__).parent / "books"

# A key as the text states it, and the question with the answer, which a model knows from its
# context alone. Both begin with signs that are rare in books: with whole sentences, small models
# found no key after 3,000 updates.
STATEMENT, QUESTION = " #{}.", " ={}."
DIGITS = 5
MAX_GAP = 24  # bytes at most from a question to the next key
LEAST_DISTANCE = 32  # the smallest distance that is measured, a power of two


class Books(Corpus):
    """Whole public-domain books, packed inside the package (see alibi/data/books/README.md)."""

    name = "books"

    def pieces(self, split: str) -> Iterator[Piece]:
        """Yields each book as a document."""
        books = self._books(split)
        with lzma.open(BOOKS / f"{self.data[split]}.txt.xz") as stream:
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
        name = self.data[split]
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
            random = np.random.default_rng([index, *self.data[split].encode()])
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
    `LEAST_DISTANCE` on, as far as a key of bytes may lie.
    """
    powers = range(LEAST_DISTANCE.bit_length() - 1, length.bit_length())
    farthest = length + 1 - DIGITS - STATEMENT.index("{")
    return [1 << power for power in powers if 1 << power <= farthest]


class KeyPrompts:
    """Prompts with a key and its question, in the tokens of any tokenizer that spells a key alike in both.

    Keys are drawn until they have the usual number of tokens, `size`: five for bytes.

    Args:
      text: a book in UTF-8.

    Raises:
      ValueError: the tokenizer spells keys differently in a statement and in a question, or loses digits.

    Example:
      >>> KeyPrompts(book, ByteTokenizer()).make(length=1024, distance=256, count=200).shape
      (200, 1025)
    """

    def __init__(self, text: bytes, tokenizer: Tokenizer):
        self._tokenizer, self.ids = tokenizer, np.frombuffer(text, np.uint8)
        if not isinstance(tokenizer, ByteTokenizer):
            self.ids = np.array(tokenizer.encode_open(text.decode()), np.int32)
        parts = (*STATEMENT.partition("{}")[::2], QUESTION.partition("{}")[0])
        self._before, self._end, self._asks = map(self._spelled, parts)
        random = np.random.default_rng(0)
        keys = {key: self._key_ids(key) for key in (_draw_key(random) for _ in range(100))}
        sizes = Counter(len(ids) for ids in keys.values() if ids)
        if sizes.total() < len(keys) / 2:
            key = next(key for key, ids in keys.items() if not ids)
            raise ValueError(
                f"the tokenizer ({tokenizer.name}) does not keep a key's digits in tokens of their own, alike in "
                f"{STATEMENT.format(key)!r} and {QUESTION.format(key)!r}; passkeys need one that does, such as bytes"
            )
        self.size = sizes.most_common(1)[0][0]
        self.told = len(self._before) + self.size + len(self._end)  # tokens of a statement
        self.nearest = self.size + len(self._end) + len(self._asks)

    def _spelled(self, text: str) -> list[int]:
        """Returns the ids of `text` within a document."""
        return self._tokenizer.encode_open(f"a{text}")[len(self._tokenizer.encode_open("a")) :]

    def _key_ids(self, key: str) -> list[int]:
        """Returns a key's ids, or none if they differ between statement and question."""
        told, asked = (self._spelled(form.format(key)) for form in (STATEMENT, QUESTION))
        ids = told[len(self._before) : len(told) - len(self._end)]
        alike = told == self._before + ids + self._end and asked == self._asks + ids + self._end
        return ids if alike and self._tokenizer.decode(ids).strip() == key else []

    def _draw(self, random: np.random.Generator, other: Sequence[int] = ()) -> list[int]:
        """Returns the ids of a key that is not `other`."""
        while len(ids := self._key_ids(_draw_key(random))) != self.size or ids == other:
            pass
        return ids

    def limit(self, length: int, distance: int, distractors: int = 0) -> str:
        """Returns why there is no such prompt, or ""."""
        count, farthest = len(self.ids), length + 1 - self.size - len(self._before)
        if length > count:
            unit = "bytes" if self.ids.dtype == np.uint8 else "tokens"
            return (
                f"windows of {length:,} tokens are longer than their text of {count:,} {unit}; "
                f"use lengths up to {count:,}"
            )
        if not self.nearest <= distance <= farthest:
            return f"distance={distance} must be from {self.nearest} to {farthest} in a window of {length}"
        if (room := farthest - distance) < distractors * self.told:
            return (
                f"{distractors} distractors of {self.told} tokens do not fit before a key {distance:,} tokens back in "
                f"a window of {length:,}; use at most {room // self.told}"
            )
        return ""

    def make(
        self, length: int, distance: int, count: int, distractors: int = 0
    ) -> Int[np.ndarray, "prompts length+1"]:
        """Returns windows of `length` inputs and the next token: book text with a key, and its question at the
        end. The last `size` tokens are the answer. Each prompt takes another part of the book.

        Args:
          distance: tokens from each token of the key to the same token of the answer.
          distractors: other keys, told before the asked one at even places.

        Raises:
          ValueError: `limit` has a reason.
        """
        if why := self.limit(length, distance, distractors):
            raise ValueError(why)
        random, made = np.random.default_rng([length, distance]), []
        before = length + 1 - self.size - len(self._before) - distance - distractors * self.told
        for start in np.linspace(0, len(self.ids) - length, count).astype(int):
            book, key = self.ids[start : start + length], self._draw(random)
            others = [self._draw(random, key) for _ in range(distractors)]
            pieces = np.array_split(book[:before], distractors + 1)
            told = [self._before + each + self._end for each in (*others, key)]
            rest = book[before : before + distance - self.nearest]
            prompt = [piece for pair in zip(pieces, told, strict=True) for piece in pair]
            made.append(np.concatenate([*prompt, rest, self._asks + key]).astype(self.ids.dtype))
        return np.stack(made)
