"""Models tested under another position method or window than in training, and their rows."""

import re
from contextlib import nullcontext

import pytest

from alibi.config import make_config, read_config
from alibi.config.override import Override
from alibi.evaluation import subject
from alibi.evaluation.dumps import read_dump
from alibi.evaluation.evaluate import evaluate_runs
from alibi.evaluation.scorer import Scorer
from alibi.model.positions import layer_pattern
from alibi.reporting.recorded import find_rows
from alibi.reporting.rows import latest
from alibi.runs.overrides import effective, overridden
from alibi.runs.trained import TrainedRun
from tests.evaluation.runs import make_run, options_of
from tests.refusals import assert_refused


@pytest.fixture(scope="module")
def plain_run(folder):
    return make_run(folder, "none", "none-run")


def test_a_model_is_tested_under_another_method_and_its_rows_say_so(
    plain_run, tmp_path, monkeypatch
):
    """Without parameters none is ALiBi whose slopes are 0, and a window as long as the sequence is
    none.
    """
    options = {
        "as alibi": Override("alibi"),
        "as alibi(slopes=0:0)": Override("alibi", (("slopes", (0, 0)),)),
        "with window 3": Override(window=3),
        "as alibi with window 16": Override("alibi", window=16),
    }

    def evaluate(override):
        known = {"lengths": (16,), "dump_nll": True}
        assert evaluate_runs([plain_run], options_of(tmp_path, override=override, **known)) == []

    same = (None, Override(), Override("none", window=0), Override(logit_scale=""))
    for override in (None, *options.values()):
        evaluate(override)
    monkeypatch.setattr(Scorer, "score_windows", None)  # from here on nothing is computed
    floats = Override("alibi", (("slopes", (0.0, 0.0)),))
    for override in (*same, *options.values(), floats):
        evaluate(override)
    rows = {str(row.override or ""): row for row in latest(find_rows(tmp_path))}
    assert len(find_rows(tmp_path)) == 5
    assert {name: row.override for name, row in rows.items()} == {"": None, **options}
    assert {(row.run, row.position, row.config_hash) for row in rows.values()} == {
        ("none-run", "none", rows[""].config_hash)
    }
    assert rows["as alibi(slopes=0:0)"].results["nll_nats"] == pytest.approx(
        rows[""].results["nll_nats"], rel=1e-6
    )
    assert rows["as alibi with window 16"].results["nll_nats"] == pytest.approx(
        rows["as alibi"].results["nll_nats"], rel=1e-6
    )
    for name in ("as alibi", "with window 3"):
        assert abs(rows[name].results["nll_nats"] - rows[""].results["nll_nats"]) > 1e-3
    dumps = [read_dump(path) for path in (tmp_path / "nll").iterdir()]
    assert {dump.row.measurement for dump in dumps} == {row.measurement for row in rows.values()}
    for dump in dumps:
        assert dump.nll.sum() == pytest.approx(
            rows[dump.row.tested[-1]].results["nll_nats"], rel=1e-6
        )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            Override("learned"),
            r"it needs the position parameters table \[16, 16\], and the checkpoint has no position",
        ),
        (
            Override("alibi", logit_scale="ssmax"),
            r"needs the position parameters layer ssmax \[2\], and the",
        ),
        (
            Override("yarn", (("factor", 0.5),)),
            "factor=0.5 of position method .yarn. must be at least 1",
        ),
        (Override("alibi", (("slope", 1.0),)), "no option 'slope'; did you mean 'slopes'"),
        (
            Override(logit_scale="log_n", window=8),
            "model.logit_scale=log_n, model.window=8 exclude each other",
        ),
        (
            Override(test_draws=1),
            "test_draws=1 draws positions below model.max_position=0; set both",
        ),
        (Override(max_position=8), "model.max_position=8 must be at least train_length=16"),
        (Override(window=-1), "model.window=-1 must be at least 0"),
        (Override("alibbi"), "unknown position method 'alibbi'; did you mean 'alibi'"),
    ],
)
def test_what_a_model_cannot_be_tested_under_is_said_before_any_work(
    tmp_path, plain_run, override, message, monkeypatch
):
    monkeypatch.setattr(subject, "prepare", None)
    (failure,) = evaluate_runs(
        [plain_run], options_of(output_dir=tmp_path, override=override, report=False)
    )
    assert re.search(message, failure), failure
    assert len(failure.splitlines()) == 1


def test_parameters_are_shared_by_methods_that_have_the_same(folder, learned_run):
    """A learned table of another length is another table; with its own length named it is the same."""
    assert_refused(
        r"table \[64, 16\],.* \[16, 16\]",
        lambda: TrainedRun(learned_run, override=Override(options=(("num_positions", 64),))),
    )
    run = TrainedRun(learned_run, override=Override("learned", (("num_positions", 16),), window=4))
    assert (run.model.config.window, run.config.model.window) == (4, 0)
    assert run.params["position"]["table"].shape == (16, 16)


STRETCHED = (
    "from sequences of {0} tokens, and this position method would take 128 for that; "
    "set --position_options=original_length={0}"
)


@pytest.mark.parametrize(
    ("trained", "override", "message"),
    [
        # A length is asked for only where another one would be taken.
        (
            "position=rotary,model.max_position=512",
            Override("rotary_ntk", max_position=0),
            STRETCHED.format(512),
        ),
        (
            "position=rotary,model.max_position=512",
            Override("yarn", (("factor", 4),), max_position=0),
            STRETCHED.format(512),
        ),
        (
            "position=none,rotary,model.max_position=512",
            Override("none,rotary_ntk", max_position=0),
            STRETCHED.format(512),
        ),
        (
            "position=yarn,position_options.original_length=32",
            Override(options=(("original_length", 0),)),
            STRETCHED.format(32),
        ),
        (
            "position=rotary,model.max_position=512",
            Override("rotary_ntk", (("original_length", 512),), max_position=0),
            "",
        ),
        (
            "position=rotary,model.max_position=512",
            Override("rotary_ntk", (("factor", 4),), max_position=0),
            "",
        ),
        ("position=rotary,model.max_position=512", Override("rotary_ntk"), ""),
        ("position=rotary,model.max_position=512", Override(max_position=0), ""),
        ("position=alibi,model.max_position=512", Override("alibi_ntk", max_position=0), ""),
        ("position=yarn,position_options.original_length=32", Override("rotary_ntk"), ""),
        (
            "position=rotary_interpolated,position_options.original_length=32",
            Override("rotary"),
            "",
        ),
        # An option that follows the training length is part of what the parameters mean.
        (
            "position=t5,model.max_position=2048",
            Override(max_position=0),
            "max_distance=512, and here it would follow the training length to 32, which changes what the "
            "parameters mean; set --position_options=max_distance=512",
        ),
        (
            "position=fire,model.max_position=2048",
            Override(max_position=0),
            "set --position_options=threshold=512",
        ),
        (
            "position=xpos",
            Override(max_position=2048),
            "set --position_options=scale_base=64.0",
        ),
        (
            "position=t5,position_options.max_distance=64,model.max_position=2048",
            Override(max_position=0),
            "",
        ),
        ("position=rotary", Override("yarn"), ""),
        ("position=none", Override("rotary_ntk"), ""),
        # The options of the method of training are named that it cannot be tested with.
        (
            "position=rotary,position_options.base=30.0",
            Override(logit_scale="ssmax"),
            "position=rotary with logit_scale=ssmax can't be tested on a run of position=rotary: it needs the position "
            "parameters layer ssmax [8], and the checkpoint has no position parameters; give a method and options",
        ),
        (
            "position=deberta,position_options.max_distance=8",
            Override("deberta", (("max_distance", 4),)),
            "position=deberta with max_distance=4 can't be tested on a run of position=deberta: it needs",
        ),
        (
            "position=rotary,position_options.base=30.0",
            Override("rotary_ntk", logit_scale="ssmax"),
            "position=rotary_ntk can't be tested on a run of position=rotary: it needs",
        ),
        # Each layer needs the parameters of its own.
        ("position=fox", Override(window=(8, 0)), ""),
        ("position=rotary,none", Override("none"), ""),
        (
            "position=t5",
            Override("t5,none"),
            "it needs the position parameters 0/table [32, 8], and the checkpoint has the position "
            "parameters table [32, 8]; give",
        ),
        (
            "position=none,model.logit_scale=,ssmax",
            Override(logit_scale=("ssmax", "")),
            "it needs the position parameters ssmax [8] of layers 0, 2, and the checkpoint has the "
            "position parameters ssmax [8] of layers 1, 3; give",
        ),
        ("position=kerple_log", Override("kerple_power"), "another meaning"),
        (
            "position=kerple_log,kerple_power",
            Override("kerple_power,kerple_log"),
            "another meaning",
        ),
        (
            "position=alibi",
            Override("alibi,none,none,none,alibi"),
            "lists 5 values for model.num_layers=4 layers",
        ),
        (
            "position=rotary,model.window=8,0",
            Override(logit_scale="log_n"),
            "model.logit_scale=log_n, model.window=8,0 exclude each other in layer 0",
        ),
    ],
)
def test_parameters_and_known_lengths_decide_what_a_model_is_tested_under(
    trained, override, message
):
    config = make_config(f"length=128,model.num_layers=4,{trained}")
    refused = pytest.raises(ValueError, match=re.escape(message)) if message else nullcontext()
    with refused:
        overridden(config, effective(override, config))


def test_options_of_training_stay_where_the_other_method_has_them():
    """Else a model whose rotary base is 500,000 would be tested under 10,000, unsaid."""
    keys = "position=rotary,position_options.base=500000.0,position_options.share=0.5"
    config = make_config(keys)
    as_yarn = effective(Override("yarn", (("factor", 4),)), config)
    assert dict(as_yarn.options) == {"base": 500_000.0, "share": 0.5, "factor": 4}
    other_base = effective(Override("yarn", (("base", 100.0),)), config)
    assert dict(other_base.options) == {"base": 100.0, "share": 0.5}
    usual_base = effective(Override("yarn", (("base", 10_000.0),)), config)
    assert dict(usual_base.options) == {"base": 10_000.0, "share": 0.5}
    for one in (as_yarn, other_base, usual_base):
        assert effective(one, config) == one, "as the command of a sweep gives it"
    assert effective(Override("none"), config) == Override("none")
    assert effective(Override("rotary"), config) is None


def test_listed_options_are_the_same_from_a_file_as_from_a_row():
    """JSON has lists only: otherwise a row read back would not be found, and would be measured
    again.
    """
    config = read_config({"position": "alibi", "position_options": {"slopes": [0.5] * 8}})
    found = effective(Override("alibi_ntk"), config)
    assert Override.from_json(found.to_json()) == found
    assert str(Override.from_json(found.to_json())) == str(found)
    assert (
        effective(Override("alibi", (("slopes", (0.5,) * config.model.num_heads),)), config) is None
    )


def test_lists_are_compared_with_those_of_training():
    config = make_config("position=rotary,none,position_options.base=100,model.window=8,0")
    longer = effective(Override(window=(32, 0)), config)
    assert longer == Override(window=(32, 0))
    assert str(longer) == "with window 32,0"
    assert Override.from_json({"window": [32, 0], "position": None, "options": {}}) == longer
    tested = effective(Override("yarn,none", (("factor", 4),)), config)
    assert str(tested) == "as yarn,none(base=100, factor=4)", "options of training stay"
    assert effective(tested, config) == tested
    assert [type(kind.position).__name__ for kind in layer_pattern(overridden(config, tested))] == [
        "Yarn",
        "NoPosition",
    ]


def test_a_list_of_the_values_of_training_is_no_override():
    config = make_config("model.num_layers=4,model.window=8,0")
    for window in ((8, 0), (8, 0, 8, 0)):
        assert effective(Override(window=window, logit_scale=("", "")), config) is None
    assert effective(Override(window=(8, 0, 8)), config) == Override(window=(8, 0, 8))
    assert effective(Override(window=(8, 8)), make_config("model.window=8")) is None
