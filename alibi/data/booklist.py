"""Book lists: a user's files are checked against a list and joined to each split's text."""

import dataclasses
import json
import os
import pathlib
import shutil

from alibi.storage.cache import file_sha256
from alibi.storage.files import made_whole

JOINED = "data/long-books"  # the folder in which configs look for the texts


@dataclasses.dataclass(frozen=True)
class Book:
    """A book in a list, a UTF-8 file."""

    split: str
    author: str
    title: str
    bytes: int
    words: int  # between white space
    sha256: str
    also: str = ""  # another split that has the book too


@dataclasses.dataclass(frozen=True)
class BookList:
    """Books. A split's text is its books in this order, without separators."""

    books: tuple[Book, ...]
    sha256: dict[str, str]  # each split's text's

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "BookList":
        """Returns the list in a file such as configs/long_books.json."""
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        texts = {split: text["sha256"] for split, text in content["texts"].items()}
        return cls(tuple(Book(**book) for book in content["books"]), texts)

    def of(self, split: str) -> list[Book]:
        """Returns the split's books in their order."""
        return [book for book in self.books if split in (book.split, book.also)]

    def unmade(self, directory: pathlib.Path) -> list[str]:
        """Returns the splits without a whole SPLIT.txt in `directory`."""
        files = {split: directory / f"{split}.txt" for split in self.sha256}
        return [
            split
            for split, file in files.items()
            if not file.is_file() or file_sha256(file) != self.sha256[split]
        ]

    def join(self, folder: pathlib.Path, directory: pathlib.Path) -> list[str]:
        """Writes the missing texts to `directory` from the books in `folder`. Returns a line for each
        book that is missing, and then writes nothing.

        A book is any .txt file in `folder`, or below it, with the list's SHA-256.
        """
        splits = self.unmade(directory)
        needed = [book for book in self.books if {book.split, book.also} & {*splits}]
        files = sorted(folder.rglob("*.txt"))
        by_hash = {file_sha256(file): file for file in files}
        named = {file.stem: file for file in files}
        problems = [
            _problem(book, named.get(book.title)) for book in needed if book.sha256 not in by_hash
        ]
        for split in splits if not problems else ():
            with made_whole(directory / f"{split}.txt") as partial, partial.open("wb") as text:
                for book in self.of(split):
                    with by_hash[book.sha256].open("rb") as file:
                        shutil.copyfileobj(file, text)
        return problems


def _problem(book: Book, file: pathlib.Path | None) -> str:
    """Returns why `book` is missing. `file` has its title as name."""
    listed = f"{book.bytes:,} bytes, SHA-256 {book.sha256}"
    if file is None:
        title = " ".join(book.title.split())  # some hold a line's end
        return f"missing: {book.author}, {title} ({book.split}; {listed})"
    size, sha256 = file.stat().st_size, file_sha256(file)
    return f"differs: {file} has {size:,} bytes, SHA-256 {sha256}; needed: {listed}"
