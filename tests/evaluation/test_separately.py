"""Documents scored each on its own: the numbers of documents alone, whatever lies beside them."""

import json

import numpy as np
import pytest
import tokenizers as hf

from alibi.config import DataConfig
from alibi.data.textfiles import TextFiles
from alibi.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    WordTokenizer,
    bpe,
    given_tokenizer,
    train_bpe,
)
from alibi.data.tokens import prepare_text
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.scorer import Scorer, run_scorer
from alibi.evaluation.separately import documents_of
from alibi.reporting.panels import caption, panel_groups
from alibi.reporting.rows import read_rows
from alibi.runs.trained import TrainedRun
from tests.data.corpusmaker import sentencepiece_model
from tests.evaluation.runs import options_of
from tests.refusals import assert_refused

TEXT = "one\ntwo\n\nthree, longer than a window\n\n\nfour\nfive"
WORDS = dict.fromkeys(("<s>", "<pad>", "</s>", "<unk>", "one", "two", "four"), 1)
TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "words": WordTokenizer(WORDS),
    "bpe": BpeTokenizer(train_bpe([TEXT], 270), "<|endoftext|>"),
}


def found(folder, text, end, tokenizer):
    path = folder / "text.txt"
    path.write_text(text)
    corpus = TextFiles({"file": str(path), "document_end": end})
    return documents_of(prepare_text(corpus, tokenizer, folder / "cache", progress=False), corpus)


@pytest.mark.parametrize("end", ["file", "blank_line", "line"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_documents_are_found_among_the_tokens(tmp_path, name, end):
    """Each is the document encoded alone, with the boundary after it; in bytes a newline follows a
    line.
    """
    parts = {
        "file": [TEXT],
        "blank_line": ["one\ntwo\n\n", "three, longer than a window\n\n\n", "four\nfive"],
        "line": TEXT.split("\n"),
    }
    if name == "bytes" and end == "line":
        parts["line"] = [part + "\n" for part in parts["line"][:-1]] + parts["line"][-1:]
    expected = [TOKENIZERS[name].encode(part).tolist() for part in parts[end]]
    assert [ids.tolist() for ids in found(tmp_path, TEXT, end, TOKENIZERS[name])] == expected


def unigram():
    """Returns a tokenizer that writes a space before each document, with `</s>` in its vocabulary
    as T5's has it.
    """
    scores = [("<unk>", -9.0), ("</s>", 0.0), *((letter, -5.0) for letter in "\u2581\nehnortw,x")]
    library = hf.Tokenizer(hf.models.Unigram([*scores, ("\u2581t", -2.0), ("wo", -3.0)], unk_id=0))
    library.pre_tokenizer = hf.pre_tokenizers.Metaspace()
    return BpeTokenizer(library, "</s>")


def sentencepiece(folder):
    lines = ["one two three", "longer than a window", "x" * 50]
    (folder / "spm.model").write_bytes(sentencepiece_model(lines, vocab_size=30, model_type="bpe"))
    return given_tokenizer(DataConfig(tokenizer="bpe", tokenizer_file=str(folder / "spm.model")))


@pytest.mark.parametrize("end", ["file", "blank_line", "line"])
@pytest.mark.parametrize("kind", ["unigram", "sentencepiece"])
def test_documents_of_tokenizers_that_read_a_document_whole(tmp_path, monkeypatch, kind, end):
    """Also a document longer than a batch, and documents in several shards."""
    monkeypatch.setattr(bpe, "BATCH_CHARS", 400)
    monkeypatch.setattr("alibi.data.tokens.SHARD_BYTES", 1_000)
    tokenizer = unigram() if kind == "unigram" else sentencepiece(tmp_path)
    long = "one two three, " * 200
    parts = {
        "file": [f"one\ntwo\n\n{long}\n\nthree"],
        "blank_line": ["one\ntwo\n\n", f"{long}\n\n", "three"],
        "line": ["one", "two", "", long, "", "three"],
    }
    documents = found(tmp_path, parts["file"][0], end, tokenizer)
    content = tokenizer.hub_file()[1]  # the library encodes each document as one text
    library = (bpe.SentencePiece if kind == "sentencepiece" else hf.Tokenizer.from_buffer)(content)
    assert [ids.tolist() for ids in documents] == [
        [*library.encode(part, add_special_tokens=False).ids, tokenizer.boundary_id]
        for part in parts[end]
    ]
    assert sum(ids.tolist().count(tokenizer.boundary_id) for ids in documents) == len(documents)


@pytest.mark.parametrize("tokenizer", [TOKENIZERS["words"], unigram()])
def test_a_text_that_spells_the_boundary(tmp_path, tokenizer):
    assert_refused(
        r"text\.txt has 3 .* 2 ends", found, tmp_path, "one </s> two\nfour\n", "line", tokenizer
    )


def test_the_numbers_are_those_of_each_document_alone(tmp_path, learned_run):
    """Among them one longer than a window, one as long as one, and an empty line. Learned positions
    tell where a document begins, beside what it sees.
    """
    text = "one\ntwo\n\nthree, longer than a window\n\nas long as this\nfive"
    (tmp_path / "text.txt").write_text(text)
    options = {"text_file": str(tmp_path / "text.txt"), "document_end": "line", "report": False}
    options = options_of(tmp_path / "out", lengths=(16,), separately=True, **options)
    assert evaluate_runs([learned_run], options) == []
    trained = TrainedRun(learned_run)
    parts = [line.encode() + b"\n" for line in text.split("\n")]
    parts = [np.frombuffer(part, np.uint8) for part in [*parts[:-1], parts[-1][:-1]]]
    assert [part.size for part in parts] == [4, 4, 1, 28, 1, 16, 4]
    scorer = run_scorer(trained)
    expected = [scorer.score(trained.params, part, 16).values for part in parts]
    (file,) = (tmp_path / "out" / "documents").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    nats = np.concatenate([line["nats"] for line in lines])
    np.testing.assert_allclose(nats, np.concatenate(expected), rtol=2e-5, atol=1e-6)
    assert [line["nll_nats"] for line in lines] == pytest.approx([x.sum() for x in expected])
    assert [(line["document"], line["ids"]) for line in lines] == [
        (number, part.tolist()) for number, part in enumerate(parts)
    ]


def test_rows_and_files(tmp_path, alibi_run, monkeypatch):
    """One row a length, whatever the documents, and a line for each row of a data file; the same
    tokens cut otherwise are another text.
    """
    (tmp_path / "rows.jsonl").write_text('{"s": "one fox"}\n{"s": null}\n{"s": "two\\nthree"}\n')
    (tmp_path / "rows.txt").write_text("one fox\n\ntwo\nthree")
    options = {
        "output_dir": tmp_path / "out",
        "lengths": (16,),
        "separately": True,
        "report": False,
    }

    def evaluate(name, **more):
        text = str(tmp_path / name)
        return evaluate_runs([alibi_run], options_of(**options | {"text_file": text}, **more))

    assert evaluate("rows.jsonl", column="s") == []
    (file,) = (tmp_path / "out" / "documents").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [8, 1, 9]
    (row,) = read_rows(tmp_path / "out" / "results.jsonl")
    assert (row.options, row.results["tokens"]) == ({"separately": True}, 18)
    assert row.results["tokens_per_second"] == pytest.approx(18 / row.seconds), (
        "padding is not counted"
    )
    assert row.results["nll_nats"] == pytest.approx(sum(line["nll_nats"] for line in lines))
    assert "each document scored on its own" in caption(panel_groups([row])[0][0])
    file.unlink()
    assert evaluate("rows.jsonl", column="s") == []
    assert file.exists(), "a row without its file is not done"
    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "score_windows", None)
        assert evaluate("rows.jsonl", column="s") == []
    for end in ("file", "line"):
        assert evaluate("rows.txt", document_end=end) == []
    rows = read_rows(tmp_path / "out" / "results.jsonl")
    assert len({row.tokens_sha256 for row in rows}) == 1
    counts = sorted(len(path.read_text().splitlines()) for path in file.parent.iterdir())
    assert (len(rows), counts) == (3, [1, 3, 4])
