"""Token files: right counts, found again by content, never half-written, and never silently wrong."""

import concurrent.futures
import dataclasses
import errno
import fcntl
import importlib
import os
import pathlib
import shutil
import sys
import time

import numpy as np
import pytest

from alibi import progress
from alibi.config import DataConfig
from alibi.data import shards, tokens
from alibi.data.textfiles import TextFiles
from alibi.data.tokenfile import load
from alibi.data.tokenizers import ByteTokenizer
from alibi.storage import cache
from tests.refusals import assert_refused

TRAIN, VALID = "one two\nthree\n\n", "one zwei two\n"


@pytest.fixture
def data(tmp_path):
    """A small text corpus and an empty cache."""
    for name, text in {"train": TRAIN, "valid": VALID}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    texts = {split: str(tmp_path / f"{split}.txt") for split in ("train", "valid")}
    return DataConfig(corpus="text", cache_dir=str(tmp_path / "cache"), **texts)


def directories(data, kind="tokens"):
    return sorted(
        path
        for path in (pathlib.Path(data.cache_dir) / kind).iterdir()
        if not path.name.endswith(".lock")
    )


def test_bytes_and_their_manifest(data):
    made = tokens.prepare(data, "train", progress=False)
    assert bytes(made.tokens[:].tolist()) == TRAIN.encode()
    assert made.tokens.dtype == np.uint8
    manifest = made.manifest
    assert (manifest.tokens, manifest.words, manifest.bytes, manifest.documents) == (15, 3, 15, 1)
    assert (manifest.corpus, manifest.split, manifest.tokenizer) == ("text", "train", "bytes")
    assert (manifest.vocab_size, manifest.boundary_id, manifest.unknown_words) == (256, 10, 0)
    assert manifest.tokenizer_fingerprint == made.tokenizer().fingerprint()
    assert data.train in manifest.source


def test_words_of_valid_by_the_dictionary_of_train(data):
    data = dataclasses.replace(data, tokenizer="words")
    made = tokens.prepare(data, "valid", progress=False)
    assert made.tokenizer().symbols[4:7] == ["one", "three", "two"]
    assert made.tokens[:].tolist() == [4, 3, 6, 2]
    assert (made.manifest.unknown_words, made.manifest.unk_in_text) == (1, 0)
    pathlib.Path(data.valid).write_text("one <unk> four a<unk> <unk>\n")
    manifest = tokens.prepare(data, "valid", progress=False).manifest
    assert (manifest.unknown_words, manifest.unk_in_text) == (4, 2)
    assert (made.manifest.words, made.manifest.bytes) == (3, len(VALID))


def test_large_vocabularies_take_four_bytes(data, tmp_path):
    (tmp_path / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(70_000)))
    (tmp_path / "valid.txt").write_text("w69999\n")
    data = dataclasses.replace(data, tokenizer="words", tokenizer_file=str(tmp_path / "dict.txt"))
    made = tokens.prepare(data, "valid", progress=False)
    assert made.tokens.dtype == np.uint32
    assert made.tokens[:].tolist() == [70_003, 2]


def test_found_again_by_content(data, tmp_path, monkeypatch):
    data = dataclasses.replace(data, tokenizer="bpe", bpe_vocab_size=260)
    first = tokens.prepare(data, "train", progress=False)
    (tmp_path / "moved.txt").write_text(TRAIN)
    data = dataclasses.replace(data, train=str(tmp_path / "moved.txt"))
    monkeypatch.setattr(shards, "write_shard", None)  # would fail if it were needed
    monkeypatch.setattr(tokens, "make_tokenizer", None)
    assert tokens.prepare(data, "train", progress=False).directory == first.directory


def test_what_changes_the_tokens_changes_the_directory(data, tmp_path):
    made = {tokens.prepare(data, split, progress=False).directory for split in ("train", "valid")}
    data = dataclasses.replace(data, max_train_bytes=5)
    cut = tokens.prepare(data, "train", progress=False)
    assert bytes(cut.tokens[:].tolist()) == b"one t"
    assert (cut.manifest.bytes, cut.manifest.max_bytes) == (5, 5)
    data = dataclasses.replace(data, max_valid_bytes=3)
    assert bytes(tokens.prepare(data, "valid", progress=False).tokens[:].tolist()) == b"one"
    (tmp_path / "train.txt").write_text("One t")
    made |= {cut.directory, tokens.prepare(data, "train", progress=False).directory}
    data = dataclasses.replace(data, tokenizer="words")
    made |= {tokens.prepare(data, "train", progress=False).directory}
    assert len(made) == 5


def test_an_existing_tokenizer_is_kept(data):
    data = dataclasses.replace(data, tokenizer="words")
    trained = tokens.prepare(data, "train", progress=False)
    data = dataclasses.replace(data, train=data.valid)
    made = tokens.prepare(data, "valid", trained.tokenizer(), progress=False)
    assert made.manifest.tokenizer_fingerprint == trained.manifest.tokenizer_fingerprint
    assert made.tokens[:].tolist() == [4, 3, 6, 2]


def test_a_users_own_text(data, tmp_path):
    cache_dir = tmp_path / "own"
    made = tokens.prepare_text(
        TextFiles({"file": data.train}), ByteTokenizer(), cache_dir, progress=False
    )
    assert bytes(made.tokens[:].tolist()) == TRAIN.encode()
    corpus = TextFiles({"file": [tmp_path / "valid.txt", tmp_path / "train.txt"]})
    both = tokens.prepare_text(corpus, ByteTokenizer(), cache_dir, progress=False)
    assert bytes(both.tokens[:].tolist()) == (VALID + TRAIN).encode()
    assert both.manifest.documents == 2


def test_the_cache_is_the_configs_or_the_environments(monkeypatch, tmp_path):
    monkeypatch.setenv("ALIBI_CACHE", str(tmp_path))
    assert cache.cache_root("x") == pathlib.Path("x")
    assert cache.cache_root("") == tmp_path
    monkeypatch.delenv("ALIBI_CACHE")
    assert cache.cache_root("") == pathlib.Path.home() / ".cache/alibi"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokens-00000.bin", lambda content: content[:9], "has 9 bytes and needs 15"),
        (
            "tokens-00000.bin",
            lambda content: b"O" + content[1:],
            "the SHA-256 of its ids is not that of manifest.json",
        ),
        ("manifest.json", lambda content: content[:-9], "is damaged"),
        (
            "manifest.json",
            lambda content: content.replace(b'"words": 3', b'"words": 7'),
            "manifest.json was altered",
        ),
        (
            "tokenizer/tokenizer_config.json",
            lambda content: b"[]",
            "no saved tokenizer, or a damaged one",
        ),
    ],
)
def test_a_damaged_token_file_says_which_directory_to_delete(data, file, change, message):
    path = tokens.prepare(data, "train", progress=False).directory / file
    path.write_bytes(change(path.read_bytes()))
    assert_refused(
        f"{message}.*; delete", lambda: tokens.prepare(data, "train", progress=False).tokenizer()
    )


def test_bad_requests(data, tmp_path):
    assert_refused("'dev'.* train, valid, test", tokens.prepare, data, "dev")
    assert_refused(r"data\.test is empty", tokens.prepare, data, "test")
    (tmp_path / "train.txt").write_text("")
    assert_refused(r"train\.txt is empty", tokens.prepare, data, "train", progress=False)
    assert not [path for path in directories(data) if path.suffix != ".parts"]


def test_no_space_left_is_explained_and_leaves_no_token_file(data, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert_refused(
        r"No space left on device.* data\.cache_dir", tokens.prepare, data, "train", progress=False
    )
    assert not [path for path in directories(data) if path.suffix != ".parts"]
    monkeypatch.undo()
    assert tokens.prepare(data, "train", progress=False).manifest.tokens == 15


def test_a_cache_that_cant_be_written_is_explained(data, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    data = dataclasses.replace(data, cache_dir=str(tmp_path / "file"))
    assert_refused(
        r"file.* can't be written .* data\.cache_dir", tokens.prepare, data, "train", progress=False
    )


def test_two_at_once_make_the_files_once(data, monkeypatch):
    """Threads as two processes: a lock belongs to an opened file."""
    data = dataclasses.replace(data, tokenizer="bpe", bpe_vocab_size=260)
    write, written = shards.write_shard, []

    def slow(path, *rest):
        written.append(path)
        time.sleep(0.5)  # both are here at once, if nothing keeps them apart
        return write(path, *rest)

    monkeypatch.setattr(shards, "write_shard", slow)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: tokens.prepare(data, "train", progress=False), range(2))
    assert one.tokens[:].tolist() == two.tokens[:].tolist()
    assert len(written) == 1
    assert directories(data) == [one.directory] == [two.directory]
    assert len(directories(data, "tokenizers")) == 1


def test_a_text_whose_name_is_no_utf8(data, tmp_path):
    """Its manifest names it in an escape, from which the name is read again."""
    named = tmp_path / "t\udcff.txt"
    try:
        shutil.copy(data.train, named)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    made = tokens.prepare(dataclasses.replace(data, train=str(named)), "train", progress=False)
    assert load(made.directory).manifest.source == f"text: {named}"


def test_a_cache_whose_name_is_no_utf8_is_refused(monkeypatch, tmp_path):
    """JAX, which keeps programs there, would raise an error of its own."""
    monkeypatch.setenv("ALIBI_CACHE", f"{tmp_path}/\udcff")
    assert_refused("misread", cache.cache_root)


def test_what_a_killed_process_left_is_removed(data, tmp_path):
    target = tmp_path / "cache" / "key"
    stale = target.with_name(f".{target.name}.0123")
    stale.mkdir(parents=True)
    (stale / "half").write_text("half")
    cache.find_or_make(target, lambda folder: (folder / "whole").write_text("whole"))
    assert not stale.exists()
    assert [path.name for path in target.iterdir()] == ["whole"]
    with target.with_name(f".{target.name}.lock").open("w") as lock:  # and the lock is free again
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_progress_goes_to_stderr_and_only_when_wanted(data, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    tokens.prepare(data, "train", progress=False)
    assert capsys.readouterr() == ("", "")
    tokens.prepare(dataclasses.replace(data, tokenizer="words"), "valid", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "text train, reading for words" in err
    assert "text valid" in err


OWN = """
import dataclasses

from alibi.data.corpus import Corpus, split_long


@dataclasses.dataclass(eq=False)
class Own(Corpus):
    times: int = 1

    def pieces(self, split):
        yield from split_long(b"one" * self.times)

    def description(self, split):
        return {"corpus": "own"}
"""


def test_a_corpus_from_outside_is_found_again_by_its_options_and_file(data, tmp_path, monkeypatch):
    """Its own description says neither."""
    monkeypatch.syspath_prepend(tmp_path)

    def text_of(code, **options):
        (tmp_path / "own_text.py").write_text(code)
        monkeypatch.delitem(sys.modules, "own_text", raising=False)
        importlib.invalidate_caches()
        given = dataclasses.replace(data, corpus="own_text:Own", options=options)
        made = tokens.prepare(given, "train", progress=False)
        return made.directory, bytes(made.tokens[:].tolist())

    first, again = text_of(OWN), text_of(OWN)
    assert first == again
    assert first[1] == b"one"
    assert text_of(OWN, times=2)[1] == b"oneone"
    assert text_of(OWN.replace('b"one"', 'b"three"'))[1] == b"three"
