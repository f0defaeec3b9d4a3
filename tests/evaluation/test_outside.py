"""An evaluator from outside the package, as its page writes it: nothing in the package knows it."""

import dataclasses
import re
import sys

import numpy as np
import pytest

from alibi.data.tokens import prepare
from alibi.evaluation import Evaluator, option
from alibi.evaluation.scorer import run_scorer, wrong_tokens
from alibi.reporting.measure import REGISTRY
from alibi.reporting.rows import latest, read_rows
from alibi.runs.trained import TrainedRun
from alibi.sweeps.definition import Evaluation
from alibi.sweeps.state import evaluation_command, survey
from tests.evaluation.runs import TEXT, make_run, run_keys
from tests.hosts import ROOT
from tests.refusals import assert_refused
from tests.sweeps.sweepmaker import sweep_of

STEPS = "train.steps=5,optimizer.warmup_steps=0"
PAGE = ROOT / "docs" / "new-evaluator.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    (code,) = re.findall(r"```python\n(\"\"\".*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "accuracy.py").write_text(f"{code}\n\ndef later():\n    import own_numbers\n")
    (folder / "own_numbers.py").write_text("MOST = 1\n")
    (folder / "text.txt").write_text(TEXT)
    make_run(folder, "alibi", "a-run", keys=STEPS)
    return folder


WORDS = ("--workdirs=a-run", "--multiples=1,2", "--evaluators=perplexity,accuracy:Accuracy")
WORDS += ("--output_dir=out", "--evaluator_options=ranges=3")


def test_it_is_evaluated_and_reported_and_not_measured_again(folder, run_script, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # as python -m does
    script = ROOT / "eval_extrapolation.py"
    assert "perplexity" in run_script(script, *WORDS).stderr
    rows = read_rows(folder / "out" / "results.jsonl")
    found = [row for row in rows if row.evaluator == "accuracy:Accuracy"]
    assert [(row.cell, row.options) for row in found] == [
        ({"length": length}, {"ranges": 3}) for length in (16, 32)
    ]
    run = TrainedRun(folder / "a-run")
    tokens = np.asarray(prepare(run.config.data, "valid", progress=False).tokens)
    right = run_scorer(run, wrong_tokens).score(run.params, tokens, 16).values == 0
    # by document, a line each
    expected = np.zeros((3, 2), int)
    place = 0
    for token, is_right in zip(tokens, right, strict=True):
        expected[min(2, int(np.log2(place // 8 + 1)))] += is_right, 1
        place = 0 if token == 10 else place + 1
    assert [*found[0].results["right"]] == expected[:, 0].tolist()
    assert [*found[0].results["count"]] == expected[:, 1].tolist()

    report = (folder / "out" / "report.md").read_text()
    assert "**Next tokens right by place in the document, from token: text.txt" in report
    assert re.search(rf"\| a-run \| 16 \| {expected[0, 0] / expected[0, 1]:.1%} ± [\d.]+% ", report)
    assert (folder / "out" / "Accuracy.png").stat().st_size > 1000
    assert "Next tokens right" in (folder / "out" / "report.html").read_text()

    again = (*WORDS, "--noreport")
    assert run_script(script, *again).stderr.count("done before") == 4
    (folder / "own_numbers.py").write_text("MOST = 2\n")
    for name in ("accuracy", "own_numbers"):  # as in a process that begins now
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert run_script(script, *again).stderr.count("done before") == 2
    rows = read_rows(folder / "out" / "results.jsonl")
    assert len(rows) == 6, "its changed code is another measurement"
    assert len(latest(rows)) == 4


def test_a_sweep_measures_a_run_and_finds_its_rows(folder, run_script, monkeypatch):
    """By the command that it starts. An option out of its range is refused before any begins."""
    monkeypatch.syspath_prepend(str(folder))
    runs = folder / "sweep" / "runs"
    runs.mkdir(parents=True)
    (runs / "alibi-L16-seed0").symlink_to(folder / "a-run")
    asked = {
        "config": f"configs/base.py:{run_keys('alibi', folder)},{STEPS}",
        "product": {"seed": [0]},
        "evaluators": ["perplexity", "accuracy:Accuracy"],
    }
    sweep = sweep_of(**asked, ranges=5)
    (state,) = survey(sweep.runs, runs.parent)
    (evaluation,) = state.missing
    script, *words = evaluation_command(*sweep.runs, evaluation, runs.parent)
    run_script(ROOT / script, *words)
    (state,) = survey(sweep.runs, runs.parent)
    assert state.is_done
    rows = read_rows(runs.parent / "results.jsonl")
    assert [(row.evaluator, row.cell, row.options) for row in rows] == [
        (name, {"length": length}, options)
        for name, options in (("perplexity", {}), ("accuracy:Accuracy", {"ranges": 5}))
        for length in (16, 32)
    ]
    assert [sum(row.results["count"]) for row in rows[2:]] == [len(TEXT)] * 2
    assert_refused("ranges=0", sweep_of, **asked, ranges=0)


def test_a_wrong_name_is_a_line(folder, run_script):
    for name, words in (
        ("perplexty", "unknown evaluator 'perplexty'; did you mean 'perplexity'?"),
        (
            "absent:Accuracy",
            "evaluator=absent:Accuracy: No module named 'absent'; write package.module:Class",
        ),
        (
            "json:loads",
            "evaluator=json:loads is no subclass of alibi.reporting.measure.Measure, but <fu",
        ),
    ):
        done = run_script(
            ROOT / "eval_extrapolation.py",
            f"--workdirs={folder / 'a-run'}",
            f"--evaluators={name}",
            code=1,
        )
        assert done.stderr.startswith(f"error: {words}")


class Empty(Evaluator):
    def measure(self, subject, text, row):
        return {}


@dataclasses.dataclass(frozen=True)
class Taken(Empty):
    text: str = option("", "a name that evaluators have")


@dataclasses.dataclass(frozen=True)
class Open(Empty):
    bins: int


@dataclasses.dataclass(frozen=True)
class Several(Empty):
    bins: tuple[int, ...] = option((8, 16), "ends of ranges", at_least=1)


def test_an_option_has_a_name_of_its_own_and_a_default():
    assert_refused("'text'", REGISTRY.make, f"{__name__}:Taken")
    assert_refused("'bins'", REGISTRY.make, f"{__name__}:Open")


@pytest.mark.parametrize(
    ("bins", "expected"),
    [((4, 5), [(4, 5)]), ([4, 5], [(4,), (5,)]), ([[4, 5], [8, 16]], [(4, 5), (8, 16)])],
)
def test_a_list_in_a_sweep_is_each_value_in_turn_also_of_tuples(bins, expected):
    asked = {"evaluators": f"{__name__}:Several", "bins": bins}
    ((evaluation,),) = (run.evaluations for run in sweep_of(product={"seed": [0]}, **asked).runs)
    assert [one.bins for one in evaluation.evaluators] == expected
    assert Evaluation.from_json(evaluation.to_json()).evaluators == evaluation.evaluators
    assert evaluation.evaluators[-1].options == (
        {} if expected[-1] == (8, 16) else {"bins": expected[-1]}
    )
