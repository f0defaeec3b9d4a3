"""Text as a stream of bounded pieces, so that a 10 GB document needs no more memory than a short one."""

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

# Corpora cut longer documents after a line end, else at a space, else between two characters.
PIECE_BYTES = 1 << 20

SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a document; empty only when the whole document is empty."""

    text: str
    ends_document: bool


class Corpus(abc.ABC):
    """Where the text of the splits "train", "valid" and "test" comes from."""

    name: str

    @abc.abstractmethod
    def pieces(self, split: str) -> Iterator[Piece]:
        """The documents of `split` in their order, in pieces; ValueError where they can't be read."""

    @abc.abstractmethod
    def description(self, split: str) -> dict[str, Any]:
        """What identifies the text of `split`, JSON-able: two equal descriptions mean the same text."""

    def source(self, split: str) -> str:
        """For people: where the text of `split` was found."""
        return f"{self.name}: {split}"

    def size(self, split: str) -> int | None:
        """UTF-8 bytes of the text of `split`, where that is known before reading it."""
        return None

    def documents(self, split: str) -> Iterator[str]:
        """The documents of `split`, each whole in memory."""
        parts: list[str] = []
        for piece in self.pieces(split):
            parts.append(piece.text)
            if piece.ends_document:
                yield "".join(parts)
                parts = []


def one_document(texts: Iterable[str]) -> Iterator[Piece]:
    """The pieces of one document, from its successive texts."""
    previous: str | None = None
    for text in filter(None, texts):
        if previous is not None:
            yield Piece(previous, ends_document=False)
        previous = text
    yield Piece(previous or "", ends_document=True)


def split_long(text: str) -> Iterator[Piece]:
    """The pieces of one document that is in memory already."""
    return one_document(_cuts(text)) if len(text) > PIECE_BYTES else iter((Piece(text, ends_document=True),))


def _cuts(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + PIECE_BYTES
        if stop < len(text):
            cut = text.rfind("\n", start, stop)
            cut = cut if cut >= 0 else text.rfind(" ", start, stop)
            stop = cut + 1 if cut >= 0 else stop
        yield text[start:stop]
        start = stop


def limit_bytes(pieces: Iterable[Piece], max_bytes: int) -> Iterator[Piece]:
    """At most the first `max_bytes` UTF-8 bytes (-1: all), cut between two characters; the cut ends the document."""
    left = max_bytes
    for piece in pieces:
        if max_bytes < 0:
            yield piece
            continue
        data = piece.text.encode("utf-8")
        if len(data) < left:
            left -= len(data)
            yield piece
            continue
        text = data[:left].decode("utf-8", errors="ignore")  # the only error can be a character cut by the limit
        if text:
            yield Piece(text, ends_document=True)
        return
