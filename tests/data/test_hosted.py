"""Hub and TFDS datasets: their records as documents, and messages if they are not available."""

import dataclasses
import http.server
import importlib
import os
import shutil
import socket
import threading
import time

import numpy as np
import pytest

from alibi.config import DataConfig
from alibi.data import hosted
from alibi.data.tokens import check_sources, prepare
from alibi.training.setup import prepare_files
from tests.data.corpusmaker import documents, hub, text_corpus
from tests.refusals import assert_refused


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
def test_no_cell_of_a_dataset_stops_a_run(hub_folder, streaming, capsys):
    """A null is an empty document, and a printed line counts them. "NA", "null" and numbers are text
    in a .csv file, whose library reads nulls and numbers otherwise, and other columns are not read.
    """
    import datasets

    # a line is printed once in a process, and no other test has as many rows
    texts = ["one", None, "two", *["three"] * (40 + streaming)]
    table = datasets.Dataset.from_dict({"text": texts, "number": list(range(len(texts)))})
    table.to_parquet(hub_folder / "train-00000-of-00001.parquet")
    assert documents(hub(hub_folder, streaming=streaming), "train") == ["one", "", *texts[2:]]
    told = f"train: 1 of {len(texts)} rows have no text in column 'text' (null); they are empty documents\n"
    assert capsys.readouterr().err.endswith(told)
    cells = ["NA", '"two\nlines, ""quoted"""', "", "null", "12"]
    rows = ["number,text", *(f"{number},{cell}" for number, cell in enumerate(cells)), "NA,last"]
    folder = hub_folder.with_name(f"csv-{streaming}")
    folder.mkdir()
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    expected = ["NA", 'two\nlines, "quoted"', "", "null", "12", "last"]
    assert documents(hub(folder, streaming=streaming), "train") == expected
    assert documents(text_corpus(folder / "train.csv"), "train") == expected
    wrong = r"'body'.*data\.column"
    assert_refused(
        wrong, lambda: list(hub(folder, column="body", streaming=streaming).pieces("train"))
    )


def test_hub_splits_may_be_expressions_and_local_changes_are_seen(hub_folder):
    corpus = hub(hub_folder, train="train[:1]")
    assert documents(corpus, "train") == ["one\n"]
    before = corpus.description("train")
    assert before == corpus.description("train")
    (hub_folder / "more.txt").write_text("x")
    assert corpus.description("train") != before


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"column": "body"},
            r"'body'; set data\.column .* text, number",
        ),
        ({"column": "number"}, "row 0: column 'number'"),
        ({"train": "trian"}, r"trian .*\['train', 'validation'\].*data\.train"),
        ({"subset": "sub"}, r"'sub'.* \['default'\]"),
        ({"train": ""}, r"data\.train is empty"),
        ({"name": ""}, r"data\.name is empty"),
    ],
)
def test_hub_errors_list_what_exists(hub_folder, streaming, keys, message):
    assert_refused(
        message, lambda: list(hub(hub_folder, streaming=streaming, **keys).pieces("train"))
    )


def test_splits_are_checked_before_any_is_processed(hub_folder, tmp_path, monkeypatch):
    data = DataConfig(corpus="hub", name=str(hub_folder), cache_dir=str(tmp_path / "c"))
    with monkeypatch.context() as patch:
        # would fail if it were called
        patch.setattr("datasets.DatasetBuilder.download_and_prepare", None)
        wrong = r"data\.valid='valid': .* use train, validation,"
        assert_refused(wrong, check_sources, data, ("train", "valid"))
        check_sources(data, ("train",))
        data = dataclasses.replace(data, valid="train[:10%] + validation")
        check_sources(data, ("train", "valid"))
        for name in ("./nowhere", "/no/where", "a/b/c"):
            data = dataclasses.replace(data, name=name)
            assert_refused(f"'{name}'.*set data.name", check_sources, data, ("train",))
    data = dataclasses.replace(data, name=str(hub_folder), valid="")
    prepare(data, "train", progress=False)
    monkeypatch.setattr("datasets.load_dataset_builder", None)
    check_sources(data, ("train",))  # what is in the cache needs no look at the dataset


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unreachable_hub_is_reported_within_5_seconds(monkeypatch, tmp_path, streaming):
    import huggingface_hub.constants as constants

    # the discard port: nobody listens
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:word@127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    importlib.import_module("datasets")  # loading it is no part of what is measured
    start = time.monotonic()
    assert_refused(
        r"'org/tiny'.* http://\*\*\*@127.0.0.1:9 .*data\.name",
        lambda: list(hub("org/tiny", streaming=streaming).pieces("train")),
    )
    assert time.monotonic() - start < 5
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_refused(
        "HF_HUB_OFFLINE is set", lambda: list(hub("org/tiny", streaming=streaming).pieces("train"))
    )


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
    # The tokens say which state of an unpinned dataset they are of; the library would take it for
    # any other.
    data = DataConfig(
        corpus="hub",
        name="org/tiny",
        train="train",
        tokenizer="bytes",
        cache_dir=str(tmp_path / "c"),
    )
    data = dataclasses.replace(data, valid="")
    for _ in range(2):  # made, and found in the cache
        assert prepare_files(data)["train"].manifest.revision == "a" * 40
        said = f"hub: org/tiny, train: tokens of revision {'a' * 40}; set data.revision={'a' * 40} to keep to it\n"
        assert said in capsys.readouterr().err
    data = dataclasses.replace(data, revision="a" * 40)
    assert prepare(data, "train").manifest.revision == "", "the config says it"
    assert_refused(
        f"data.revision=b.* {'a' * 40}",
        lambda: list(hub("org/tiny", revision="b" * 40).pieces("train")),
    )
    # Tokens of another commit are read later.
    data = dataclasses.replace(data, revision="", tokenizer="words", valid="validation")
    assert prepare(data, "train").manifest.revision == "a" * 40
    shutil.copytree(cached, cached.with_name("b" * 40))
    os.utime(cached, (0, 0))  # the library takes the newest
    prepare_files(data)
    shown = capsys.readouterr().err
    for split, letter in (("train", "a"), ("validation", "b")):
        assert f"{split}: tokens of revision {letter * 40}; set data.revision=" in shown
    os.utime(cached)
    os.utime(cached.with_name("b" * 40), (0, 0))
    assert documents(hub("org/tiny", revision="a" * 40), "train") == ["one\n", "", "two"]
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_host_is_reachable_by_an_address_with_a_password() -> None:
    """Which HF_ENDPOINT may have, and whose errors said it."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert hosted.reachable([f"http://user:word@127.0.0.1:{server.server_port}"])
        server.shutdown()
    assert not hosted.reachable(["http://user:wo/rd@127.0.0.1"]), "no port is 'wo'"


def test_a_server_that_never_answers_is_given_up():
    """Many firewalls drop a request in silence."""
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


def tfds_corpus(folder, **options):
    return hub(folder, corpus="tfds", **options)


def test_tfds_records_are_documents(tfds_folder, monkeypatch):
    assert documents(tfds_corpus(tfds_folder), "train") == ["liné 0\n", "liné 1\n", "liné 2\n"]
    assert documents(tfds_corpus(tfds_folder), "valid") == ["liné 0\n"]
    # By its name, without a version, the latest is taken: the corpus says which that was.
    tfds = importlib.import_module("tensorflow_datasets")
    monkeypatch.setattr(tfds, "builder", lambda name, **_: tfds.builder_from_directory(tfds_folder))
    named = tfds_corpus("tiny_texts")
    assert documents(named, "valid") == ["liné 0\n"]
    assert named.revision == "1.0.0"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"column": "body"}, r"'body'; set data\.column"),
        ({"train": "trian"}, r"'trian'.*\['train', 'validation'\]"),
        ({"name": "nosuch"}, "nosuch not found"),
        ({"name": "huggingface:wikitext"}, r"set data\.corpus=hub"),
    ],
)
def test_tfds_errors_list_what_exists(tfds_folder, keys, message):
    assert_refused(message, lambda: list(tfds_corpus(tfds_folder, **keys).pieces("train")))
    wrong = r"data\.train='trian': .* use train, validation"
    assert_refused(wrong, lambda: tfds_corpus(tfds_folder, train="trian").check(["train"]))


def test_an_unreachable_tfds_is_reported_within_5_seconds(monkeypatch):
    monkeypatch.setattr(hosted, "reachable", lambda urls: False)
    pytest.importorskip("tensorflow_datasets")  # loading it is no part of what is measured

    start = time.monotonic()
    assert_refused("'lm1b'.*TFDS_DATA_DIR", lambda: list(tfds_corpus("lm1b").pieces("train")))
    assert time.monotonic() - start < 5
