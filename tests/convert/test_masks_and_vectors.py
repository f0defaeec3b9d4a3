"""Imported encoders fill masks and give vectors: both beside a description in NumPy."""

import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tokenizers as hf
from safetensors.numpy import load_file

from alibi.cli import command_line, fill_mask, vectors
from alibi.config import Config, make_config
from alibi.convert.importing import import_model
from alibi.data.tokenizers import BpeTokenizer
from alibi.evaluation.evaluate import EvaluationOptions, evaluate_runs
from alibi.evaluation.perplexity import Perplexity
from alibi.evaluation.scorer import run_objective
from alibi.evaluation.windows import read_sequences, windows_of
from alibi.generation import GREEDY, encoders
from alibi.generation.encoders import Vectors, encode, fill_masks, write_vectors
from alibi.generation.texts import Writer
from alibi.reporting.rows import read_rows
from alibi.runs.trained import TrainedRun
from tests.convert.described_encoders import ENCODERS
from tests.convert.imported import jina, of_description, save_tokenizer
from tests.refusals import assert_refused

LINES = [
    "a line of text",
    "another, much longer line with tabs and spaces and çodes",
    "a",
    "a line of text",
    "数字 12 345 and an end",
]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A random model without a head, L = 16."""
    return TrainedRun(jina(tmp_path_factory.mktemp("bare"), "jina_bert_qk"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A random model of the next token."""
    folder = tmp_path_factory.mktemp("decoder")
    hub = folder / "hub"
    hub.mkdir()
    of_description("mpt", layers=1)(hub)
    save_tokenizer(hub)
    return TrainedRun(import_model(str(hub), folder / "run", Config()).path)


def described(run: TrainedRun, name: str, ids: list[int]) -> np.ndarray:
    """Returns the result of the description for one text alone, [length, ...]."""
    hub = pathlib.Path(str(run)).parent / "hub"
    content = json.loads((hub / "config.json").read_text())
    return ENCODERS[name].logits(content, load_file(hub / "model.safetensors"), np.array([ids]))[0]


def test_likeliest_tokens_are_those_of_each_text_alone(masked: TrainedRun) -> None:
    """With several masks, in one batch with padding, beyond the training length."""
    texts = ["a [MASK] of text", "[MASK][MASK] end", f"{LINES[1]} {LINES[1]} [MASK]"]
    filled = fill_masks(masked, texts, 3)
    assert [len(masks) for masks in filled] == [1, 2, 1]
    assert len(encode(masked, texts[2])) > 2 * masked.config.train_length
    for text, masks in zip(texts, filled, strict=True):
        ids = encode(masked, text)
        scores = described(masked, "jina_bert", ids)[np.array(ids) == 2]
        shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        for likeliest, share in zip(masks, shares[:, :300], strict=True):
            best = np.argsort(-share)[:3].tolist()
            assert [word for word, _ in likeliest] == [masked.tokenizer.decode([t]) for t in best]
            np.testing.assert_allclose([p for _, p in likeliest], share[best], rtol=1e-4)


def test_a_text_has_the_ids_of_the_hubs_tokenizer(tmp_path: pathlib.Path) -> None:
    """With its template and its mask, as WordPiece of BERT has them."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = hf.Tokenizer(hf.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = hf.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        LINES, hf.trainers.WordPieceTrainer(vocab_size=90, special_tokens=special)
    )
    tokenizer.post_processor = hf.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    again = hf.Tokenizer.from_str(tokenizer.to_str())

    ours = BpeTokenizer(again, "[SEP]")
    for text in ("The [MASK] of Text, with [MASK].", "[MASK]", "a line", "数字[MASK]  345"):
        assert ours.encode_whole(text, "[MASK]", 4) == tokenizer.encode(text).ids
    # RoBERTa's mask token takes the space before it; other special tokens are plain text
    tokenizer = save_tokenizer(tmp_path, masked=True)
    rules = json.loads(tokenizer.to_str())
    rules["added_tokens"][2]["lstrip"] = True
    tokenizer = hf.Tokenizer.from_str(json.dumps(rules))
    ours, mask = BpeTokenizer(hf.Tokenizer.from_str(json.dumps(rules)), "[SEP]"), 2
    for text in ("tabs and [MASK] spaces", "[MASK] end", "no mask"):
        assert ours.encode_whole(text, "[MASK]", mask) == tokenizer.encode(text).ids
    spelt = ours.encode_whole("a [SEP] b [MASK]", "[MASK]", mask)
    assert spelt == [1, *ours.encode_open("a [SEP] b"), mask, 0]
    assert 0 not in spelt[:-1]


@pytest.mark.parametrize(("pooling", "normalised"), [("mean", True), ("first", False)])
def test_vectors_are_those_of_sentence_transformers(
    bare: TrainedRun, tmp_path: pathlib.Path, pooling: str, normalised: bool
) -> None:
    """Its pooling by formula: the mean over the text's tokens with [CLS] and [SEP], or [CLS] alone,
    over max(1e-12, length). Each text is computed alone.
    """
    how = Vectors(pooling, normalised, max_tokens=64)
    found = write_vectors(bare, LINES, tmp_path / "vectors.npy", how)
    np.testing.assert_array_equal(np.load(tmp_path / "vectors.npy"), found)
    assert (found.dtype, found.shape) == (np.float32, (len(LINES), 32))
    for line, vector in zip(LINES, found, strict=True):
        last = described(bare, "jina_bert_qk", encode(bare, line))
        expected = last.mean(0) if pooling == "mean" else last[0]
        expected = expected / np.linalg.norm(expected) if normalised else expected
        np.testing.assert_allclose(vector, expected, atol=1e-5)
    np.testing.assert_allclose(found[0], found[3], atol=1e-6)
    assert [*tmp_path.iterdir()] == [tmp_path / "vectors.npy"]


def test_a_stopped_command_goes_on(
    bare: TrainedRun, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that are there are not computed again; another text begins anew."""
    seen: list[int] = []
    whole = encoders.batches

    def stopping(*arguments: Any) -> Iterator:
        for batch in whole(*arguments):
            if seen:
                raise KeyboardInterrupt
            seen.append(0)
            yield batch

    how = Vectors(max_tokens=64)
    expected = write_vectors(bare, LINES, tmp_path / "whole.npy", how)
    batches = [rows for rows, _ in whole(bare, [encode(bare, line) for line in LINES])]
    assert [len(rows) for rows in batches] == [1, 4]  # the long line is the first
    monkeypatch.setattr(encoders, "batches", stopping)
    with pytest.raises(KeyboardInterrupt):
        write_vectors(bare, LINES, tmp_path / "vectors.npy", how)
    assert not (tmp_path / "vectors.npy").exists()
    seen.clear()
    with pytest.raises(KeyboardInterrupt):  # of another text nothing is there
        write_vectors(bare, LINES[::-1], tmp_path / "vectors.npy", how)
    (partial,) = (x for x in tmp_path.glob("*.partial") if np.isfinite(np.load(x)[1]).any())
    torn = tmp_path / partial.name.replace("vectors", "torn")
    torn.write_bytes(partial.read_bytes())
    np.load(torn, mmap_mode="r+")[1, 5] = np.nan  # a page that was not written
    seen.clear()
    found = write_vectors(bare, LINES, tmp_path / "vectors.npy", how)
    assert len(seen) == 1
    np.testing.assert_array_equal(found, expected)
    monkeypatch.setattr(encoders, "batches", whole)
    np.testing.assert_array_equal(write_vectors(bare, LINES, tmp_path / "torn.npy", how), expected)


def test_wrong_requests_are_one_line(
    masked: TrainedRun, bare: TrainedRun, decoder: TrainedRun, tmp_path: pathlib.Path
) -> None:
    out, how = tmp_path / "vectors.npy", Vectors()
    hub = str(pathlib.Path(str(decoder)).parent / "hub")
    give = functools.partial(import_model, train_length=8)
    assert_refused(r"--train_length=8 is for encoders; .*Mpt", give, hub, tmp_path / "no", Config())
    assert_refused(
        r"objective=next_token, and filling masks needs", fill_masks, decoder, ["[MASK]"]
    )
    assert_refused(
        r"and a vector of a text needs objective=masked", write_vectors, decoder, ["a"], out, how
    )
    assert_refused(r"objective=masked, which fills in tokens", Writer, masked, GREEDY, 8)
    assert_refused(r"imported without a head", fill_masks, bare, ["[MASK]"])
    assert_refused(r"without a head for masked tokens, and an evaluation", run_objective, bare)
    assert_refused(r"'no mask here' has no \[MASK\]", fill_masks, masked, ["no mask here"])
    assert_refused(
        r"line 2 has \d+ tokens and 16 are allowed", write_vectors, bare, LINES, out, how
    )
    assert_refused(r"there is no line of text", write_vectors, bare, [], out, how)
    assert_refused(r"pooling='max' must be one of mean, first", Vectors, "max")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainedRun, "undefined", lambda run, length: "no row" * (length > 20))
        assert_refused(r"line 2: no row", write_vectors, bare, LINES, out, Vectors(max_tokens=64))
    assert not [*tmp_path.iterdir()]
    out.write_text("mine")
    assert_refused(r"is there already; remove it", write_vectors, bare, LINES[:1], out, how)


def test_long_lines_are_cut_if_asked_for(bare: TrainedRun, tmp_path: pathlib.Path) -> None:
    """Their last token stays the template's, as in transformers' own cutting."""
    found = write_vectors(bare, LINES, tmp_path / "vectors.npy", Vectors(cut=True))
    ids = encode(bare, LINES[1])
    last = described(bare, "jina_bert_qk", [*ids[:15], ids[-1]]).mean(0)
    np.testing.assert_allclose(found[1], last / np.linalg.norm(last), atol=1e-5)


def test_the_commands(
    masked: TrainedRun, bare: TrainedRun, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    words = [
        "fill_mask.py",
        f"--workdir={masked}",
        "--text=a [MASK]",
        "--text=[MASK] b",
        "--count=2",
    ]
    assert command_line.execute(fill_mask.main, words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0::2] == ["a [MASK]", "[MASK] b"]
    (of_first,), _ = fill_masks(masked, ["a [MASK]", "[MASK] b"], 2)
    assert printed[1] == "  1: " + ", ".join(f"{word!r} {share:.4f}" for word, share in of_first)
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n")
    words = [
        "vectors.py",
        f"--workdir={bare}",
        f"--text_file={tmp_path}/lines.txt",
        f"--output={tmp_path}/vectors.npy",
        "--max_tokens=64",
        "--cosines=2",
    ]
    assert command_line.execute(vectors.main, words) == 0
    printed = capsys.readouterr().out.splitlines()
    unit = np.load(tmp_path / "vectors.npy")
    assert printed[0].endswith("5 vectors of 32 numbers")
    assert printed[1:] == [
        f"lines 1 and 2: {unit[0] @ unit[1]:.4f}",
        f"lines 3 and 4: {unit[2] @ unit[3]:.4f}",
    ]
    assert command_line.execute(vectors.main, words) == 1
    assert "vectors.npy is there already" in capsys.readouterr().err


def test_texts_share_few_shapes(masked: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes have 16, 24, 32, 48, ... tokens, or those of the longest text if a table of positions ends
    before the next of these.
    """
    texts = [[5] * size for size in (3, 17, 24, 25, 20, 33, 16, 40)]

    def shapes() -> list[tuple[list[int], int]]:
        return [(rows, tokens.shape[1]) for rows, (tokens, _) in encoders.batches(masked, texts)]

    assert shapes() == [([7, 5], 48), ([3], 32), ([2, 4, 1], 24), ([6, 0], 16)]
    monkeypatch.setattr(TrainedRun, "undefined", lambda run, length: "no row" * (length > 40))
    assert shapes()[0] == ([7, 5], 40)


def test_the_masked_score_is_that_of_documents_on_their_own(
    tmp_path: pathlib.Path, masked: TrainedRun, bare: TrainedRun
) -> None:
    """At L and 2 L, by the evaluation's command. Documents are isolated by the import's config, so each
    part of a document in a window is computed alone by the description.
    """
    hub = str(pathlib.Path(str(masked)).parent / "hub")
    isolated = make_config("data.tokenizer=bpe,data.isolate_documents=restart")
    run = TrainedRun(import_model(hub, tmp_path / "alone", isolated).path)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{line} {line}" for line in LINES * 4) + "\n")
    evaluator = Perplexity(text_file=str(text), document_end="line")
    options = EvaluationOptions(tmp_path / "out", (16, 32), evaluators=(evaluator,), report=False)
    assert evaluate_runs([run.directory.path], options) == []
    rows = read_rows(tmp_path / "out" / "results.jsonl")
    stream = np.concatenate([run.tokenizer.encode(f"{line} {line}") for line in LINES * 4])
    assert [row.cell["length"] for row in rows] == [16, 32]
    for row in rows:
        total, count = 0.0, 0
        for group in windows_of(stream.size, row.cell["length"], causal=False).groups:
            sequences = read_sequences(stream, group, np.arange(len(group)))
            batch = run_objective(run).batch(sequences)
            for inputs, targets, segments in zip(
                batch.inputs, batch.targets, batch.segment_ids, strict=True
            ):
                for segment in np.unique(segments[targets >= 0]):
                    own = segments == segment
                    logits = described(masked, "jina_bert", inputs[own])[targets[own] >= 0]
                    chosen = targets[own & (targets >= 0)]
                    log_z = np.log(np.exp(logits).sum(-1))
                    total += (log_z - logits[np.arange(len(chosen)), chosen]).sum()
                    count += len(chosen)
        assert row.results["tokens"] == count > 20
        assert row.results["nll_nats"] == pytest.approx(total, rel=1e-5)
    assert_refused("without a head", run_objective, bare)
