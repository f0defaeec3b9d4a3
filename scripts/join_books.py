"""Joins the books in configs/long_books.json to one text for each split: train.txt, valid.txt,
test.txt and unseen.txt, two books of valid by authors who have none in train.

    python scripts/join_books.py --books=FOLDER --output_dir=data/long-books

FOLDER holds each listed book as a UTF-8 .txt file with any name, in the form that the list describes;
its SHA-256 identifies it. A line names each book that is missing or differs. Texts are only written if
all books are there. Without --books it checks the texts in --output_dir.
"""

import pathlib

import clone
from absl import flags

from alibi.cli import command_line

_BOOKS = flags.DEFINE_string("books", None, "folder with the books")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "folder of the texts")
command_line.own_flags(__name__)


def main() -> None:
    from alibi.data.booklist import BookList

    books = BookList.read(clone.ROOT / "configs" / "long_books.json")
    output = pathlib.Path(_OUTPUT_DIR.value)
    if _BOOKS.value is not None:
        folder = pathlib.Path(_BOOKS.value)
        if not folder.is_dir():
            raise ValueError(f"--books={folder} is no folder; give the folder with the books")
        if problems := books.join(folder, output):
            print(*problems, sep="\n")
            raise ValueError(
                f"{len(problems)} of {len(books.books)} books are not in {folder}; fetch them by author and title, "
                "and remove Project Gutenberg's header, footer and licence"
            )
    if unmade := books.unmade(output):
        raise ValueError(
            f"{output} has no whole {', '.join(f'{split}.txt' for split in unmade)}; give the books by --books"
        )
    for split in books.sha256:
        size = sum(book.bytes for book in books.of(split))
        print(f"{output / f'{split}.txt'}: {len(books.of(split))} books, {size:,} bytes")


if __name__ == "__main__":
    command_line.run(main, required=("output_dir",))
