"""Text as a stream of bounded pieces, so that a 10 GB document needs no more memory than a short one."""

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import tqdm

# Corpora cut longer documents after a line end, else at a space, else between two characters.
PIECE_BYTES = 1 << 20

SPLITS = ("train", "valid", "test")
BAR_DELAY = 0.5  # seconds before a progress bar appears: what is quick, or fails at once, shows none


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a document; empty only when the whole document is empty."""

    text: str
    ends_document: bool


class Corpus(abc.ABC):
    """Where the text of the splits "train", "valid" and "test" comes from."""

    name: str
    # The state of a named text that `pieces` has read; empty if `description` says it all.
    revision: str = ""

    def __init__(self, data: Any):
        """`data`: the config section, or another mapping that says for each split where its text is."""
        self._data = data

    @abc.abstractmethod
    def pieces(self, split: str) -> Iterator[Piece]:
        """The documents of `split` in their order, in pieces; ValueError where they can't be read."""

    @abc.abstractmethod
    def description(self, split: str) -> dict[str, Any]:
        """What identifies the text of `split`, JSON-able: two equal descriptions mean the same text."""

    def title(self, split: str) -> str:
        """What results call the text of `split`, besides the split's own name."""
        return self.name

    def source(self, split: str) -> str:
        """For people: where the text of `split` was found."""
        return f"{self.name}: {split}"

    def size(self, split: str) -> int | None:
        """UTF-8 bytes of the text of `split`, where that is known before reading it."""
        return None


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
            stop = text.rfind("\n", start, stop) + 1 or text.rfind(" ", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def limit_bytes(pieces: Iterable[Piece], max_bytes: int) -> Iterator[Piece]:
    """At most the first `max_bytes` UTF-8 bytes (-1: all), cut between two characters; the cut ends the document."""
    if max_bytes < 0:
        yield from pieces
        return
    left = max_bytes
    held: Piece | None = None  # kept back: if nothing of the next piece fits, this one ends the document
    for piece in pieces:
        data = piece.text.encode("utf-8")
        text = data[:left].decode("utf-8", errors="ignore")  # the only error can be a character cut by the limit
        left -= len(data)
        if text or left > 0:
            if held:
                yield held
            held = Piece(text, piece.ends_document)
        if left <= 0:
            break
    if held:
        yield Piece(held.text, held.ends_document or left <= 0)


def read_split(corpus: Corpus, split: str, max_bytes: int, purpose: str = "", *, progress: bool) -> Iterator[Piece]:
    """The pieces of `split`, cut by `limit_bytes`; `progress` shows a bar on stderr that says the `purpose` too."""
    size = corpus.size(split)
    total = size if max_bytes < 0 else min(max_bytes, size or max_bytes)
    title = ", ".join(filter(None, [f"{corpus.name} {split}", purpose]))
    bar = tqdm.tqdm(
        total=total, desc=title, unit="B", unit_scale=True, delay=BAR_DELAY, leave=False, disable=not progress
    )
    with bar:
        for piece in limit_bytes(corpus.pieces(split), max_bytes):
            yield piece
            bar.update(len(piece.text.encode("utf-8")))
