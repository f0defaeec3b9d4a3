"""Documents scored each on its own: the numbers of documents alone, whatever lies beside them."""

import json

import numpy as np
import pytest

from alibi.data.textfiles import TextFiles
from alibi.data.tokenizers import BpeTokenizer, ByteTokenizer, WordTokenizer, train_bpe
from alibi.data.tokens import prepare_text
from alibi.evaluation.extrapolation import Options, evaluate_runs
from alibi.evaluation.perplexity import Scorer, run_scorer
from alibi.evaluation.separately import SeparateDocuments
from alibi.objectives import NextToken
from alibi.reporting.panels import caption, panel_groups
from alibi.reporting.rows import Row, read_rows
from alibi.runs.trained import TrainedRun

TEXT = "one\ntwo\n\nthree, longer than a window\n\n\nfour\nfive"
WORDS = dict.fromkeys(("<s>", "<pad>", "</s>", "<unk>", "one", "two", "four"), 1)
TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "words": WordTokenizer(WORDS),
    "bpe": BpeTokenizer(train_bpe([TEXT], 270), "<|endoftext|>"),
}


def documents_of(folder, text, end, tokenizer):
    path = folder / "text.txt"
    path.write_text(text)
    file = prepare_text(path, tokenizer, folder / "cache", document_end=end, progress=False)
    corpus = TextFiles({"file": str(path), "document_end": end})
    return SeparateDocuments(file, corpus), np.asarray(file.tokens)


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
    found, tokens = documents_of(tmp_path, TEXT, end, TOKENIZERS[name])
    pieces = np.split(tokens, found.ends[:-1])
    if name == "bytes" and end == "line":
        parts["line"] = [part + "\n" for part in parts["line"][:-1]] + parts["line"][-1:]
    expected = [TOKENIZERS[name].encode(part).tolist() for part in parts[end]]
    assert [piece.tolist() for piece in pieces] == expected


def test_a_text_that_spells_the_end_of_a_line(tmp_path):
    with pytest.raises(ValueError, match=r"text.txt spells the end of a line, </s>, in 1 places"):
        documents_of(tmp_path, "one </s> two\nfour\n", "line", TOKENIZERS["words"])


def test_documents_are_packed_whole(tmp_path):
    """Documents of 4, 4, 1, 28, 1, 1, 5 and 4 bytes in windows of 8: the long one begins with one."""
    found, tokens = documents_of(tmp_path, TEXT, "line", TOKENIZERS["bytes"])
    assert np.diff(found.ends, prepend=0).tolist() == [4, 4, 1, 28, 1, 1, 5, 4]
    objective, packed = found.pack(8)
    rows = packed.reshape(-1, 8)
    assert (rows >= 0).sum(1).tolist() == [8, 1, 8, 8, 8, 6, 5, 4]
    assert packed[objective.predicted(0, packed.size)].tolist() == tokens.tolist()
    context = [1, 2, 3, 4] * 2 + [1] + [*range(1, 9)] * 3 + [1, 2, 3, 4] + [1, 1]
    context += [1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert found.mean_context(8) == pytest.approx(np.mean(context))


@pytest.mark.parametrize("run", ["alibi_run", "learned_run"])
def test_the_numbers_are_those_of_each_document_alone(tmp_path, run, request):
    """With a table of positions too, which restart at each document; a document that is longer
    than a window goes on in the next.
    """
    trained = TrainedRun(request.getfixturevalue(run))
    found, tokens = documents_of(tmp_path, TEXT, "blank_line", TOKENIZERS["bytes"])
    objective, packed = found.pack(16)
    score = run_scorer(trained, objective).score(trained.params, packed, 16)
    assert score.tokens == tokens.size
    alone = run_scorer(trained, NextToken(256, 10))
    parts = np.split(tokens, found.ends[:-1])
    expected = [alone.score(trained.params, part, 16).nll_nats for part in parts]
    np.testing.assert_allclose(score.nll_nats, np.concatenate(expected), rtol=2e-5)
    lines = [json.loads(line) for line in found.lines(score.nll_nats)]
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
    options = {"output_dir": tmp_path / "out", "lengths": (16,), "separately": True}

    def evaluate(name, **more):
        text = str(tmp_path / name)
        return evaluate_runs([alibi_run], Options(**options | {"text_file": text}, **more))

    assert evaluate("rows.jsonl", column="s") == []
    (file,) = (tmp_path / "out" / "documents").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [8, 1, 9]
    (row,) = read_rows(tmp_path / "out" / "results.jsonl")
    assert (row.mode, row.tokens, row.documents.positions) == ("separately", 18, "alone")
    assert row.nll_nats == pytest.approx(sum(line["nll_nats"] for line in lines))
    assert row.nll_nats == pytest.approx(sum(sum(line["nats"]) for line in lines), abs=1e-4)
    assert Row.from_json(row.to_json()) == row
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


def test_options_that_exclude_each_other(tmp_path):
    for options in ({"stride": 4}, {"context_windows": 4}, {"dump_nll": True}):
        with pytest.raises(ValueError, match="and --separately scores each document on its own"):
            Options(tmp_path, separately=True, **options)
