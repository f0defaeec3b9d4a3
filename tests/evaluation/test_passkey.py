"""Keys where they should be, and found by who can find them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi.config import read_config
from alibi.data.books import QUESTION, STATEMENT, Books, PassKeys, distances, make_prompts
from alibi.data.corpus import Piece
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.passkey import Passkey
from alibi.evaluation.scorer import wrong_tokens
from alibi.reporting.rows import read_rows
from alibi.runs.trained import TrainedRun
from configs import passkey as config_file
from tests.evaluation.runs import make_run, options_of

keys_of = functools.partial(options_of, evaluator=Passkey)
BOOK = b"It was the best of times, it was the worst of times. " * 40


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("passkey")
    (folder / "text.txt").write_text("some text\n")
    return make_run(folder, "alibi", "a-run")


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
    again = next(iter(PassKeys(data).pieces("valid"))).utf8
    assert again == found[0]


def test_the_distance_is_part_of_the_texts_identity():
    descriptions = [
        PassKeys(read_config(config_file.get_config(f"length={n}")).data).description("valid")
        for n in (128, 256)
    ]
    assert descriptions[0] != descriptions[1]
    with pytest.raises(ValueError, match=r"data\.passkey_distance=0 must be at least 1"):
        PassKeys(read_config(config_file.get_config("length=32")).data)


@pytest.mark.parametrize(
    ("length", "distance"), [(128, 32), (128, 64), (128, 112), (1024, 512), (64, 8)]
)
def test_a_digit_stands_as_far_from_its_answer_as_asked_for(length, distance):
    prompts = make_prompts(BOOK, length, distance, 7)
    assert prompts.shape == (7, length + 1)
    for prompt in prompts:
        assert (prompt[-5:] == prompt[-5 - distance : -distance]).all()
        text = prompt.tobytes().decode()
        assert len(re.findall(r"#\d{5}\.", text)) == len(re.findall(r"=\d{5}$", text)) == 1
        assert len({*text[-5:]}) == 5, "each digit tells where in the key it stands"
    assert len({prompt[-5:].tobytes() for prompt in prompts}) == 7


@pytest.mark.parametrize("distance", [7, 119, 128])
def test_an_impossible_distance_is_refused(distance):
    with pytest.raises(
        ValueError, match=rf"distance={distance} must be from 8 to 118 in a window of 124"
    ):
        make_prompts(BOOK, 124, distance, 7)


def test_a_length_beyond_the_text_is_a_row_and_the_others_are_measured(
    a_run, tmp_path, monkeypatch
):
    """As for the lengths of eval_extrapolation.py; where nothing can be measured the command has
    failed.
    """
    monkeypatch.setattr(Books, "pieces", lambda books, split: iter([Piece(BOOK, True)]))
    options = keys_of(output_dir=tmp_path / "out", lengths=(64, 2200), prompts=3, report=False)
    assert evaluate_runs([a_run], options) == []
    measured, *limits = read_rows(tmp_path / "out" / "results.jsonl")
    assert (measured.length, measured.is_measured) == (64, True)
    assert {(row.length, row.limit, row.is_measured) for row in limits} == {(2200, True, False)}
    assert [row.cell["distance"] for row in limits] == distances(2200)
    why = "windows of 2,200 tokens are longer than their text of 2,120 bytes"
    assert all(row.error.startswith(why) for row in limits)
    (failure,) = evaluate_runs([a_run], dataclasses.replace(options, lengths=(2200,)))
    assert failure.startswith(f"{a_run}: no length can be measured: {why}")
    assert len(read_rows(tmp_path / "out" / "results.jsonl")) == 1 + len(limits), (
        "each is written once"
    )


def test_keys_are_answered_with_the_products_that_rows_name(a_run, monkeypatch):
    """A float32 model's are float32's on accelerators too, as where its NLL is scored."""
    run = TrainedRun(a_run)
    params, batch = run.params, (jnp.zeros((1, 16), jnp.int32), jnp.zeros((1, 5), jnp.int32))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    lowered = jax.jit(wrong_tokens(run.model)).lower(params, *batch).as_text()
    assert set(re.findall(r"precision = \[(\w+), \w+\]", lowered)) == {"HIGHEST"}


def test_distances_are_the_powers_of_two_that_fit():
    assert distances(128) == [32, 64]
    assert distances(134) == [32, 64, 128]
    assert distances(133) == [32, 64]
    assert distances(37) == []


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

    def features(self, tokens, last):
        return jax.nn.one_hot(jnp.roll(tokens, self.reach - 1, axis=1)[:, -last:], 256)

    def logits(self, features, deterministic):
        return features


def test_who_copies_from_64_tokens_back_finds_the_keys_that_are_there(a_run, tmp_path, monkeypatch):
    """Each digit is asked for after the true digits before it."""
    monkeypatch.setattr(TrainedRun, "model", Copier(64))
    monkeypatch.setattr(TrainedRun, "num_parameters", 0)
    monkeypatch.setattr(TrainedRun, "params", {})
    options = keys_of(output_dir=tmp_path / "out", lengths=(128, 150, 256), prompts=9)
    evaluate_runs([a_run], options)
    rows = read_rows(tmp_path / "out" / "results.jsonl")
    found = {(*row.cell.values(),): row.results.get("accuracy") for row in rows}
    assert found == {
        (128, 32): 0.0, (128, 64): 1.0, (150, 32): 0.0, (150, 64): 1.0, (150, 128): 0.0,
        (256, 32): None, (256, 64): None, (256, 128): None,
    }  # fmt: skip
    assert {row.error for row in rows if row.length == 256} == {"no more than 200"}
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| a-run | 128 | 0% ± 30% | 100% ± 30% |  |" in report
    assert (tmp_path / "out" / "passkey.png").stat().st_size > 1000


def test_windows_too_short_for_a_key_are_told_of(a_run, tmp_path, capsys):
    evaluate_runs([a_run], keys_of(output_dir=tmp_path / "out", lengths=(37,)))
    assert "a-run: passkey measures nothing at [37]" in capsys.readouterr().err


def test_a_run_that_was_not_trained_on_keys_is_told_of_once(a_run, tmp_path, capsys):
    """A table with 0% alone would look like the method's fault."""
    options = keys_of(output_dir=tmp_path / "out", lengths=(64, 80), prompts=3, report=False)
    assert evaluate_runs([a_run], options) == []
    told = [line for line in capsys.readouterr().err.splitlines() if "configs/passkey.py" in line]
    assert len(told) == 1
    assert told[0].startswith(
        "a-run: was trained on data.corpus=text, not passkeys, and may find no key; "
    )
