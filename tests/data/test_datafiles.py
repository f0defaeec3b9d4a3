"""Data files: their rows are documents, in every form and packing the same ones."""

import gzip
import json

import pytest

from alibi.config import DataConfig
from alibi.data.textfiles import TextFiles
from alibi.data.tokenizers import ByteTokenizer
from alibi.data.tokens import make_corpus, prepare_text
from tests.data.corpusmaker import documents
from tests.refusals import assert_refused

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
    assert_refused(wrong, lambda: documents(corpus_of(path), "train"))
    if form != "csv":
        assert_refused(
            "row 0: column 'number'", lambda: documents(corpus_of(path, column="number"), "train")
        )
        path.write_bytes(path.read_bytes()[:-9])
        assert_refused(
            f"{path} is not a whole", lambda: documents(corpus_of(path, column="body"), "train")
        )


def test_objects_without_the_column_are_empty_documents(tmp_path):
    """As `datasets` reads them; an empty line is no row."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n\n{"other": 1}\n{"text": null}\n' + json.dumps({"text": "é"}))
    assert documents(corpus_of(path), "train") == ["one", "", "", "é"]


@pytest.mark.parametrize("line", ["5", "null", '"text"', '["text"]'])
def test_a_line_that_is_no_object(tmp_path, line):
    """First or later."""
    path = tmp_path / "rows.jsonl"
    for before in ("", '{"text": "one"}\n'):
        path.write_text(f"{before}{line}\n")
        assert_refused(r"rows\.jsonl.* object", documents, corpus_of(path), "train")


def test_a_quotation_that_never_ends_is_no_document(tmp_path):
    """All rows after it would be one text."""
    # as Excel writes it, and stray quotes as csv reads them
    (tmp_path / "rows.csv").write_text('\ufefftext\n"a "b" c" \nd"e')
    assert documents(corpus_of(tmp_path / "rows.csv"), "train") == ['a b" c" ', 'd"e']
    (tmp_path / "rows.csv").write_text('text\n"a ""b"" c"\n"d e\nf\ng\n')
    assert_refused(
        r"rows\.csv.*quotation", lambda: documents(corpus_of(tmp_path / "rows.csv"), "train")
    )


@pytest.mark.parametrize(
    ("name", "content"), [("rows.csv", "text,number\n"), ("rows.jsonl", "\n\n")]
)
def test_a_file_without_rows_has_no_documents(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert documents(corpus_of(tmp_path / name), "train") == []
    corpus = TextFiles({"file": str(tmp_path / name)})
    assert_refused(
        "empty.* --text_file", prepare_text, corpus, ByteTokenizer(), tmp_path, progress=False
    )
