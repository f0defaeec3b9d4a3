"""Counts of a text that its results are told by: bytes, words, documents."""

import dataclasses
import re

import numpy as np
from jaxtyping import Bool, UInt8

from alibi.data.pieces import Piece

_UNKNOWN = re.compile(r"<unk>(?!\S)")


@dataclasses.dataclass
class Counts:
    """Sums over pieces.

    Attributes:
      words: between white space.
      bytes: in UTF-8.
      unk_in_text: words of the text that are <unk> itself.
    """

    words: int = 0
    bytes: int = 0
    documents: int = 0
    unk_in_text: int = 0

    def add(self, piece: Piece) -> None:
        self.words += count_words(piece.utf8)
        self.bytes += len(piece.utf8)
        self.documents += piece.ends_document
        if b"<" in piece.utf8:  # found many times as fast as what follows
            text = piece.text
            for found in _UNKNOWN.finditer(text):
                self.unk_in_text += found.start() == 0 or text[found.start() - 1].isspace()


def count_words(utf8: bytes) -> int:
    """`len(utf8.decode().split())`, many times as fast."""
    if not utf8:
        return 0
    data = np.frombuffer(utf8, np.uint8)
    space = data - np.uint8(9) < 5  # tab to carriage return
    space |= data - np.uint8(28) < 5  # separators of files to units, and the space
    wide = np.flatnonzero(data - np.uint8(0xC2) < 0x22)  # may begin white space of several bytes
    if wide.size:
        _mark_wide(data, wide, space)
    return int(np.count_nonzero(space[:-1] > space[1:])) + int(not space[0])


def _mark_wide(data: UInt8[np.ndarray, " n"], starts: np.ndarray, space: Bool[np.ndarray, " n"]) -> None:
    """Marks the white space of two and three bytes that begins at one of `starts`."""
    first, second, third = (data.take(starts + i, mode="clip") for i in range(3))
    two = (first == 0xC2) & ((second == 0x85) | (second == 0xA0))  # U+0085, U+00A0
    three = (first == 0xE1) & (second == 0x9A) & (third == 0x80)  # U+1680
    low = (third <= 0x8A) | (third == 0xA8) | (third == 0xA9) | (third == 0xAF)
    three |= (first == 0xE2) & (second == 0x80) & low  # U+2000 to U+200A, U+2028, U+2029, U+202F
    three |= (first == 0xE2) & (second == 0x81) & (third == 0x9F)  # U+205F
    three |= (first == 0xE3) & (second == 0x80) & (third == 0x80)  # U+3000
    for i in range(3):
        space[starts[three | (two & (i < 2))] + i] = True
