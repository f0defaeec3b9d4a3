"""The corpus that comes with the project: its books."""

import functools
import hashlib
import json
import lzma
import pathlib
from collections.abc import Iterator
from typing import Any

from alibi.data.pieces import Corpus, Piece, split_long

BOOKS = pathlib.Path(__file__).parent / "books"


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
