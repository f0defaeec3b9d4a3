"""Where text comes from: the embedded books, files, and datasets in the hub's and TFDS's own formats."""

import gzip
import importlib
import json
import lzma
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import zstandard

from alibi.data import corpora, hosted, pieces, textfiles
from alibi.data.corpora import make_corpus
from alibi.data.pieces import Piece
from alibi.data.tokens import prepare
from alibi.training.setup import prepare_files
from configs import base

PLACES = {"train": "train", "valid": "validation", "test": ""}


def data_config(**keys):
    config = base.get_config().data
    for key, value in keys.items():
        config[key] = value
    return config


def text_corpus(place):
    return make_corpus(data_config(corpus="text", train=str(place)))


def hub(folder, **options):
    defaults = {"subset": "", "revision": "", "column": "text", "streaming": False}
    return hosted.Hub(PLACES, str(folder), **(defaults | options))


def documents(corpus, split):
    """Each whole."""
    parts, found = [], []
    for piece in corpus.pieces(split):
        parts.append(piece.text)
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    assert not parts, "the last document was left open"
    return found


# The embedded books.


def test_books_are_whole_different_and_small():
    index = json.loads((corpora.BOOKS / "index.json").read_text())
    assert set(index) == {"train", "valid", "test"}
    held_out = {book["author"] for book in index["valid"] + index["test"]}
    assert not held_out & {book["author"] for book in index["train"]}
    assert sum(path.stat().st_size for path in corpora.BOOKS.iterdir()) < 3_000_000
    corpus = make_corpus(data_config(test="test"))
    for split, books in index.items():
        whole = documents(corpus, split)
        assert [len(text.encode()) for text in whole] == [book["bytes"] for book in books]
        assert [len(text.split()) for text in whole] == [book["words"] for book in books]
        # So that bytes are tokens and no separator is needed between two books.
        assert all(text.endswith("\n") and "\r" not in text for text in whole)


def test_a_damaged_book_is_named(tmp_path, monkeypatch):
    for path in corpora.BOOKS.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    packed = tmp_path / "valid.txt.xz"
    packed.write_bytes(packed.read_bytes()[:50_000])
    monkeypatch.setattr(corpora, "BOOKS", tmp_path)
    with pytest.raises(ValueError, match=r"valid\.txt\.xz is damaged at the book 'The Descent of Man"):
        list(make_corpus(data_config()).pieces("valid"))


def test_unknown_names_list_those_that_exist():
    with pytest.raises(
        ValueError, match=r"data\.valid='nope' is no split of the embedded books; use one of train, valid, test"
    ):
        list(make_corpus(data_config(valid="nope")).pieces("valid"))
    with pytest.raises(ValueError, match=r"data\.corpus='book' is unknown; use one of books, text, hub, tfds"):
        make_corpus(data_config(corpus="book"))
    with pytest.raises(ValueError, match=r"data\.streaming=True is of corpus=hub only: tfds prepares a dataset first"):
        make_corpus(data_config(corpus="tfds", name="lm1b", streaming=True))


def test_titles_say_which_text_it_is():
    """Result rows are told by them; "hub" or "text" would say nothing."""
    named = {"name": "Salesforce/wikitext", "subset": "wikitext-103-v1"}
    assert make_corpus(data_config(corpus="hub", **named)).title("valid") == "Salesforce/wikitext/wikitext-103-v1"
    assert make_corpus(data_config(corpus="tfds", name="lm1b")).title("train") == "lm1b"
    assert make_corpus(data_config(corpus="hub", name=str(pathlib.Path(__file__).parent))).title("test") == "data"
    assert text_corpus("a/one.txt,b/*.gz").title("train") == "one.txt,*.gz"
    assert make_corpus(data_config()).title("valid") == "books"


# Text files.


def test_files_and_globs_in_order_whatever_the_packing(tmp_path):
    texts = {"b.txt": "bé\n", "a.txt": "a a\n", "c.txt.gz": "c\n", "d.txt.xz": "d\n", "e.zst": "e\n"}
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    for name, text in texts.items():
        path = tmp_path / name
        path.write_bytes(pack.get(path.suffix, bytes)(text.encode()))
    corpus = text_corpus(f"{tmp_path}/c.txt.gz, {tmp_path}/*.txt,{tmp_path}/e.zst,{tmp_path}/d.txt.xz")
    assert documents(corpus, "train") == ["c\n", "a a\n", "bé\n", "e\n", "d\n"]
    assert corpus.size("train") is None
    assert text_corpus(tmp_path / "*.txt").size("train") == 8


def test_a_comma_in_a_name_is_no_separator_when_the_file_exists(tmp_path):
    (tmp_path / "a,b.txt").write_text("x")
    assert documents(text_corpus(tmp_path / "a,b.txt"), "train") == ["x"]


def test_zst_of_several_frames(tmp_path):
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "a.zst").write_bytes(pack(b"one\n" * 9000) + pack(b"two\n" * 9000))
    assert documents(text_corpus(tmp_path / "a.zst"), "train") == ["one\n" * 9000 + "two\n" * 9000]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".zst", None)])
def test_a_truncated_packed_file_is_an_error(tmp_path, suffix, pack):
    text = "".join(f"line {i * i}\n" for i in range(20_000)).encode()
    packed = pack(text) if pack else zstandard.ZstdCompressor().compress(text)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(packed[:-40])
    with pytest.raises(ValueError, match=rf"a\{suffix} is not a whole \{suffix} file .*; fetch or pack it again"):
        list(text_corpus(path).pieces("train"))


def test_bad_files_say_what_and_where(tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"x\n" * 700_000 + b"caf\xe9 au lait\n")
    cases = {
        "empty.txt": "empty.txt is empty",
        "latin.txt": r"latin.txt is not UTF-8: byte 0xe9 at offset 1,400,003",
        "missing.txt": "there is no file '.*missing.txt' .*; correct data.train",
        "*.md": r"no file matches '.*\*.md'",
        "": "is a directory",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            list(text_corpus(f"{tmp_path}/{name}").pieces("train"))
    with pytest.raises(ValueError, match=r"data\.test is empty.*set data\.test"):
        list(text_corpus(tmp_path).pieces("test"))


@pytest.mark.parametrize("unit", ["word wörd\n", "no line ends but späces ", "漢字だけ"])
def test_long_documents_come_in_bounded_pieces_cut_where_nothing_changes(tmp_path, monkeypatch, unit):
    monkeypatch.setattr(textfiles, "PIECE_BYTES", 1000)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    text = unit * 700 + "the end"
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    for parts in (list(text_corpus(tmp_path / "long.txt").pieces("train")), list(pieces.split_long(text))):
        assert "".join(part.text for part in parts) == text
        assert [part.ends_document for part in parts] == [False] * (len(parts) - 1) + [True]
        assert len(parts) >= 3
        assert all(0 < len(part.text) <= 2000 for part in parts)
        if " " in unit:  # no word is cut
            assert [word for part in parts for word in part.text.split()] == text.split()
        if "\n" in unit:
            assert all(part.text.endswith("\n") for part in parts[:-1])


def test_memory_is_bounded_whatever_the_file(tmp_path):
    path = tmp_path / "big.txt"
    path.write_text("some words without a line end, " * 2_000_000)  # 62 MB
    code = f"""
import resource
import sys
from alibi.data.textfiles import TextFiles
from alibi.data.tokenizers import ByteTokenizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus = TextFiles({{"train": [{str(path)!r}]}})
count = sum(len(ids) for ids in ByteTokenizer().encode_stream(corpus.pieces("train")))
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(count, used // 1024 if sys.platform == "darwin" else used)  # macOS counts bytes
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=base_folder())
    count, kibibytes = map(int, done.stdout.split())
    assert count == path.stat().st_size
    assert kibibytes < 30_000


def base_folder() -> pathlib.Path:
    return pathlib.Path(__file__).resolve().parents[2]


def test_description_is_of_the_content_not_of_the_name(tmp_path, monkeypatch):
    for name, text in {"a.txt": "same", "b.txt": "same", "c.txt": "Same"}.items():
        (tmp_path / name).write_text(text)
    a, b, c = (text_corpus(tmp_path / f"{name}.txt").description("train") for name in "abc")
    assert a == b != c
    monkeypatch.setattr(textfiles, "WHOLE_HASH_BYTES", 2)
    monkeypatch.setattr(textfiles, "_END_BYTES", 2)
    a, c = (text_corpus(tmp_path / f"{name}.txt").description("train") for name in "ac")
    assert a["files"][0]["ends_sha256"] != c["files"][0]["ends_sha256"]


def test_limit_cuts_between_characters():
    stream = [Piece("añ", False), Piece("ñb", True), Piece("next", True)]
    for limit, expected in {1: "a", 2: "a", 3: "añ", 4: "añ", 5: "aññ", 6: "aññb", 8: "añññ"[:3] + "bne"}.items():
        got = list(pieces.limit_bytes(stream, limit))
        assert "".join(piece.text for piece in got) == expected, limit
        assert got[-1].ends_document, limit
        assert all(piece.text for piece in got), limit
    assert list(pieces.limit_bytes(stream, -1)) == stream
    assert list(pieces.limit_bytes(stream, 8))[-1] == Piece("ne", True)


# Hosted datasets.


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """A dataset as it lies on the hub: a parquet file for a split."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "tiny"
    for split, rows in {"train": ["one\n", "", "two"], "validation": ["three"]}.items():
        table = datasets.Dataset.from_dict({"text": rows, "number": list(range(len(rows)))})
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_rows_are_documents(hub_folder, streaming):
    corpus = hub(hub_folder, streaming=streaming)
    assert documents(corpus, "train") == ["one\n", "", "two"]
    assert documents(corpus, "valid") == ["three"]


def test_hub_splits_may_be_expressions_and_local_changes_are_seen(hub_folder):
    corpus = hosted.Hub({"train": "train[:1]"}, str(hub_folder), subset="", revision="", column="text", streaming=False)
    assert documents(corpus, "train") == ["one\n"]
    before = corpus.description("train")
    assert before == corpus.description("train")
    (hub_folder / "more.txt").write_text("x")
    assert corpus.description("train") != before


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_errors_list_what_exists(hub_folder, tmp_path, streaming):
    with pytest.raises(ValueError, match=r"no column 'body'; set data.column to one of text, number"):
        list(hub(hub_folder, column="body", streaming=streaming).pieces("train"))
    with pytest.raises(ValueError, match="row 0: column 'number' holds int, not text"):
        list(hub(hub_folder, column="number", streaming=streaming).pieces("train"))
    bad_split = hosted.Hub(
        {"train": "trian"}, str(hub_folder), subset="", revision="", column="text", streaming=streaming
    )
    with pytest.raises(ValueError, match=r"trian can't be loaded: .*\['train', 'validation'\].*Check .*data\.train"):
        list(bad_split.pieces("train"))
    with pytest.raises(ValueError, match=r"can't be loaded: .*'sub' not found. Available: \['default'\]"):
        list(hub(hub_folder, subset="sub", streaming=streaming).pieces("train"))
    with pytest.raises(ValueError, match=r"data\.test is empty"):
        list(hub(hub_folder).pieces("test"))
    with pytest.raises(ValueError, match=r"data\.name is empty"):
        hub("")
    if not streaming:
        import datasets

        rows = datasets.Dataset.from_dict({"text": ["one"]})
        for saved in (rows, datasets.DatasetDict({"train": rows})):
            saved.save_to_disk(tmp_path / "saved")
            with pytest.raises(ValueError, match=r"saved was written by save_to_disk, .*load_from_disk, .*to_parquet"):
                list(hub(tmp_path / "saved").pieces("train"))
            shutil.rmtree(tmp_path / "saved")


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unreachable_hub_is_reported_within_5_seconds(monkeypatch, tmp_path, streaming):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    importlib.import_module("datasets")  # loading it is no part of what is measured
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"'org/tiny' can't be reached: http://127.0.0.1:9 doesn't answer.*data\.name"):
        list(hub("org/tiny", streaming=streaming).pieces("train"))
    assert time.monotonic() - start < 5
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        list(hub("org/tiny", streaming=streaming).pieces("train"))


def test_without_a_network_a_cached_hub_dataset_is_used(hub_folder, tmp_path, monkeypatch, capsys):
    import datasets
    import huggingface_hub.constants as constants

    list(hub(hub_folder).pieces("train"))
    (made,) = (path.parent for path in (tmp_path / "hf").rglob("dataset_info.json"))
    # Where the library puts the same files when they come from the hub at a commit.
    cached = tmp_path / "hf" / "org___tiny" / "default" / "0.0.0" / ("a" * 40)
    cached.parent.mkdir(parents=True)
    made.rename(cached)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    assert documents(hub("org/tiny"), "train") == ["one\n", "", "two"]
    # The tokens say which state of an unpinned dataset they are of; the library would take it for any other.
    data = data_config(corpus="hub", name="org/tiny", train="train", tokenizer="bytes", cache_dir=str(tmp_path / "c"))
    data.valid = ""
    for _ in range(2):  # made, and found in the cache
        assert prepare_files(data)["train"].manifest.revision == "a" * 40
        said = f"hub: org/tiny, train: tokens of revision {'a' * 40}; set data.revision={'a' * 40} to keep to it\n"
        shown = capsys.readouterr().err
        assert said in shown
        assert "revisions differ" not in shown
    data.revision = "a" * 40
    assert prepare(data, "train").manifest.revision == "", "the config says it"
    found = f"data.revision={'b' * 40}, but .* found only commit {'a' * 40} in its cache"
    with pytest.raises(ValueError, match=f"{found}; check data.revision, your access and the network"):
        list(hub("org/tiny", revision="b" * 40).pieces("train"))
    # A dictionary is made of the first commit, and tokens of another one are read later.
    data.update(revision="", tokenizer="words", valid="validation")
    assert prepare(data, "train").tokenizer().revision == "a" * 40
    shutil.copytree(cached, cached.with_name("b" * 40))
    os.utime(cached, (0, 0))  # the library takes the newest
    prepare_files(data)
    differ = f"revisions differ: train of {'a' * 40}, valid of {'b' * 40}, tokenizer of {'a' * 40}; set data.revision"
    assert differ in capsys.readouterr().err
    with pytest.raises(
        ValueError, match=f"newest copy in its cache, of commit {'b' * 40}; touch {cached} and run again"
    ):
        list(hub("org/tiny", revision="a" * 40).pieces("train"))
    os.utime(cached)
    os.utime(cached.with_name("b" * 40), (0, 0))
    assert documents(hub("org/tiny", revision="a" * 40), "train") == ["one\n", "", "two"]
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_reachable_gives_up_on_a_server_that_never_answers():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        assert not hosted.reachable([f"http://127.0.0.1:{silent.getsockname()[1]}"], seconds=0.3)
        assert time.monotonic() - start < 3


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    """A dataset prepared by TFDS itself as array_record, without TensorFlow."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class TinyTexts(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict(
                {"text": tfds.features.Text(), "number": tfds.features.Scalar(dtype=np.int64)}
            )
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(3), "validation": self._generate_examples(1)}

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {"text": f"liné {i}\n", "number": i}

    builder = TinyTexts(data_dir=tmp_path_factory.mktemp("tfds"), file_format="array_record")
    builder.download_and_prepare()
    return builder.data_dir


def tfds_corpus(name, **options):
    return hosted.Tfds(PLACES, str(name), **({"subset": "", "revision": "", "column": "text"} | options))


def test_tfds_records_are_documents(tfds_folder, monkeypatch):
    assert documents(tfds_corpus(tfds_folder), "train") == ["liné 0\n", "liné 1\n", "liné 2\n"]
    assert documents(tfds_corpus(tfds_folder), "valid") == ["liné 0\n"]
    # By its name, without a version, the latest is taken: the corpus says which that was.
    tfds = importlib.import_module("tensorflow_datasets")
    monkeypatch.setattr(tfds, "builder", lambda name, **_: tfds.builder_from_directory(tfds_folder))
    named = tfds_corpus("tiny_texts")
    assert documents(named, "valid") == ["liné 0\n"]
    assert named.revision == "1.0.0"


def test_tfds_errors_list_what_exists(tfds_folder):
    with pytest.raises(ValueError, match=r"no column 'body'; set data.column to one of "):
        list(tfds_corpus(tfds_folder, column="body").pieces("train"))
    wrong = hosted.Tfds({"train": "trian"}, str(tfds_folder), subset="", revision="", column="text")
    with pytest.raises(ValueError, match=r"can't be loaded: .*'trian'.*\['train', 'validation'\]"):
        list(wrong.pieces("train"))
    with pytest.raises(ValueError, match=r"can't be loaded: Dataset nosuch not found"):
        list(tfds_corpus("nosuch").pieces("train"))
    with pytest.raises(ValueError, match=r"set data\.corpus=hub"):
        list(tfds_corpus("huggingface:wikitext").pieces("train"))


def test_an_unreachable_tfds_is_reported_within_5_seconds(monkeypatch):
    monkeypatch.setattr(hosted, "reachable", lambda urls: False)
    pytest.importorskip("tensorflow_datasets")  # loading it is no part of what is measured

    start = time.monotonic()
    with pytest.raises(ValueError, match=r"'lm1b' can't be reached: it isn't prepared in .*TFDS_DATA_DIR"):
        list(tfds_corpus("lm1b").pieces("train"))
    assert time.monotonic() - start < 5
