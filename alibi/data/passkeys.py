"""Keys to be found again: a corpus of the embedded books to train on, and prompts to test with.

After Mohtashami & Jaggi 2023, whose passkey lies between repeated sentences.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from alibi.config import DataConfig
from alibi.data.embedded import Books
from alibi.data.pieces import Piece

# A key as it is told, and its question with the answer, which a model knows only from its context. Two signs that
# books hardly have: where whole sentences told and asked, small models found no key after 3,000 updates.
TOLD, ASKED = " #{}.", " ={}."
DIGITS = 5
MAX_GAP = 24  # bytes from a question to the next key
BEFORE_KEY = TOLD.index("{")  # bytes of the sentence that tells a key, before the key
LEAST = 32  # the smallest distance that is measured, a power of two
NEAREST = DIGITS + 1 + ASKED.index("{")  # the distance where no text stands between key and question


class PassKeys(Books):
    """The embedded books with keys: a number is told, and asked for after up to `data.passkey_distance` bytes of text.

    Keys and places are drawn by the split and the number of the piece: the text is always the same.
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


def distances(length: int) -> list[int]:
    """The distances that are measured in windows of `length` tokens: the powers of two from `LEAST` on that fit."""
    return [
        1 << power for power in range(LEAST.bit_length() - 1, length.bit_length()) if 1 << power <= _farthest(length)
    ]


def _farthest(length: int) -> int:
    return length + 1 - DIGITS - BEFORE_KEY


def too_short(text: bytes, length: int) -> str:
    """Why no window of `length` tokens can be cut from `text`; empty: some can."""
    if length <= len(text):
        return ""
    return (
        f"windows of {length:,} tokens are longer than the text of {len(text):,} bytes that they are cut from; "
        f"use lengths up to {len(text):,}"
    )


def make_prompts(text: bytes, length: int, distance: int, prompts: int) -> Int[np.ndarray, "prompts length+1"]:
    """Windows of `length` inputs and the token after them: book text, in it a key, and at the end its question.

    The last five tokens are the key, as it is to be answered.

    Args:
      text: of a book, from which each prompt takes a part of its own.
      distance: tokens from each digit of the key to the same digit of the answer.

    Raises:
      ValueError: a distance that is too short for the question, or doesn't fit into the window; or a text that is
        shorter than that.
    """
    if not NEAREST <= distance <= _farthest(length):
        raise ValueError(f"distance={distance} must be from {NEAREST} to {_farthest(length)} in a window of {length}")
    if short := too_short(text, length):
        raise ValueError(short)
    random, before, made = np.random.default_rng([length, distance]), _farthest(length) - distance, []
    for start in np.linspace(0, len(text) - length, prompts).astype(int):
        book, key = text[start : start + length], draw_key(random)
        told, asked = TOLD.format(key).encode(), ASKED.format(key).encode().removesuffix(b".")
        made.append(book[:before] + told + book[before : before + distance - NEAREST] + asked)
    return np.stack([np.frombuffer(prompt, np.uint8) for prompt in made])
