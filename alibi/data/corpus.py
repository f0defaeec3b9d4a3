"""Text as a stream of bounded pieces and shards: documents may be larger than the memory."""

import abc
import dataclasses
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from alibi.config.classes import Registry
from alibi.progress import Progress
from alibi.storage.cache import file_sha256

# Longer documents are cut after a line end, else after a space, else between two characters. A
# piece fits into a core's cache, so that each step of its processing finds it there.
PIECE_BYTES = 1 << 18
SHARD_BYTES = 64 << 20  # text of one file of tokens: a killed process loses at most this much work

# A shard may begin inside a document before a line end that a visible character follows. Bytes and
# words are separate there, and so are the tokens of byte-level BPE. (No white space of UTF-8 begins
# with one of these bytes.)
BORDER = re.compile(rb"\n[!-~\xc3-\xe0\xe4-\xf4]")

SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of a document, whole characters in UTF-8, empty only if the document is empty."""

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
    """Part of a corpus, which can be tokenized without the others.

    Attributes:
      pieces: the text. Read it before the next shard is taken, or not at all.
      after_open_line: the shard before ends with a document without a line end.
    """

    pieces: Iterator[Piece]
    after_open_line: bool


# The class of each corpus.
CORPORA = {
    "books": "alibi.data.books:Books",
    "passkeys": "alibi.data.books:PassKeys",
    "text": "alibi.data.textfiles:TextFiles",
    "hub": "alibi.data.hosted:Hub",
    "tfds": "alibi.data.hosted:Tfds",
    "tasks": "alibi.data.tasks:Tasks",
}
REGISTRY = Registry("data.corpus", "corpus", CORPORA, "alibi.data.corpus:Corpus", "alibi.corpora")


@dataclasses.dataclass(eq=False)
class Corpus(abc.ABC):
    """The splits "train", "valid" and "test" as text. A subclass's further fields are its options.

    Attributes:
      data: the config section, or a mapping from each split to its text's place.

    Example:
      >>> @dataclasses.dataclass(eq=False)
      ... class Counted(Corpus):
      ...     name = "counted"
      ...     most: int = 100
      ...     def pieces(self, split):
      ...         yield from split_long(" ".join(map(str, range(self.most))).encode())
      ...     def description(self, split):
      ...         return {"corpus": self.name, "most": self.most}
    """

    data: Any

    name: ClassVar[str]
    # the config names the files of each split: they may move, and `data.document_end` cuts them
    splits_are_files: ClassVar[bool] = False
    # tokens show where a document ends, with any tokenizer
    tokens_have_ends: ClassVar[bool] = False
    # The version of a dataset that `pieces` read; empty if `description` identifies the text.
    revision: str = dataclasses.field(default="", init=False)
    # shards may begin inside documents, see `Tokenizer.cuts_documents`
    cuts_documents: bool = dataclasses.field(default=True, init=False)

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "name"):
            cls.name = cls.__qualname__

    @abc.abstractmethod
    def pieces(self, split: str) -> Iterator[Piece]:
        """Yields the split's documents in pieces. Raises ValueError if they can't be read."""

    @abc.abstractmethod
    def description(self, split: str) -> dict[str, Any]:
        """Returns JSON content that is equal only if the split's text is."""

    def cached_as(self, split: str) -> dict[str, Any]:
        """Returns JSON content that identifies the split's text in the cache: `description`, and for a class from
        outside also its options and file.
        """
        described, kind = self.description(split), type(self)
        if kind.__module__.startswith("alibi."):
            return described
        file = getattr(sys.modules[kind.__module__], "__file__", None)
        options = {name: getattr(self, name) for name in REGISTRY.fields(kind)}
        made_by = {"class": REGISTRY.name_of(kind), "file": file and file_sha256(file)}
        return {"description": described, "options": options} | made_by

    def shards(self, split: str, max_bytes: int, shard_bytes: int = SHARD_BYTES) -> Iterator[Shard]:
        """Yields the first `max_bytes` (-1 means all) of `split` in shards of `shard_bytes` or a little
        more, the same in each process.

        This method reads skipped shards too.
        """
        pieces = limit_bytes(self.pieces(split), max_bytes)
        return cut_shards(pieces, shard_bytes, cuts_documents=self.cuts_documents)

    def sample(self, split: str, max_bytes: int, sample_bytes: int) -> Iterator[Piece]:
        """Yields about `sample_bytes` from the first `max_bytes` (-1 means all) of `split`. This method
        yields the beginning.
        """
        return limit_bytes(
            self.pieces(split), sample_bytes if max_bytes < 0 else min(sample_bytes, max_bytes)
        )

    def check(self, splits: Iterable[str]) -> None:
        """Raises ValueError if a split's text is missing. Much faster than reading it."""
        for split in splits:
            self.source(split)

    def title(self, split: str) -> str:
        """Returns the text's name in results, without the split."""
        return self.name

    def source(self, split: str) -> str:
        """Returns where the split's text is, for people."""
        return f"{self.name}: {split}"

    def size(self, split: str) -> int | None:
        """Returns the split's UTF-8 bytes, or None if unknown before reading."""
        return None


def one_document(texts: Iterable[bytes], *, ends: bool = True) -> Iterator[Piece]:
    """Yields a document's pieces from its successive texts. `ends` is False if more follows."""
    previous: bytes | None = None
    for text in filter(None, texts):
        if previous is not None:
            yield Piece(previous, ends_document=False)
        previous = text
    yield Piece(previous or b"", ends_document=ends)


def split_long(text: bytes) -> Iterator[Piece]:
    """Yields the pieces for a document in memory."""

    def cuts() -> Iterator[bytes]:
        start = 0
        while start < len(text):
            stop = start + PIECE_BYTES
            if stop < len(text):
                border = text.rfind(b"\n", start, stop) + 1 or text.rfind(b" ", start, stop) + 1
                stop = border or _character_start(text, stop)
            yield text[start:stop]
            start = stop

    return one_document(cuts())


def _character_start(text: bytes, position: int) -> int:
    """Returns where the character at `position` begins."""
    while text[position] & 0xC0 == 0x80:
        position -= 1
    return position


def limit_bytes(pieces: Iterable[Piece], max_bytes: int) -> Iterator[Piece]:
    """Yields the first `max_bytes` UTF-8 bytes (-1 means all), cut between characters. The cut ends the
    document.
    """
    if max_bytes < 0:
        yield from pieces
        return
    left = max_bytes
    # kept back: if nothing of the next piece fits, this one ends the document
    held: Piece | None = None
    for piece in pieces:
        is_cut = left < len(piece.utf8)
        text = piece.utf8[: _character_start(piece.utf8, left)] if is_cut else piece.utf8
        left -= len(piece.utf8)
        if text or left > 0:
            if held:
                yield held
            held = Piece(text, piece.ends_document)
        if left <= 0:
            break
    if held:
        yield Piece(held.utf8, held.ends_document or left <= 0)


def cut_shards(
    pieces: Iterable[Piece], shard_bytes: int, *, cuts_documents: bool = True
) -> Iterator[Shard]:
    """Yields shards of `shard_bytes` or a little more, cut at document ends and, with
    `cuts_documents`, at `BORDER`s.
    """
    numbered = _numbered(pieces, shard_bytes, cuts_documents)
    for _, group in itertools.groupby(numbered, key=lambda member: member[0]):
        members = iter(group)
        _, after_open_line, first = next(members)
        yield Shard(itertools.chain([first], (piece for _, _, piece in members)), after_open_line)


def _numbered(
    pieces: Iterable[Piece], shard_bytes: int, cuts_documents: bool
) -> Iterator[tuple[int, bool, Piece]]:
    """Yields each piece's shard, whether the document before it has an open line, and the piece."""
    shard = size = 0
    line_open = False
    for piece in pieces:
        size += len(piece.utf8)
        if (
            size >= shard_bytes
            and cuts_documents
            and not piece.ends_document
            and (border := BORDER.search(piece.utf8, 1))
        ):
            head, tail = piece.utf8[: border.start()], piece.utf8[border.start() :]
            yield shard, line_open, Piece(head, ends_document=False)
            shard, size, line_open = shard + 1, len(tail), False
            piece = Piece(tail, ends_document=False)
        yield shard, line_open, piece
        line_open = piece.leaves_line_open
        if size >= shard_bytes and piece.ends_document:
            shard, size = shard + 1, 0


def make_bar(
    corpus: Corpus, split: str, max_bytes: int, purpose: str = "", *, progress: bool
) -> Progress:
    """Returns a bar over the bytes of `split` with the `purpose` in its title, hidden without
    `progress`.
    """
    size = corpus.size(split)
    total = size if max_bytes < 0 else min(max_bytes, size or max_bytes)
    title = ", ".join(filter(None, [f"{corpus.name} {split}", purpose]))
    return Progress(title, total, "bytes", show=progress)


def watched(pieces: Iterable[Piece], bar: Progress) -> Iterator[Piece]:
    """Yields the pieces, and counts each on `bar` after its use."""
    for piece in pieces:
        yield piece
        bar.update(len(piece.utf8))
