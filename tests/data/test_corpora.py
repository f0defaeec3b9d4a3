"""Where text comes from: the embedded books and files."""

import bz2
import gzip
import json
import lzma
import pathlib
import tarfile
import tracemalloc

import pytest
import zstandard

from alibi.config import DataConfig
from alibi.data import corpus as streams
from alibi.data import textfiles
from alibi.data.books import BOOKS
from alibi.data.corpus import Piece
from alibi.data.tokenizers import ByteTokenizer
from alibi.data.tokens import make_corpus
from tests.data.corpusmaker import documents, text_corpus
from tests.refusals import assert_refused


def test_books_are_whole_different_and_small():
    index = json.loads((BOOKS / "index.json").read_text())
    assert set(index) == {"train", "valid", "test"}
    held_out = {book["author"] for book in index["valid"] + index["test"]}
    assert not held_out & {book["author"] for book in index["train"]}
    assert sum(path.stat().st_size for path in BOOKS.iterdir()) < 3_000_000
    corpus = make_corpus(DataConfig(test="test"))
    for split, books in index.items():
        whole = documents(corpus, split)
        assert [len(text.encode()) for text in whole] == [book["bytes"] for book in books]
        assert [len(text.split()) for text in whole] == [book["words"] for book in books]
        # So that bytes are tokens and no separator is needed between two books.
        assert all(text.endswith("\n") and "\r" not in text for text in whole)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"valid": "nope"},
            r"data\.valid='nope' is no split .*, train, valid, test; .*corpus=text",
        ),
        (
            {"corpus": "book"},
            "unknown corpus 'book'; did you mean 'books'\\? there are: books, pass",
        ),
        ({"isolate_documents": "restart"}, r"which data\.tokenizer=bytes does not write; use bpe"),
        ({"document_end": "blank_line"}, r"data\.document_end=blank_line needs corpus=text.*file"),
        ({"corpus": "tfds", "name": "lm1b", "streaming": True}, "streaming=True needs corpus=hub"),
    ],
)
def test_unknown_names_list_those_that_exist(keys, message):
    assert_refused(message, lambda: list(make_corpus(DataConfig(**keys)).pieces("valid")))


@pytest.mark.parametrize(
    ("keys", "title"),
    [
        ({"corpus": "hub", "name": "Salesforce/wikitext", "subset": "a"}, "Salesforce/wikitext/a"),
        ({"corpus": "hub", "name": str(pathlib.Path(__file__).parent)}, "data"),
        ({"corpus": "tfds", "name": "lm1b"}, "lm1b"),
        ({"corpus": "text", "train": "a/one.txt,b/*.gz"}, "one.txt,*.gz"),
        ({}, "books"),
    ],
)
def test_titles_say_which_text_it_is(keys, title):
    """Result rows have them; "hub" or "text" would say nothing."""
    assert make_corpus(DataConfig(**keys)).title("train") == title


# Text files.


def test_files_and_globs_in_order_whatever_the_packing(tmp_path):
    texts = {
        "b.txt": "bé\n",
        "a.txt": "a a\n",
        "c.txt.gz": "c\n",
        "d.txt.xz": "d\n",
        "e.zst": "e\n",
        "f,g.bz2": "f\n",
    }
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    pack[".bz2"] = bz2.compress
    for name, text in texts.items():
        path = tmp_path / name
        path.write_bytes(pack.get(path.suffix, bytes)(text.encode()))
    corpus = text_corpus(
        f"{tmp_path}/c.txt.gz, {tmp_path}/*.txt,{tmp_path}/e.zst,{tmp_path}/d.txt.xz"
    )
    assert documents(corpus, "train") == ["c\n", "a a\n", "bé\n", "e\n", "d\n"]
    assert corpus.size("train") is None
    assert text_corpus(tmp_path / "*.txt").size("train") == 8
    # a comma in a name is no separator if the file exists
    assert documents(text_corpus(tmp_path / "f,g.bz2"), "train") == ["f\n"]


def test_zst_of_several_frames_and_of_a_long_window(tmp_path):
    """Frames may begin and end inside a character, and hold nothing. `zstd --long=31` packs with a
    window larger than the library's default limit.
    """
    pack, text = zstandard.ZstdCompressor().compress, "漢字\n" * 50
    frames = [pack(text.encode()[start : start + 4]) + pack(b"") for start in range(0, 350, 4)]
    parameters = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=False)
    long = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frames += [pack(b"one\n" * 9000), long.compress(b"two\n" * 9000) + long.flush()]
    (tmp_path / "a.zst").write_bytes(b"".join(frames))
    expected = text + "one\n" * 9000 + "two\n" * 9000
    assert documents(text_corpus(tmp_path / "a.zst"), "train") == [expected]


def test_a_sample_is_spread_over_the_files(tmp_path, monkeypatch):
    # bytes of a shard
    monkeypatch.setattr("alibi.data.textfiles.TextFiles.shards.__defaults__", (50,))
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 50)
    sample = b"".join(
        piece.utf8 for piece in text_corpus(tmp_path / "*.txt").sample("train", -1, 60)
    )
    assert {letter: sample.count(letter) for letter in (b"a", b"b", b"c")} == {
        b"a": 10,
        b"b": 10,
        b"c": 10,
    }
    limited = b"".join(
        piece.utf8 for piece in text_corpus(tmp_path / "*.txt").sample("train", 100, 60)
    )
    assert set(limited) == set(b"a\n")


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".zst", None)]
)
def test_a_truncated_packed_file_is_an_error(tmp_path, suffix, pack):
    text = "".join(f"line {i * i}\n" for i in range(20_000)).encode()
    packed = pack(text) if pack else zstandard.ZstdCompressor().compress(text)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(packed[:-40])
    assert_refused(
        rf"a\{suffix} is not a whole.*again", lambda: list(text_corpus(path).pieces("train"))
    )


def test_bad_files_say_what_and_where(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"x\n" * 700_000 + b"caf\xe9 au lait\n")
    # before its end is looked at
    assert_refused(
        "is empty", lambda: list(text_corpus(tmp_path / "empty.txt").sample("train", -1, 10))
    )
    cases = {
        "empty.txt": "empty.txt is empty",
        "latin.txt": r"latin.txt is not UTF-8: byte 0xe9 at offset 1,400,003",
        "missing.txt": "there is no file '.*missing.txt' .*; correct data.train",
        "*.md": r"no file matches '.*\*.md'",
        "": "is a directory",
    }
    assert_refused(
        r"data\.train.* scripts/join_books\.py",
        lambda: text_corpus("data/long-books/train.txt").files("train"),
    )
    for name, message in cases.items():
        assert_refused(message, documents, text_corpus(f"{tmp_path}/{name}"), "train")
    assert_refused(r"set data\.test", lambda: list(text_corpus(tmp_path).pieces("test")))


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Else the first word is unknown."""
    for name, content in {"marked.txt": "\ufeffthe cat\n", "plain.txt": "the cat\n"}.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    marked, plain = (text_corpus(tmp_path / f"{name}.txt") for name in ("marked", "plain"))
    assert list(marked.pieces("train")) == list(plain.pieces("train"))
    assert marked.description("train") != plain.description("train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "the".encode("utf-16"), "is UTF-16; convert it by iconv -f utf-16"),
        ("a.txt", "the".encode("utf-32"), "is UTF-32; convert it by iconv -f utf-32"),
        (
            "a.txt",
            "the".encode("utf-16-le"),
            "is no text, since it holds a NUL byte, as archives do; if it is UTF-16",
        ),
        ("a.txt", b"\0\0\xfe\xff\0\0\0t", "is UTF-32; convert it by iconv"),
        ("a.txt", b"%PDF-1.7\n%\xe2\xe3", "is a PDF; convert it"),
        ("a.zip", b"PK\x03\x04 rest", "is a zip archive; unzip it"),
        ("a.txt", gzip.compress(b"the cat", mtime=0), r"is a gzip file; name it with \.gz"),
        ("a.txt", bz2.compress(b"the cat"), r"is a bzip2 file; name it with \.bz2"),
        ("a.tar.gz", None, "is no text, since it holds a NUL byte, as archives do"),
    ],
)
def test_files_that_are_no_text_are_named(tmp_path, name, content, message):
    """A tar was read with its headers, and the advice for UTF-16 made other letters."""
    (tmp_path / "x.txt").write_text("the cat\n")
    if content is None:
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            archive.add(tmp_path / "x.txt", "x.txt")
    else:
        (tmp_path / name).write_bytes(content)
    assert_refused(message, lambda: list(text_corpus(tmp_path / name).pieces("train")))


@pytest.mark.parametrize("unit", ["word wörd\n", "no line ends but späces ", "漢字だけ"])
def test_long_documents_come_in_bounded_pieces_cut_where_nothing_changes(
    tmp_path, monkeypatch, unit
):
    monkeypatch.setattr(textfiles, "PIECE_BYTES", 1000)
    monkeypatch.setattr(streams, "PIECE_BYTES", 1000)
    text = unit * 700 + "the end"
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    for parts in (
        list(text_corpus(tmp_path / "long.txt").pieces("train")),
        list(streams.split_long(text.encode())),
    ):
        assert "".join(part.text for part in parts) == text
        assert [part.ends_document for part in parts] == [False] * (len(parts) - 1) + [True]
        assert len(parts) >= 3
        assert all(0 < len(part.text) <= 2000 for part in parts)
        if " " in unit:  # no word is cut
            assert [word for part in parts for word in part.text.split()] == text.split()
        if "\n" in unit:
            assert all(part.text.endswith("\n") for part in parts[:-1])


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_file(tmp_path):
    path = tmp_path / "big.txt"
    path.write_text("some words without a line end, " * 2_000_000)  # 62 MB
    tracemalloc.start()
    try:
        pieces = text_corpus(path).pieces("train")
        count = sum(len(ids) for ids in ByteTokenizer().encode_stream(pieces))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == path.stat().st_size
    assert most < 30e6


def test_description_is_of_the_content_not_of_the_name(tmp_path, monkeypatch):
    for name, text in {"a.txt": "same", "b.txt": "same", "c.txt": "Same"}.items():
        (tmp_path / name).write_text(text)
    a, b, c = (text_corpus(tmp_path / f"{name}.txt").description("train") for name in "abc")
    assert a == b != c
    monkeypatch.setattr(textfiles, "WHOLE_HASH_BYTES", 2)
    monkeypatch.setattr(textfiles, "END_BYTES", 2)
    a, c = (text_corpus(tmp_path / f"{name}.txt").description("train") for name in "ac")
    assert a["files"][0]["ends_sha256"] != c["files"][0]["ends_sha256"]


def test_limit_cuts_between_characters():
    stream = [Piece("añ".encode(), False), Piece("ñb".encode(), True), Piece(b"next", True)]
    for limit, expected in {
        1: "a",
        2: "a",
        3: "añ",
        4: "añ",
        5: "aññ",
        6: "aññb",
        8: "añññ"[:3] + "bne",
    }.items():
        got = list(streams.limit_bytes(stream, limit))
        assert "".join(piece.text for piece in got) == expected, limit
        assert got[-1].ends_document, limit
        assert all(piece.text for piece in got), limit
    assert list(streams.limit_bytes(stream, -1)) == stream
    assert list(streams.limit_bytes(stream, 8))[-1] == Piece(b"ne", True)
