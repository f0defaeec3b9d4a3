"""The state of a sweep: its runs, the results, and the time left."""

import pytest
from etils import epath

from alibi.reporting.writers import format_duration
from alibi.runs import config_hash
from alibi.storage.claims import Claim
from alibi.sweeps import estimates
from alibi.sweeps.definition import Evaluation
from alibi.sweeps.estimates import plan_table, seconds_left
from alibi.sweeps.processes import Ended
from alibi.sweeps.state import evaluation_command, read_failures, record_end, survey
from tests.reporting.rowmaker import append_rows, make_gains
from tests.sweeps.sweepmaker import finish, result, sweep_of


def test_states_of_runs(tmp_path):
    sweep = sweep_of(product={"position": ["alibi", "t5", "none", "rotary", "sinusoidal"]})
    finish(sweep, tmp_path, "alibi-L128-seed0")
    finish(sweep, tmp_path, "t5-L128-seed0")
    finish(sweep, tmp_path, "none-L128-seed0", state="running", step=200)
    finish(
        sweep, tmp_path, "rotary-L128-seed0", state="failed", step=30, reason="update 31:\nloss nan"
    )
    rows = [
        result(sweep, "alibi", 128),
        result(sweep, "alibi", 256),
        result(sweep, "t5", 128),
        result(sweep, "t5", 256, None, error="memory"),
    ]
    append_rows(tmp_path / "results.jsonl", rows)
    states = survey(sweep.runs, tmp_path)
    assert [state.describe() for state in states] == [
        "done",
        "trained, 1 of 2 results",
        "interrupted at step 200 of 500",
        "failed at step 30 of 500: update 31: loss nan",
        "missing",
    ]
    # Only a process that is at work now makes "running" true.
    training = Claim(epath.Path(tmp_path / "runs" / "none-L128-seed0"), "training")
    assert survey(sweep.runs, tmp_path)[2].describe() == "running at step 200 of 500"
    training.release()
    assert [
        [tuple(cell["length"] for _, cell in e.cells) for e in state.missing]
        for state in states[:3]
    ] == [
        [],
        [(256,)],
        [(128, 256)],
    ]
    # Without its last checkpoint a run can't be evaluated: it is trained from the one before, if
    # there is one. What has all its results needs none.
    checkpoints = {
        method: tmp_path / "runs" / f"{method}-L128-seed0" / "checkpoints"
        for method in ("alibi", "t5")
    }
    (checkpoints["alibi"] / "500").rmdir()
    (checkpoints["t5"] / "500").rename(checkpoints["t5"] / "400")
    alibi, t5, *_ = survey(sweep.runs, tmp_path)
    assert (alibi.describe(), t5.describe(), t5.tokens_left) == (
        "done",
        "interrupted at step 400 of 500",
        100 * 2048,
    )
    (checkpoints["t5"] / "400").rmdir()
    described = survey(sweep.runs, tmp_path)[1].describe()
    assert described.startswith(
        f"failed at step 500 of 500: {checkpoints['t5'].parent} has no checkpoint, but that of step 500 was saved"
    )


def test_results_of_an_earlier_step_or_another_stride_do_not_count(tmp_path):
    sweep = sweep_of(product={"position": ["alibi"]}, stride=64)
    finish(sweep, tmp_path, "alibi-L128-seed0")
    rows = [
        result(sweep, length=128),
        result(sweep, length=256, options={"stride": 64}, step=300),
        result(sweep, length=128, options={"stride": 64}),
        result(sweep, length=256, options={"stride": 64}, config_hash="another run of this name"),
        result(
            sweep,
            length=256,
            options={"stride": 64},
            override={"position": "none", "options": {}, "window": None},
        ),
    ]
    append_rows(tmp_path / "results.jsonl", rows)
    (state,) = survey(sweep.runs, tmp_path)
    ((((_, cell),),),) = [[e.cells] for e in state.missing]
    assert cell == {"length": 256}


def test_a_work_directory_of_another_config_is_named_with_its_keys(tmp_path):
    finish(sweep_of(), tmp_path, "alibi-L128-seed0")
    changed = sweep_of(
        product={"position": ["alibi"]},
        config="configs/quickstart.py:train.steps=700,log.every_steps=3",
    )
    (state,) = survey(changed.runs, tmp_path)
    assert state.state == "conflict"
    assert "differing: train.steps (500 there, 700 in the sweep)" in state.reason


def test_why_a_run_was_given_up_is_kept_until_it_succeeds(tmp_path):
    sweep, place = sweep_of(), epath.Path(tmp_path)
    alibi, t5 = sweep.runs
    finish(sweep, tmp_path, "t5-L128-seed0", state="interrupted", step=200)
    record_end(place, alibi, "there is no file\n'a.txt'")
    record_end(place, t5, Ended(-9).reason("training"))
    assert [state.describe() for state in survey(sweep.runs, tmp_path)] == [
        "missing: there is no file 'a.txt'",
        "interrupted at step 200 of 500: training was killed by SIGKILL; most often that means no memory was left",
    ]
    record_end(place, alibi, "")
    assert next(state.describe() for state in survey(sweep.runs, tmp_path)) == "missing"
    assert list(read_failures(tmp_path)) == ["t5-L128-seed0"]


def test_time_left_comes_from_the_speed_of_finished_runs(tmp_path, monkeypatch):
    sweep = sweep_of()
    states = survey(sweep.runs, tmp_path)
    assert seconds_left(states, states) is None
    # Three passes of two operations for each of 4 x 196,608 + 256 x 128 weights, attention to 64.5
    # keys a query: 1,024,000 tokens at 60e9 operations a second, and 15 s for each of two
    # processes.
    flops = 3 * 2 * (4 * 196_608 + 256 * 128 + 2 * 4 * 128 * 64.5)
    assert seconds_left(states[:1], states, rough=True) == pytest.approx(
        1_024_000 * flops / 60e9 + 30
    )
    rough = (
        "time left in all: about {} with --jobs={} on this machine of 3 cores (~: rough, training at 60 GFLOP/s a run, "
        "until one run has shown the speed)\n"
    )
    monkeypatch.setattr(estimates, "usable_cores", lambda: 3)
    assert plan_table(states).endswith(rough.format("4 min", 1))
    assert plan_table(states, jobs=2).endswith(rough.format("2 min", 2))
    monkeypatch.setattr(estimates, "is_on_cpu", lambda: False)
    assert plan_table(states).endswith(
        "time left in all: unknown until one run has shown the speed\n"
    )
    finish(sweep, tmp_path, "alibi-L128-seed0")
    append_rows(
        tmp_path / "results.jsonl",
        [result(sweep, "alibi", 128, seconds=2.0), result(sweep, "alibi", 256, seconds=3.0)],
    )
    states = survey(sweep.runs, tmp_path)
    # 500 updates of 2,048 tokens at 2,048 tokens/s, 5 s of evaluation, and 15 s to start each of
    # the two.
    assert seconds_left(states, states) == pytest.approx(500 + 5 + 2 * 15)
    assert [format_duration(s) for s in (None, 45, 634, 7200)] == [
        "unknown",
        "45 s",
        "11 min",
        "2.0 h",
    ]
    assert plan_table(states) == (
        "run               parameters     tokens  time left  state\n"
        "alibi-L128-seed0     826,112  1,024,000        0 s  done\n"
        "t5-L128-seed0        826,240  1,024,000      9 min  missing\n"
        "\n"
        "time left in all: about 9 min with --jobs=1 on this machine of 3 cores\n"
    )


def test_overrides_and_the_use_of_context_are_results_of_their_own(tmp_path):
    """The cell of context use is the set of lengths: gains over another set are none of it."""
    ntk = {"position": "rotary_ntk", "options": {"factor": 4}, "window": 64}
    sweep = sweep_of(
        product={"position": ["rotary"]},
        evaluations=[
            {"multiples": [1, 2], "evaluators": ["perplexity", "context_use"]},
            {"lengths": [256], "override": ntk},
        ],
        multiples=[1],
    )
    (run,) = sweep.runs
    finish(sweep, tmp_path, run.name)

    def missing(*rows):
        append_rows(tmp_path / "results.jsonl", rows)
        found = survey(sweep.runs, tmp_path)[0].missing
        return [[(one.name(), cell) for one, cell in evaluation.cells] for evaluation in found]

    shorter, longer = (("perplexity", {"length": length}) for length in (128, 256))
    use = ("context_use", {"lengths": (128, 256)})
    assert missing() == [[shorter], [shorter, longer, use], [longer]]
    assert survey(sweep.runs, tmp_path)[0].results == 0
    command = evaluation_command(run, survey(sweep.runs, tmp_path)[0].missing[2], tmp_path)
    (given,) = (word for word in command if word.startswith("--evaluation="))
    override = Evaluation.from_json(given.partition("=")[2]).override
    assert (override.position, override.window) == ("rotary_ntk", 64)
    assert {"eval_extrapolation.py", "--checkpoint=500", "--noreport"} < {*command}

    assert missing(result(sweep, "rotary", 128)) == [[longer, use], [longer]]
    assert missing(result(sweep, "rotary", 256)) == [[use], [longer]]
    known = {"config_hash": config_hash(run.config), "step": 500, "options": {}}
    known["run"] = run.name
    assert missing(make_gains("rotary", {128: 0.0, 512: 0.1}, **known)) == [[use], [longer]]
    assert missing(make_gains("rotary", {128: 0.0, 256: 0.1}, **known)) == [[longer]]
    assert missing(result(sweep, "rotary", 256, override=ntk)) == []


def test_a_run_whose_rows_are_all_there_needs_no_work_directory(tmp_path):
    """Rows that were committed or copied: a sweep measures only the missing rows."""
    sweep = sweep_of()
    append_rows(
        tmp_path / "results.jsonl", [result(sweep, "alibi", length) for length in (128, 256)]
    )
    append_rows(tmp_path / "results.jsonl", [result(sweep, "t5", 128)])
    assert [state.describe() for state in survey(sweep.runs, tmp_path)] == ["done", "missing"]
    assert survey(sweep.runs, tmp_path)[0].tokens_left == 0
