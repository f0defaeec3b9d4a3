"""The runs of a sweep's file; a bad file is refused before its first run."""

import dataclasses
import re

import pytest

from alibi.config import load_config
from alibi.evaluation.context_use import ContextUse
from alibi.evaluation.perplexity import Perplexity
from alibi.sweeps.definition import Evaluation, load_sweep
from tests.refusals import assert_refused
from tests.sweeps.sweepmaker import PROJECT, QUICKSTART, sweep_of

TRIED = ("negative_results", "all_methods")
SIX = ["alibi", "t5", "none", "rotary", "sinusoidal", "learned"]


def test_the_quickstart_is_four_methods_at_128_up_to_16_times_that():
    sweep = load_sweep(QUICKSTART)
    assert [run.name for run in sweep.runs] == [
        "sinusoidal-L128-seed0",
        "rotary-L128-seed0",
        "t5-L128-seed0",
        "alibi-L128-seed0",
    ]
    for run in sweep.runs:
        (evaluation,) = run.evaluations
        assert evaluation.lengths == (128, 256, 512, 1024, 2048)
        assert evaluation.evaluators == (Perplexity(),)
        assert [cell["length"] for _, cell in evaluation.cells] == [*evaluation.lengths]


# The others are read below.
@pytest.mark.parametrize(
    "name",
    sorted({path.stem for path in QUICKSTART.parent.glob("[!_]*.py")} - {QUICKSTART.stem, *TRIED}),
)
def test_every_sweep_of_the_project_can_be_run(name):
    """Their configs, options and names are checked when they are read."""
    assert load_sweep(QUICKSTART.with_stem(name)).runs


def test_the_sweep_of_the_page_can_be_run(tmp_path):
    """Its runs have short names; rotary has its own test and that as YaRN."""
    page = (PROJECT / "docs" / "scaling.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "own_sweep.py").write_text(code)
    runs = load_sweep(tmp_path / "own_sweep.py").runs
    names = [
        f"{position}-L512-seed{seed}" for position in ("alibi", "rotary") for seed in (0, 1, 2)
    ]
    assert [run.name for run in runs] == names
    assert [str(one.override) for one in runs[-1].evaluations] == ["None", "as yarn"]
    assert all(one.lengths == (512, 1024, 2048, 4096) for one in runs[-1].evaluations)


def test_what_the_paper_tried_is_part_of_the_study_of_all_methods():
    """In a shared work directory no run is trained twice; each method is also tested with a window."""
    runs, of_study = (
        {run.name: run for run in load_sweep(QUICKSTART.with_stem(name)).runs} for name in TRIED
    )
    for name, run in runs.items():
        assert (run.config, run.evaluations) == (of_study[name].config, of_study[name].evaluations)
    for method in ("sinusoidal", "rotary", "alibi"):
        tested = [
            one.override and one.override.window for one in runs[f"{method}-seed0"].evaluations
        ]
        assert tested[0] is None
        assert 128 in tested
    slopes = [runs[f"alibi-random-seed{seed}"].config.position_options for seed in range(3)]
    assert slopes == [{"slopes": "random", "draw": draw} for draw in range(3)]


def test_products_explicit_runs_and_evaluations_of_their_own():
    sweep = sweep_of(
        product={"position": ["alibi"], "train_length": [64, 128], "seed": [0, 1]},
        runs=[
            {
                "position": "none",
                "model.dropout": 0.1,
                "lengths": [300],
                "stride": [1, 100],
                "split": "train",
            },
            {
                "position": "alibi",
                "name": "mine",
                "evaluations": [{"multiples": [1]}, {"lengths": [512], "stride": 64}],
            },
        ],
    )
    assert [run.name for run in sweep.runs] == [
        "alibi-L64-seed0",
        "alibi-L64-seed1",
        "alibi-L128-seed0",
        "alibi-L128-seed1",
        "none-L128-dropout=0.1-seed0",
        "mine",
    ]
    assert sweep.runs[1].config.train_length == 64
    assert sweep.runs[1].config.seed == 1
    assert sweep.runs[0].evaluations[0].lengths == (64, 128)
    (evaluation,) = sweep.runs[4].evaluations
    assert evaluation.lengths == (300,)
    assert evaluation.evaluators == tuple(
        Perplexity(stride=stride, split="train") for stride in (1, 100)
    )
    assert [(e.lengths, e.evaluators) for e in sweep.runs[5].evaluations] == [
        ((128,), (Perplexity(),)),
        ((512,), (Perplexity(stride=64),)),
    ]


def test_another_process_gets_the_same_evaluation():
    """Evaluators with their options, lengths and the override, whose lists stay lists."""
    options = {"slopes": [0.5, 0.25, 0.125, 0.0625]}
    asked = {
        "multiples": [1, 2],
        "evaluators": ["perplexity", "context_use"],
        "context_windows": 20,
        "stride": 64,
        "override": {"position": "alibi", "options": options, "window": 16},
    }
    (evaluation,) = (
        sweep_of(product={"position": ["alibi"]}, evaluations=[asked]).runs[0].evaluations[1:]
    )
    assert evaluation.evaluators == (Perplexity(stride=64), ContextUse(context_windows=20))
    again = Evaluation.from_json(evaluation.to_json())
    assert dataclasses.replace(evaluation, cells=()) == again
    assert again.override.options == (("slopes", (0.5, 0.25, 0.125, 0.0625)),)


def test_the_flags_give_train_py_the_same_config(run_script, tmp_path):
    run = sweep_of(
        runs=[
            {
                "data.train": "a.txt,b.txt",
                "seed": 3,
                "name": "x",
                "model.logit_scale": ["", "ssmax"],
                "model.window": [32, 0],
            }
        ],
        product={"seed": [0]},
    ).runs[1]
    assert run.config_flags == [
        f"--config={PROJECT / 'configs/quickstart.py'}:seed=3",
        "--config.data.train=a.txt,b.txt",
        "--config.model.logit_scale=,ssmax",
        "--config.model.window=32,0",
    ]
    printed = run_script(PROJECT / "train.py", *run.config_flags, "--print_config").stdout
    (tmp_path / "same.py").write_text(printed)
    assert load_config(str(tmp_path / "same.py")) == run.config


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"product": {"position": ["alibi", "sinusodial"]}},
            r"run \(position=sinusodial\): .*did you mean 'sinusoidal'",
        ),
        (
            {"product": {"model.widht": [64]}},
            "unknown config key 'model.widht'; did you mean 'model.width'",
        ),
        ({"product": {"position": "alibi"}}, "product key 'position' needs a list of values"),
        ({"product": {"train_length": [100]}}, "batch_tokens=2048 must be a multiple of 100"),
        ({"multiple": [1]}, "unknown key 'multiple' in the sweep; did you mean 'multiples'"),
        ({"lengths": [128]}, "either 'multiples' or 'lengths'"),
        ({"multiples": [0.5]}, "whole numbers of tokens"),
        ({"stride": 129}, "stride=129 must be between 1 and the length 128"),
        ({"stride": 64.0}, "option stride=64.0 of evaluator .perplexity. must be of type int"),
        (
            {"split": "train2"},
            "option split='train2' of evaluator 'perplexity' must be one of train, valid, test",
        ),
        ({"split": "test"}, "data.test is empty"),
        (
            {"evaluators": "passkey", "split": "test"},
            "split=test is an option of perplexity or .*, not of passkey; name its evaluator too",
        ),
        (
            {"evaluators": "passkey", "config": "configs/books.py"},
            "data.tokenizer=words with passkey",
        ),
        (
            {"evaluators": "perplexty"},
            "unknown evaluator 'perplexty'; did you mean 'perplexity'",
        ),
        ({"evaluators": []}, "'evaluators' names nothing; give some of"),
        ({"product": {"seed": [0]}, "runs": [{"seed": 0}]}, "runs of equal name: alibi-L128-seed0"),
        ({"runs": [{"name": "../x"}]}, "must do as a directory's name"),
        ({"config": "configs/absent.py"}, "there is no config file '.*configs/absent.py'"),
    ],
)
def test_a_bad_sweep_is_refused_before_the_first_run(changed, message):
    assert_refused(message, sweep_of, **changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"has no get_sweep\(\)"),
        ("def get_sweep(:", "fails at line 1: SyntaxError"),
        ("def get_sweep():\n    return 3", "must return a dictionary, not int"),
        (
            "def get_sweep():\n    return {'config': 'configs/quickstart.py'}",
            "the sweep has no runs",
        ),
        ("def get_sweep():\n    return {'runs': [{}]}", "the sweep names no config"),
    ],
)
def test_a_bad_sweep_file(tmp_path, text, message):
    (tmp_path / "bad.py").write_text(text)
    assert_refused(message, load_sweep, tmp_path / "bad.py")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            {"position": "t5"},
            "position=t5 can't be tested on a run of position=alibi: it needs the position parameters",
        ),
        ({"positions": "t5"}, "unknown key 'positions' in an override; did you mean 'position'"),
        ({"position": "alibi_ntk", "options": {"factor": 2}}, "has no option 'factor'"),
    ],
)
def test_an_override_that_the_run_cannot_take_is_told_of_with_the_sweep(override, words):
    assert_refused(re.escape(words), sweep_of, product={"position": ["alibi"]}, override=override)


@pytest.mark.parametrize(
    ("task", "positions"),
    [
        ("0/3", ["alibi", "rotary"]),
        ("2/3", ["none", "learned"]),
        ("5/8", ["learned"]),
        ("t5-L128-seed0", ["t5"]),
    ],
)
def test_a_task_has_every_nth_run_or_the_named_one(task, positions):
    sweep = sweep_of(product={"position": SIX}, multiples=[1])
    assert [run.config.position for run in sweep.share(task)] == positions


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("6/7", "there are 6 runs; give I/N with I from 0 to 5"),
        ("3/3", "there are 6 runs; give I/N with I from 0 to 5 and I < N"),
        ("0/0", "--task=0/0: there are 6 runs"),
        ("t5-L128", "or a run's name; did you mean 't5-L128-seed0'"),
    ],
)
def test_a_task_that_does_not_exist(task, message):
    assert_refused(message, lambda: sweep_of(product={"position": SIX}, multiples=[1]).share(task))
