"""Keys where they should be, and found by who can find them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as hf

from alibi.config import read_config
from alibi.data.books import QUESTION, STATEMENT, Books, KeyPrompts, PassKeys, distances
from alibi.data.corpus import Piece
from alibi.data.tokenizers import BpeTokenizer, ByteTokenizer, train_bpe
from alibi.data.tokenizers.bpe import END_OF_TEXT
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.passkey import Passkey
from alibi.evaluation.scorer import wrong_tokens
from alibi.reporting.rows import read_rows
from alibi.runs.trained import TrainedRun
from configs import passkey as config_file
from tests.evaluation.runs import make_run, options_of, rows_of
from tests.refusals import assert_refused

keys_of = functools.partial(options_of, evaluator=Passkey)
BOOK = b"It was the best of times, it was the worst of times. " * 40


def test_the_text_tells_each_key_and_asks_for_it_within_the_distance():
    data = read_config(config_file.get_config("length=128")).data
    found = [piece.utf8 for _, piece in zip(range(2), PassKeys(data).pieces("valid"), strict=False)]
    told, asked = (re.escape(one).replace(r"\{\}", r"(\d{5})") for one in (STATEMENT, QUESTION))
    for text, book in zip(found, Books(data).pieces("valid"), strict=False):
        pairs = list(re.finditer(f"{told}(.*?){asked}", text.decode(), re.DOTALL))
        assert len(pairs) > 1000
        assert all(one[1] == one[3] for one in pairs)
        between = [len(one[2].encode()) for one in pairs]
        assert 46 < np.mean(between) < 62, "half of up to 96, and to the next space"
        assert max(between) < 96 + 40
        assert re.sub(f"{told}|{asked}", "", text.decode()).encode() == book.utf8, (
            "the book itself is all there"
        )
    assert len({one[1] for one in pairs}) > 0.9 * len(pairs)
    assert next(iter(PassKeys(data).pieces("valid"))).utf8 == found[0]


def test_the_distance_is_part_of_the_texts_identity():
    descriptions = [
        PassKeys(read_config(config_file.get_config(f"length={n}")).data).description("valid")
        for n in (128, 256)
    ]
    assert descriptions[0] != descriptions[1]
    assert_refused(
        r"data\.passkey_distance=0",
        lambda: PassKeys(read_config(config_file.get_config("length=32")).data),
    )


@pytest.mark.parametrize(
    ("length", "distance"), [(128, 32), (128, 64), (128, 112), (1024, 512), (64, 8)]
)
def test_a_digit_stands_as_far_from_its_answer_as_asked_for(length, distance):
    prompts = KeyPrompts(BOOK, ByteTokenizer()).make(length, distance, 7)
    assert prompts.shape == (7, length + 1)
    for prompt in prompts:
        assert (prompt[-5:] == prompt[-5 - distance : -distance]).all()
        text = prompt.tobytes().decode()
        assert len(re.findall(r"#\d{5}\.", text)) == len(re.findall(r"=\d{5}$", text)) == 1
        assert len({*text[-5:]}) == 5, "each digit tells where in the key it stands"
    assert len({prompt[-5:].tobytes() for prompt in prompts}) == 7


@pytest.mark.parametrize("distance", [7, 119, 128])
def test_an_impossible_distance_is_refused(distance):
    assert_refused(
        rf"distance={distance} .* 8 to 118 ",
        lambda: KeyPrompts(BOOK, ByteTokenizer()).make(124, distance, 7),
    )


def test_a_length_beyond_the_text_is_a_row_and_the_others_are_measured(
    alibi_run, tmp_path, monkeypatch, capsys
):
    """As for the lengths of eval_extrapolation.py; where nothing can be measured the command has
    failed. Of a run that was not trained on keys 0% alone would look like the method's fault.
    """
    monkeypatch.setattr(Books, "pieces", lambda books, split: iter([Piece(BOOK, True)]))
    options = keys_of(output_dir=tmp_path / "out", lengths=(64, 2200), prompts=3, report=False)
    measured, *limits = rows_of([alibi_run], options)
    (told,) = re.findall(".*configs/passkey.py.*", capsys.readouterr().err)
    assert told.startswith(
        "alibi-run: was trained on data.corpus=text, not passkeys, and may find no"
    )
    assert (measured.length, measured.is_measured) == (64, True)
    assert {(row.length, row.limit, row.is_measured) for row in limits} == {(2200, True, False)}
    assert [row.cell["distance"] for row in limits] == distances(2200)
    why = "windows of 2,200 tokens are longer than their text of 2,120 bytes"
    assert all(row.error.startswith(why) for row in limits)
    (failure,) = evaluate_runs([alibi_run], dataclasses.replace(options, lengths=(2200,)))
    assert failure.startswith(f"{alibi_run}: no length can be measured: {why}")
    assert len(read_rows(tmp_path / "out" / "results.jsonl")) == 1 + len(limits), (
        "each is written once"
    )


def test_keys_are_answered_with_the_products_that_rows_name(alibi_run, monkeypatch):
    """A float32 model's are float32's on accelerators too, as where its NLL is scored."""
    run = TrainedRun(alibi_run)
    params, batch = run.params, (jnp.zeros((1, 16), jnp.int32), jnp.zeros((1, 5), jnp.int32))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    lowered = jax.jit(wrong_tokens(run.model)).lower(params, *batch).as_text()
    assert set(re.findall(r"precision = \[(\w+), \w+\]", lowered)) == {"HIGHEST"}


@pytest.mark.parametrize(
    ("length", "fitting"), [(128, [32, 64]), (134, [32, 64, 128]), (133, [32, 64]), (37, [])]
)
def test_distances_are_the_powers_of_two_that_fit(length, fitting):
    assert distances(length) == fitting


class Copier:
    """A model which answers with the token `reach` before the next token: it finds keys at this
    distance alone.
    """

    def __init__(self, reach):
        self.reach, self.vocabulary, self.sharding = reach, self, None
        self.position = self

    def check_length(self, length):
        if length > 200:
            raise ValueError("no more than 200")

    def apply(self, variables, *, method):
        return method(self)

    def features(self, tokens, last, **_):
        return jax.nn.one_hot(jnp.roll(tokens, self.reach - 1, axis=1)[:, -last:], 256)

    def logits(self, features, deterministic):
        return features

    def writable(self, logits):
        return logits


def test_who_copies_from_64_tokens_back_finds_the_keys_that_are_there(
    alibi_run, tmp_path, monkeypatch
):
    """Each digit is asked for after the true digits before it."""
    monkeypatch.setattr(TrainedRun, "model", Copier(64))
    monkeypatch.setattr(TrainedRun, "num_parameters", 0)
    monkeypatch.setattr(TrainedRun, "params", {})
    options = keys_of(output_dir=tmp_path / "out", lengths=(128, 150, 256), prompts=9, report=True)
    evaluate_runs([alibi_run], options)
    rows = read_rows(tmp_path / "out" / "results.jsonl")
    assert {(*row.cell.values(),): row.results.get("accuracy") for row in rows} == {
        (128, 32): 0.0, (128, 64): 1.0, (150, 32): 0.0, (150, 64): 1.0, (150, 128): 0.0,
        (256, 32): None, (256, 64): None, (256, 128): None,
    }  # fmt: skip
    assert {row.error for row in rows if row.length == 256} == {"no more than 200"}
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| alibi-run | 128 | 0% ± 30% | 100% ± 30% |  |" in report
    assert (tmp_path / "out" / "passkey.png").stat().st_size > 1000


def test_windows_too_short_for_a_key_are_told_of(alibi_run, tmp_path, capsys):
    evaluate_runs([alibi_run], keys_of(output_dir=tmp_path / "out", lengths=(37,)))
    assert "alibi-run: passkey measures nothing at [37]" in capsys.readouterr().err


def bpe(folder, **changed):
    """The file of a BPE that joins letters and digits: 48 and 59 are a token each."""
    made = train_bpe([BOOK.decode(), *(f" #{n:02d}48." for n in range(99)), "59 " * 99], 300)
    for name, part in changed.items():
        setattr(made, name, part)
    made.save(str(folder / "bpe.json"))
    return made


def test_keys_in_the_tokens_of_a_bpe(tmp_path):
    """The key has the usual number of tokens, the same ones where it is told and asked for."""
    tokenizer = BpeTokenizer(bpe(tmp_path), END_OF_TEXT)
    keys = KeyPrompts(BOOK, tokenizer)
    assert len(keys.ids) < len(BOOK) / 3
    assert (keys.size, len(tokenizer.encode_open("48")), len(tokenizer.encode_open("5948"))) == (
        5,
        1,
        2,
    )
    for distractors in (0, 2):
        for prompt in keys.make(80, 40, 7, distractors):
            assert (prompt.size, prompt.dtype) == (81, np.int32)
            assert (prompt[-5:] == prompt[-45:-40]).all()
            text = tokenizer.decode(prompt)
            told, asked = re.findall(r" #(\d{5})\.", text), re.findall(r" =(\d{5})$", text)
            assert told[-1:] == asked
            assert len(told) == distractors + 1


@pytest.mark.parametrize(("length", "distance"), [(128, 32), (256, 64)])
def test_distractors_are_other_keys_told_before(length, distance):
    """At even places of the text before the key, which lies as far back as without them."""
    keys = KeyPrompts(BOOK, ByteTokenizer())
    for prompt in keys.make(length, distance, 7, 3):
        assert prompt.shape == (length + 1,)
        assert (prompt[-5:] == prompt[-5 - distance : -distance]).all()
        text = prompt.tobytes().decode()
        told = [(one[1], one.start()) for one in re.finditer(r" #(\d{5})\.", text)]
        assert len(told) == 4
        assert told[-1][0] == text[-5:]
        assert text[-5:] not in [key for key, _ in told[:-1]]
        gaps = np.diff([-keys.told, *(place for _, place in told)])
        assert gaps.max() - gaps.min() <= 1
    assert_refused(r"^9 distractors .* at most 7$", keys.make, 128, 64, 7, 9)


def test_a_distance_of_ones_own_in_windows_of_any_length(alibi_run, tmp_path):
    """Rows of a distance are those of all distances, and rows with distractors are others."""
    options = keys_of(output_dir=tmp_path / "out", lengths=(64, 128), prompts=3, report=False)
    (every,) = options.evaluators
    far = dataclasses.replace(every, distance=50)
    others = dataclasses.replace(every, distance=64, distractors=2)
    options = dataclasses.replace(options, evaluators=(every, far, others))
    rows = rows_of([alibi_run], options)
    assert [({**row.options}, *row.cell.values()) for row in rows] == [
        ({"prompts": 3}, 64, 32), ({"prompts": 3}, 128, 32), ({"prompts": 3}, 128, 64),
        ({"prompts": 3}, 64, 50), ({"prompts": 3}, 128, 50),
        ({"prompts": 3, "distractors": 2}, 64, 64), ({"prompts": 3, "distractors": 2}, 128, 64),
    ]  # fmt: skip
    assert [row.limit for row in rows] == [False] * 5 + [True, False]
    assert rows[5].error == "distance=64 must be from 8 to 58 in a window of 64"
    assert rows[2].tokens_sha256 != rows[6].tokens_sha256


def test_a_run_of_a_bpe_is_asked(tmp_path, monkeypatch):
    """It copies the token before last, which no key is."""
    monkeypatch.setattr(Books, "pieces", lambda books, split: iter([Piece(BOOK, True)]))
    bpe(tmp_path)
    (tmp_path / "text.txt").write_bytes(BOOK)
    keys = f"data.tokenizer=bpe,data.tokenizer_file={tmp_path / 'bpe.json'}"
    run = make_run(tmp_path, "alibi", "bpe-run", keys=keys)
    options = keys_of(output_dir=tmp_path / "out", lengths=(64,), prompts=3, report=False)
    (row,) = rows_of([run], options)
    assert row.cell == {"length": 64, "distance": 32}
    keys = KeyPrompts(BOOK, TrainedRun(run).tokenizer).make(64, 32, 3)
    asked = TrainedRun(run)
    logits = jax.jit(asked.model.apply)({"params": asked.params}, keys[:, :-1])
    found = (np.argmax(logits, -1)[:, -5:] == keys[:, -5:]).all(axis=1)
    assert row.results == {"accuracy": found.mean(), "prompts": 3}


def test_a_tokenizer_that_loses_digits_is_refused(tmp_path):
    library = bpe(tmp_path, normalizer=hf.normalizers.Replace(hf.Regex("[0-9]"), "0"))
    told = r"the tokenizer \(bpe\) does not keep a key's digits in tokens of their own"
    assert_refused(told, lambda: KeyPrompts(BOOK, BpeTokenizer(library, END_OF_TEXT)))
    assert_refused(
        "words with passkey",
        lambda: Passkey().check(read_config({"data.tokenizer": "words"}), [64]),
    )
