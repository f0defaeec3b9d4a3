"""Shards: the same tokens however a text is cut and whoever makes them, and nothing is lost by a
kill.
"""

import dataclasses
import functools
import os
import pathlib
import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alibi.config import DataConfig
from alibi.data import shards, tokens
from alibi.data.corpus import BORDER
from alibi.data.shards import count_words
from alibi.data.textfiles import TextFiles
from alibi.data.tokenfile import TokenStream, shard_file
from alibi.data.tokenizers import train_bpe
from alibi.errors import UserError
from tests.data.corpusmaker import documents_in
from tests.refusals import assert_refused

LINES = [
    "it's  one\n",
    "\n",
    "two “words” more\n",
    "\t\n",
    "漢字 \u3000x\n",
    " three\n",
    "\n\n",
    "end of it <unk>\n",
]


@pytest.fixture
def data(tmp_path):
    """Two text files, of which the first leaves its last line open, and an empty cache."""
    (tmp_path / "a.txt").write_text("".join(LINES * 40) + "open", encoding="utf-8")
    (tmp_path / "b.txt").write_text("".join(LINES[::-1] * 25), encoding="utf-8")
    files = {"train": f"{tmp_path}/*.txt", "valid": "", "cache_dir": str(tmp_path / "whole")}
    return DataConfig(corpus="text", bpe_vocab_size=300, **files)


def made(data, cache, shard_bytes, monkeypatch, **how):
    data = dataclasses.replace(data, cache_dir=str(cache))
    monkeypatch.setattr(tokens, "SHARD_BYTES", shard_bytes)
    return tokens.prepare(data, "train", progress=False, **how)


def shards_of(file):
    return sorted(path.name for path in file.directory.glob("tokens*.bin"))


@pytest.mark.parametrize("end", ["file", "blank_line", "line"])
@pytest.mark.parametrize("tokenizer", ["bytes", "words", "bpe"])
def test_the_tokens_are_those_of_one_shard(data, tmp_path, monkeypatch, tokenizer, end):
    data = dataclasses.replace(data, tokenizer=tokenizer, document_end=end)
    whole = made(data, tmp_path / "whole", 1 << 30, monkeypatch)
    assert len(shards_of(whole)) == 1
    cut = made(data, tmp_path / "cut", 700, monkeypatch)
    assert len(shards_of(cut)) > 5
    assert cut.directory.name == whole.directory.name
    np.testing.assert_array_equal(cut.tokens, whole.tokens)
    assert cut.manifest == whole.manifest, "the hash too: it is of the ids"
    for limit in (1, 700, 1401, 2000):
        data = dataclasses.replace(data, max_train_bytes=limit)
        pair = [made(data, tmp_path / f"{size}", size, monkeypatch) for size in (1 << 30, 700)]
        np.testing.assert_array_equal(*(file.tokens for file in pair), err_msg=f"{limit}")
        assert pair[0].manifest == pair[1].manifest


def test_without_locks_the_file_that_another_process_finished_first_is_taken(
    data, tmp_path, monkeypatch
):
    def refuse(*_):
        raise OSError

    def overtaken(corpus, *sizes):
        yield from shards_made(corpus, *sizes)
        monkeypatch.setattr(TextFiles, "shards", shards_made)
        made(data, tmp_path / "cache", 700, monkeypatch)

    shards_made = TextFiles.shards
    monkeypatch.setattr(TextFiles, "shards", overtaken)
    monkeypatch.setattr("fcntl.flock", refuse)
    assert len(shards_of(made(data, tmp_path / "cache", 700, monkeypatch))) > 5


def test_a_packed_file_is_cut_in_its_stream(data, tmp_path, monkeypatch):
    import gzip

    whole = made(data, tmp_path / "whole", 1 << 30, monkeypatch)
    for name in ("a.txt", "b.txt"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    data = dataclasses.replace(data, train=f"{tmp_path}/*.gz")
    monkeypatch.setattr("alibi.data.textfiles.PIECE_BYTES", 300)
    cut = made(data, tmp_path / "cut", 700, monkeypatch)
    assert len(shards_of(cut)) > 5
    assert cut.tokens[:].tolist() == whole.tokens[:].tolist()


BPE = train_bpe(["".join(LINES) * 3], 320)


@given(st.text(alphabet=st.sampled_from("\n\n \tab'é漢“\u3000\u2028!"), max_size=60))
def test_byte_level_bpe_has_a_border_where_shards_may_be_cut(text):
    whole = BPE.encode(text, add_special_tokens=False).ids
    for border in BORDER.finditer(text.encode()):
        head, tail = (
            part.decode()
            for part in (text.encode()[: border.start()], text.encode()[border.start() :])
        )
        assert [
            id for part in (head, tail) for id in BPE.encode(part, add_special_tokens=False).ids
        ] == whole


def test_workers_make_what_one_process_makes(data, tmp_path, monkeypatch):
    data = dataclasses.replace(data, tokenizer="words")
    alone = made(data, tmp_path / "alone", 2000, monkeypatch)
    other = made(data, tmp_path / "workers", 2000, monkeypatch, workers=2)
    assert (other.directory.name, other.manifest) == (alone.directory.name, alone.manifest)
    assert other.tokens[:].tolist() == alone.tokens[:].tolist()
    assert sorted(path.name for path in other.directory.iterdir()) == [
        "manifest.json", "tokenizer", *shards_of(alone)
    ]  # fmt: skip
    assert not [path for path in other.directory.parent.iterdir() if path.suffix == ".parts"]


def test_a_worker_that_fails_or_dies_says_why():
    assert_refused("invalid literal", lambda: shards.in_workers([functools.partial(int, "x")]))
    assert_refused(
        "killed, .* memory",
        lambda: shards.in_workers([functools.partial(os._exit, 9)]),
        raised=UserError,
    )


def test_whole_shards_outlive_a_kill(data, tmp_path, monkeypatch):
    whole = made(data, tmp_path / "whole", 700, monkeypatch)
    write, written = shards.write_shard, []

    def killed_at_the_fourth(path, *rest):
        written.append(path.name)
        if len(written) == 4:
            path.with_name(f".{path.name}.0123").write_text("half")
            raise KeyboardInterrupt
        return write(path, *rest)

    monkeypatch.setattr(shards, "write_shard", killed_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        made(data, tmp_path / "again", 700, monkeypatch)
    again = made(data, tmp_path / "again", 700, monkeypatch)
    names = [shard_file(number) for number in range(len(shards_of(whole)))]
    assert written == [*names[:4], *names[3:]]
    assert again.manifest == whole.manifest
    assert again.tokens[:].tolist() == whole.tokens[:].tolist()
    assert not list(again.directory.glob(".*"))


def test_a_stream_reads_like_the_array_that_its_files_make(tmp_path):
    parts = [
        np.arange(start, stop, dtype="<u2") for start, stop in ((0, 5), (5, 5), (5, 6), (6, 20))
    ]
    files = [tmp_path / f"{number}" for number in range(4)]
    for file, part in zip(files, parts, strict=True):
        part.tofile(file)
    stream, whole = (
        TokenStream(files, [part.size for part in parts], np.dtype("<u2")),
        np.arange(20),
    )
    assert (len(stream), stream.dtype) == (20, np.uint16)
    for start in range(-3, 22):
        for stop in range(-3, 22):
            assert stream[start:stop].tolist() == whole[start:stop].tolist()
    assert [stream[i] for i in (0, 4, 5, 6, -1, np.int64(19))] == [0, 4, 5, 6, 19, 19]
    assert np.asarray(stream, np.int32).tolist() == stream[:].tolist() == whole.tolist()
    stream.will_read(3, 50)
    with pytest.raises(IndexError):
        stream[20]
    assert_refused("step, but got 2", lambda: stream[::2])


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/smaps").exists(), reason="only Linux tells what a map was advised"
)
def test_the_kernel_is_told_that_reads_are_random(data, tmp_path, monkeypatch):
    file = made(data, tmp_path / "cache", 1 << 30, monkeypatch)
    assert file.tokens[0] is not None
    maps = pathlib.Path("/proc/self/smaps").read_text()
    of_file = maps[maps.index(str(file.directory / shard_file(0))) :]
    assert " rr " in re.search(r"VmFlags:.*", of_file)[0] + " "


# Counts.


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]))
    | st.text(alphabet=" \t\n\x1c\x85\xa0\u1680\u2003\u2028\u205f\u3000aé“漢")
)
def test_words_are_counted_as_python_splits(text):
    assert count_words(text.encode()) == len(text.split())


# Documents.


@pytest.mark.parametrize(("line_end", "space"), [("\n", ""), ("\r\n", ""), ("\n", " \t")])
def test_blank_lines_end_documents(tmp_path, monkeypatch, line_end, space):
    """Wherever pieces end, even in the middle of a line end, wherever shards are cut, and also if
    blank lines hold a space, as in WikiText.
    """
    documents = [
        "one\ntwo\n\n",
        "a document longer than a piece\nand more of it\n\n\n\n",
        "three\n\n",
        "open",
    ]
    documents = [text.replace("\n\n", f"\n{space}\n").replace("\n", line_end) for text in documents]
    (tmp_path / "cc.txt").write_bytes("".join(documents).encode())
    corpus = TextFiles({"train": str(tmp_path / "cc.txt"), "document_end": "blank_line"})
    for size in range(1, 24):
        monkeypatch.setattr("alibi.data.textfiles.PIECE_BYTES", size)
        assert documents_in(corpus.pieces("train")) == documents
        shards = [documents_in(shard.pieces) for shard in corpus.shards("train", -1, 4 * size)]
        assert [document for shard in shards for document in shard] == documents


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_many_empty_lines_take_no_time(tmp_path, line_end):
    """A search from each of 100,000 line ends to the last one took minutes."""
    text = f"one{line_end}{line_end * 100_000}two"
    (tmp_path / "a.txt").write_bytes(text.encode())
    corpus = TextFiles({"train": str(tmp_path / "a.txt"), "document_end": "blank_line"})
    start = time.monotonic()
    assert documents_in(corpus.pieces("train")) == [text[:-3], "two"]
    assert time.monotonic() - start < 5


def test_lines_are_documents(tmp_path, monkeypatch):
    """A line end belongs to no document, and the last line may lack its end."""
    (tmp_path / "a.txt").write_bytes(b"one line\n\n a longer line \r\nopen")
    (tmp_path / "b.txt").write_bytes(b"closed\n")
    corpus = TextFiles({"train": f"{tmp_path}/*.txt", "document_end": "line"})
    for size in range(1, 20):
        monkeypatch.setattr("alibi.data.textfiles.PIECE_BYTES", size)
        lines = documents_in(corpus.pieces("train"))
        assert lines == ["one line", "", " a longer line ", "open", "closed"]


def test_an_unknown_document_end():
    assert_refused(
        r"data\.document_end='lines'.* blank_line",
        TextFiles,
        {"train": "x", "document_end": "lines"},
    )
