"""Text as a stream of bounded pieces, and of shards, so that none is too large for memory or for one process."""

import abc
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from alibi.progress import Progress

# Corpora cut longer documents after a line end, else after a space, else between two characters. Small enough for a
# core's cache, so that what is done to a piece, one thing after the other, need not fetch it from memory again.
PIECE_BYTES = 1 << 18
SHARD_BYTES = 64 << 20  # of text that become one file of tokens; what a killed process loses

# Where a document may be cut into shards: before a line end that a visible character follows. Bytes and words are
# separate there, and so are the tokens of byte-level BPE. (No white space of UTF-8 begins with one of these bytes.)
BORDER = re.compile(rb"\n[!-~\xc3-\xe0\xe4-\xf4]")

SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a document, as whole characters in UTF-8; empty only when the whole document is empty."""

    utf8: bytes
    ends_document: bool

    @property
    def text(self) -> str:
        return self.utf8.decode("utf-8")

    @property
    def leaves_line_open(self) -> bool:
        """Whether a document ends here without a line end."""
        return self.ends_document and not self.utf8.endswith(b"\n")


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a corpus that can be tokenized without the others.

    Attributes:
      pieces: of its text; to be read, if at all, before the next shard is asked for.
      after_open_line: whether the shard before ended a document without a line end.
    """

    pieces: Iterator[Piece]
    after_open_line: bool


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

    def shards(self, split: str, max_bytes: int, shard_bytes: int = SHARD_BYTES) -> Iterator[Shard]:
        """The first `max_bytes` (-1: all) of `split` in shards of `shard_bytes` or a little more.

        They are the same whoever asks. Here the text of one that is skipped is read all the same.
        """
        return cut_shards(limit_bytes(self.pieces(split), max_bytes), shard_bytes)

    def sample(self, split: str, max_bytes: int, sample_bytes: int) -> Iterator[Piece]:
        """About `sample_bytes` of the first `max_bytes` of `split`: here the first of them."""
        return limit_bytes(self.pieces(split), sample_bytes if max_bytes < 0 else min(sample_bytes, max_bytes))

    def check(self, splits: Iterable[str]) -> None:
        """Raises ValueError where one of `splits` is named but not there; cheap beside reading them."""
        for split in splits:
            self.source(split)

    def title(self, split: str) -> str:
        """What results call the text of `split`, besides the split's own name."""
        return self.name

    def source(self, split: str) -> str:
        """The place where the text of `split` was found, told for people."""
        return f"{self.name}: {split}"

    def size(self, split: str) -> int | None:
        """UTF-8 bytes of the text of `split`, where that is known before reading it."""
        return None


def one_document(texts: Iterable[bytes], *, to_its_end: bool = True) -> Iterator[Piece]:
    """The pieces of one document, from its successive texts, which may be only some of it."""
    previous: bytes | None = None
    for text in filter(None, texts):
        if previous is not None:
            yield Piece(previous, ends_document=False)
        previous = text
    yield Piece(previous or b"", ends_document=to_its_end)


def split_long(text: bytes) -> Iterator[Piece]:
    """The pieces of one document that is in memory already."""
    return one_document(_cuts(text)) if len(text) > PIECE_BYTES else iter((Piece(text, ends_document=True),))


def _cuts(text: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        stop = start + PIECE_BYTES
        if stop < len(text):
            stop = text.rfind(b"\n", start, stop) + 1 or text.rfind(b" ", start, stop) + 1 or _character(text, stop)
        yield text[start:stop]
        start = stop


def _character(text: bytes, position: int) -> int:
    """The place where the character begins that the byte at `position` is of."""
    while text[position] & 0xC0 == 0x80:
        position -= 1
    return position


def limit_bytes(pieces: Iterable[Piece], max_bytes: int) -> Iterator[Piece]:
    """The first `max_bytes` UTF-8 bytes (-1: all) or fewer, cut between two characters; the cut ends the document."""
    if max_bytes < 0:
        yield from pieces
        return
    left = max_bytes
    held: Piece | None = None  # kept back: if nothing of the next piece fits, this one ends the document
    for piece in pieces:
        text = piece.utf8[: _character(piece.utf8, left)] if left < len(piece.utf8) else piece.utf8
        left -= len(piece.utf8)
        if text or left > 0:
            if held:
                yield held
            held = Piece(text, piece.ends_document)
        if left <= 0:
            break
    if held:
        yield Piece(held.utf8, held.ends_document or left <= 0)


def cut_shards(pieces: Iterable[Piece], shard_bytes: int) -> Iterator[Shard]:
    """A stream in shards of `shard_bytes` or a little more, each from one document's end or border to another."""
    for _, members in itertools.groupby(_numbered(pieces, shard_bytes), key=lambda member: member[0]):
        yield _shard(members)


def _shard(members: Iterator[tuple[int, bool, Piece]]) -> Shard:
    _, after_open_line, first = next(members)
    return Shard(itertools.chain([first], (piece for _, _, piece in members)), after_open_line)


def _numbered(pieces: Iterable[Piece], shard_bytes: int) -> Iterator[tuple[int, bool, Piece]]:
    """Each piece with the number of its shard, and whether a document before it left its last line open."""
    number = size = 0
    line_open = False
    for piece in pieces:
        size += len(piece.utf8)
        if size >= shard_bytes and not piece.ends_document and (border := BORDER.search(piece.utf8, 1)):
            head, tail = piece.utf8[: border.start()], piece.utf8[border.start() :]
            yield number, line_open, Piece(head, ends_document=False)
            number, size, line_open, piece = number + 1, len(tail), False, Piece(tail, ends_document=False)
        yield number, line_open, piece
        line_open = piece.leaves_line_open
        if size >= shard_bytes and piece.ends_document:
            number, size = number + 1, 0


def make_bar(corpus: Corpus, split: str, max_bytes: int, purpose: str = "", *, progress: bool) -> Progress:
    """The progress over the bytes of `split`, which says the `purpose` too; nothing is shown without `progress`."""
    size = corpus.size(split)
    total = size if max_bytes < 0 else min(max_bytes, size or max_bytes)
    title = ", ".join(filter(None, [f"{corpus.name} {split}", purpose]))
    return Progress(title, total, "bytes", show=progress)


def watched(pieces: Iterable[Piece], bar: Progress) -> Iterator[Piece]:
    """The same pieces, each shown on `bar` when it has been used."""
    for piece in pieces:
        yield piece
        bar.update(len(piece.utf8))
