"""Windows that begin with BOS: a token that is read, and not scored."""

import dataclasses

import numpy as np
import pytest
import tokenizers as hf

from alibi.config import make_config
from alibi.evaluation.by_position import ByPosition
from alibi.evaluation.context_use import ContextUse
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.perplexity import Perplexity
from alibi.reporting.panels import caption
from alibi.runs.trained import TrainedRun
from tests.evaluation.runs import make_run, nll_alone, options_of, rows_of, subject_of
from tests.refusals import assert_refused
from tests.reporting.rowmaker import panels

TEXT = "abcadbacd" * 8
BOS = 5


def run_of(folder, name, template):
    """A run with a token for each letter, and `<s>` before a text if the template says so."""
    tokens = {token: index for index, token in enumerate([*"abcd", "</s>", "<s>", "<unk>"])}
    tokenizer = hf.Tokenizer(hf.models.BPE(vocab=tokens, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>", "<s>"])
    tokenizer.post_processor = hf.processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", BOS), ("</s>", 4)]
    )
    tokenizer.save(str(folder / f"{name}.json"))
    (folder / "text.txt").write_text(TEXT)
    keys = f"data.tokenizer=bpe,data.tokenizer_file={folder / f'{name}.json'}"
    return make_run(folder, "alibi", name, keys=keys)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("bos"), "with-bos", "<s> $A")


def tokens_of(run, tmp_path):
    return np.asarray(subject_of(run, options_of(tmp_path / "look")).text().tokens[:], np.int32)


def test_each_window_begins_with_bos(a_run, tmp_path):
    """Window by window: BOS, then the tokens before the last one scored, as many as the length says."""
    length, stride = 8, 3
    (row,) = rows_of([a_run], options_of(tmp_path / "out", (length,), stride=stride, bos=True))
    assert row.options == {"stride": stride, "bos": True}, "rows without are told apart"
    run, tokens = TrainedRun(a_run), tokens_of(a_run, tmp_path)
    firsts = range(0, len(tokens), stride)
    begins = [max(0, first + stride - length) for first in firsts]
    windows = [
        [BOS, *tokens[begin : first + stride]] for begin, first in zip(begins, firsts, strict=True)
    ]
    nll = nll_alone(run, windows, length)
    expected = sum(
        each[first - begin : len(window) - 1].sum(dtype=np.float64)
        for each, window, begin, first in zip(nll, windows, begins, firsts, strict=True)
    )
    assert row.results["tokens"] == len(tokens)
    assert row.results["nll_nats"] == pytest.approx(expected, rel=1e-5)
    assert "a BOS token before each window" in caption(panels([row])[0])


def test_context_use_has_it_too(a_run, tmp_path):
    (row,) = rows_of([a_run], options_of(tmp_path / "out", (4, 16), evaluator=ContextUse, bos=True))
    assert row.options == {"bos": True}
    run, tokens = TrainedRun(a_run), tokens_of(a_run, tmp_path)
    windows = row.results["windows"]
    assert windows == row.results["tokens"] == len(tokens) - 15, "one token each, up to the last"
    for length, total in zip((4, 16), row.results["nll_nats"], strict=True):
        ends = range(16, len(tokens) + 1)
        nll = nll_alone(run, [[BOS, *tokens[end - length : end]] for end in ends], length)[:, -1]
        assert total == pytest.approx(float(np.sum(nll)), rel=1e-5)


def test_the_nll_by_position_is_after_bos_too(a_run, tmp_path):
    """The first token of a window is predicted from BOS, not from the token before it."""
    evaluators = (Perplexity(bos=True), ByPosition(bos=True))
    options = dataclasses.replace(options_of(tmp_path / "out", (8,)), evaluators=evaluators)
    whole, by_position = (row.results["nll_nats"] for row in rows_of([a_run], options))
    assert by_position == pytest.approx(whole)


def test_a_tokenizer_without_bos_is_refused(tmp_path):
    """T5's puts its token after a text."""
    run = run_of(tmp_path, "no-bos", "$A </s>")
    (failure,) = evaluate_runs([run], options_of(tmp_path / "out", (8,), bos=True))
    assert "--bos needs a tokenizer that puts a BOS token before a text" in failure
    assert "no-bos (bpe) puts none; leave it out" in failure


def test_what_has_no_windows_of_its_own_refuses_it():
    assert_refused("--dump_nll", Perplexity, bos=True, dump_nll=True)
    assert_refused(
        "objective=masked with --bos",
        lambda: Perplexity(bos=True).check(make_config("objective.name=masked"), (8,)),
    )
