"""Books of a list: the list itself, and a user's files checked against it and joined."""

import dataclasses
import hashlib
import json
import lzma
import pathlib

import pytest

from alibi.data.booklist import BookList
from tests.hosts import ROOT

LONG_BOOKS = ROOT / "configs" / "long_books.json"
TEXTS = {"One": "of the first\n", "Two\rOr, Both": "a “second”\n", "Three": "the last\n"}


@pytest.fixture
def listed(tmp_path):
    """A list with three books, two for training, and the books' folder."""
    folder, books = tmp_path / "books", []
    (folder / "more").mkdir(parents=True)
    for number, (title, text) in enumerate(TEXTS.items()):
        (folder / "more" / f"{number}.txt").write_text(text)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        split = "valid" if title == "Three" else "train"
        size, words = len(text.encode()), len(text.split())
        books.append(
            {"split": split, "author": "A, B", "title": title, "bytes": size, "words": words}
        )
        books[-1]["sha256"] = sha256
    whole = {"train": TEXTS["One"] + TEXTS["Two\rOr, Both"], "valid": TEXTS["Three"]}
    texts = {
        split: {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        for split, text in whole.items()
    }
    file = tmp_path / "list.json"
    file.write_text(json.dumps({"about": [], "texts": texts, "books": books}))
    return BookList.read(file), folder


def test_books_are_found_by_content_and_joined_in_the_order_of_the_list(listed, tmp_path):
    books, folder = listed
    (folder / "another.txt").write_text("not listed")
    assert books.unmade(tmp_path / "out") == ["train", "valid"]
    assert books.join(folder, tmp_path / "out") == []
    assert (tmp_path / "out" / "train.txt").read_text() == "of the first\na “second”\n"
    assert (tmp_path / "out" / "valid.txt").read_text() == "the last\n"
    assert books.unmade(tmp_path / "out") == []
    (tmp_path / "out" / "train.txt").write_text("of the first\na “third”\n")
    (tmp_path / "out" / "valid.txt").chmod(0o444)
    assert books.unmade(tmp_path / "out") == ["train"]
    (folder / "more" / "2.txt").unlink()
    assert books.join(folder, tmp_path / "out") == [], (
        "the book of a whole text is not needed again"
    )
    assert books.unmade(tmp_path / "out") == []


def test_a_line_names_each_book_that_is_missing_or_differs_and_nothing_is_written(listed, tmp_path):
    books, folder = listed
    (folder / "more" / "1.txt").unlink()
    (folder / "more" / "2.txt").rename(folder / "Three.txt")
    (folder / "Three.txt").write_text("the last, corrected\n")
    missing, differs = books.join(folder, tmp_path / "out")
    sha256 = hashlib.sha256(TEXTS["Two\rOr, Both"].encode()).hexdigest()
    assert missing == f"missing: A, B, Two Or, Both (train; 15 bytes, SHA-256 {sha256})"
    assert differs.startswith(f"differs: {folder / 'Three.txt'} has 20 bytes, SHA-256 ")
    assert "; needed: 9 bytes, SHA-256 " in differs
    assert not (tmp_path / "out").exists()


def test_a_book_can_be_in_a_second_text(listed, tmp_path):
    books, folder = listed
    twice = dataclasses.replace(books.books[0], also="unseen")
    more = BookList((twice, *books.books[1:]), books.sha256 | {"unseen": twice.sha256})
    assert more.join(folder, tmp_path / "out") == []
    assert (tmp_path / "out" / "unseen.txt").read_text() == TEXTS["One"]
    assert (tmp_path / "out" / "train.txt").read_text().startswith(TEXTS["One"])
    assert more.unmade(tmp_path / "out") == []


def test_unseen_books_have_authors_without_a_book_in_train():
    books = BookList.read(LONG_BOOKS)
    authors = [{book.author for book in books.of(split)} for split in ("train", "unseen")]
    assert len(authors[1]) == 2
    assert not authors[0] & authors[1]


def test_the_long_books_are_those_of_the_folder_with_corpora(shared_dir):
    """The list alone must tell every byte of the texts: it is all that a user has."""
    books = BookList.read(LONG_BOOKS)
    for source, splits in {"train": ["train"], "valid": ["valid", "test"]}.items():
        with lzma.open(shared_dir / "data" / "gutenberg-long" / f"{source}.txt.xz") as stream:
            for split in splits:
                whole = hashlib.sha256()
                for book in books.of(split):
                    text = stream.read(book.bytes)
                    assert hashlib.sha256(text).hexdigest() == book.sha256, book.title
                    assert len(text.split()) == pytest.approx(book.words, rel=1e-3)
                    whole.update(text)
                assert whole.hexdigest() == books.sha256[split]
            assert stream.read() == b""


def test_the_script_checks_joins_and_says_in_a_line_what_is_missing(run_script, tmp_path):
    script = ROOT / "scripts" / "join_books.py"
    done = run_script(script, f"--output_dir={tmp_path}", code=1)
    assert (
        "has no whole train.txt, valid.txt, test.txt, unseen.txt; give the books by --books"
        in done.stderr
    )
    done = run_script(script, f"--output_dir={tmp_path}", f"--books={tmp_path}", code=1)
    assert done.stdout.count("missing: ") == len(done.stdout.splitlines()) == 120
    assert f"error: 120 of 120 books are not in {tmp_path}; fetch them by author" in done.stderr
    done = run_script(
        script, f"--output_dir={tmp_path}", f"--books={pathlib.Path(__file__)}", code=1
    )
    assert "is no folder; give the folder with the books" in done.stderr
