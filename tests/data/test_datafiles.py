"""Data files: their rows are documents, in every form and packing the same ones."""

import gzip
import json

import pytest

from alibi.config import DataConfig
from alibi.data.tokens import make_corpus
from tests.data.corpusmaker import documents

ROWS = ["one\n", "", "två, “quoted”\n\nand more", "NA", "x" * 200_000]


@pytest.fixture
def files(tmp_path):
    """A file of each form, with a column beside the text."""
    import datasets

    table = datasets.Dataset.from_dict({"number": list(range(len(ROWS))), "body": ROWS})
    table.to_parquet(tmp_path / "rows.parquet")
    table.to_csv(tmp_path / "rows.csv", index=False)
    table.to_json(tmp_path / "rows.jsonl")
    for name in ("rows.csv", "rows.jsonl"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    return tmp_path


def corpus_of(place, **options):
    return make_corpus(DataConfig(corpus="text", train=str(place), **options))


@pytest.mark.parametrize("end", ["file", "line"])
def test_rows_are_documents(files, end):
    """However texts end: no markup is read, and a row that is longer than csv's limit is whole."""
    paths = sorted(files.glob("rows.*"))
    assert len(paths) == 5
    for path in paths:
        corpus = corpus_of(path, column="body", document_end=end)
        assert documents(corpus, "train") == ROWS, path
        assert corpus.size("train") is None
        other = corpus_of(path, column="number", document_end=end)
        assert corpus.description("train") != other.description("train")


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_a_wrong_column_and_a_damaged_file(files, form):
    path = files / f"rows.{form}"
    wrong = f"rows.{form} has no column 'text'; set data.column or --column to one of number, body"
    with pytest.raises(ValueError, match=wrong):
        documents(corpus_of(path), "train")
    if form != "csv":
        with pytest.raises(ValueError, match="row 0: column 'number' holds int, not text"):
            documents(corpus_of(path, column="number"), "train")
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(ValueError, match=f"{path} is not a whole .{form} file"):
            documents(corpus_of(path, column="body"), "train")


def test_objects_without_the_column_are_empty_documents(tmp_path):
    """As `datasets` reads them; an empty line is no row, and a list has no columns."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n\n{"other": 1}\n{"text": null}\n' + json.dumps({"text": "é"}))
    assert documents(corpus_of(path), "train") == ["one", "", "", "é"]
    path.write_text('["one"]\n')
    with pytest.raises(ValueError, match=r"no column 'text'.* to one of one"):
        documents(corpus_of(path), "train")
