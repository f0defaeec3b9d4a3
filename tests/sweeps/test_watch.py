"""The state of runs as a process elsewhere sees it."""

import datetime

from etils import epath

from alibi.storage.claims import Claim
from alibi.sweeps.state import TASKS, record_end, record_sweep
from alibi.sweeps.watch import SUBMITTED_FILE, holders, standings, summary, table
from tests.refusals import assert_refused
from tests.storage.locks import without_locks
from tests.sweeps.sweepmaker import finish, sweep_of


def test_a_line_for_each_run_that_has_begun_or_not(tmp_path, monkeypatch):
    methods = ["alibi", "t5", "none", "rotary", "sinusoidal", "fire", "fox"]
    sweep, store = sweep_of(product={"position": methods}, multiples=[1]), epath.Path(tmp_path)
    record_sweep(store, sweep, replace=False)
    runs = {run.config.position: run for run in sweep.runs}
    name = "{}-L128-seed0".format
    finish(sweep, tmp_path, name("alibi"), train_nll=1.5)
    finish(sweep, tmp_path, name("t5"))  # is trained and is evaluated now
    finish(sweep, tmp_path, name("none"), state="running", step=200, train_nll=2.25)
    finish(sweep, tmp_path, name("rotary"), state="running", step=300)
    finish(
        sweep, tmp_path, name("sinusoidal"), state="failed", step=30, reason="update 31:\nloss nan"
    )
    record_end(store, runs["fire"], "there is no file 'a.txt'")
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=12)
    claims = [
        Claim(store / TASKS / name("t5"), "at work"),
        Claim(epath.Path(tmp_path / "runs" / name("none")), "training"),
    ]
    assert standings(store, now)[0].state == "trained", "its result isn't there yet"
    assert not standings(store, now)[0].is_over
    record_end(store, runs["alibi"], "")
    found = standings(store, now)
    states = ["finished", "evaluating", "running", "interrupted", "failed", "failed", "waiting"]
    assert [(one.name, one.state) for one in found] == list(
        zip(map(name, methods), states, strict=True)
    )
    assert [one.is_over for one in found] == [True, False, False, False, True, True, False]
    # 300 updates of 2,048 tokens are left, at 2,048 tokens a second.
    assert (found[2].train_nll, found[2].seconds_left) == (2.25, 300.0)
    assert table(found[1:], now).splitlines() == [
        "run                    state            update    loss  tokens/s  time left   last sign",
        "t5-L128-seed0          evaluating   500 of 500             2,048             12 min ago",
        "none-L128-seed0        running      200 of 500  2.2500     2,048      5 min  12 min ago",
        "rotary-L128-seed0      interrupted  300 of 500             2,048      3 min  12 min ago",
        "sinusoidal-L128-seed0  failed        30 of 500             2,048             12 min ago",
        "fire-L128-seed0        failed",
        "fox-L128-seed0         waiting",
        "sinusoidal-L128-seed0: update 31: loss nan",
        "fire-L128-seed0: there is no file 'a.txt'",
    ]
    counts = "1 finished, 1 evaluating, 1 running, 1 interrupted, 2 failed, 1 waiting"
    assert summary(store, found) == f"{tmp_path}: {counts}\n"
    for claim in claims:
        claim.release()
    soon = now - datetime.timedelta(minutes=11)
    assert standings(store, soon)[2].state == "interrupted", "its lock is gone"
    without_locks(monkeypatch)  # then a recent status counts
    assert [standings(store, time)[2].state for time in (soon, now)] == ["running", "interrupted"]


def test_a_single_run_and_one_that_begins(tmp_path):
    sweep = sweep_of(product={"position": ["alibi"]})
    finish(sweep, tmp_path, "alibi-L128-seed0", state="interrupted", step=100)
    place = epath.Path(tmp_path / "runs" / "alibi-L128-seed0")
    now = datetime.datetime.now(datetime.UTC)
    claim = Claim(place, "training")
    (one,) = standings(place, now)
    assert (one.name, one.state, one.step) == ("alibi-L128-seed0", "starting", 100)
    claim.release()
    (one,) = standings(place, now)
    assert one.state == "interrupted"
    (place / "status.json").write_text("{")
    (one,) = standings(place, now)
    assert (one.state, one.is_over) == ("damaged", True)
    assert "status.json is damaged" in table([one], now)


def test_runs_and_sweeps_one_level_below_are_shown(tmp_path):
    above, now = epath.Path(tmp_path), datetime.datetime.now(datetime.UTC)
    sweep = tmp_path / "sweep"
    record_sweep(epath.Path(sweep), sweep_of(product={"position": ["alibi"]}), replace=False)
    assert holders(above) == [above / "sweep"]
    for name in ("one", "two", "a\\b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / SUBMITTED_FILE).write_text("{}")
    (tmp_path / "file.txt").touch()
    assert holders(above) == [above, above / "sweep"]
    found = standings(above, now)
    assert [(run.name, run.state) for run in found[1:]] == [("one", "waiting"), ("two", "waiting")]
    assert (found[0].name, found[0].state) == ("a\\b", "damaged"), "it can't be a run's name"
    assert holders(above / "one") == [above / "one"]


def test_a_run_whose_rows_came_from_elsewhere_is_finished(tmp_path):
    sweep = sweep_of(product={"position": ["alibi"]}, multiples=[1])
    record_sweep(epath.Path(tmp_path), sweep, replace=False)
    record_end(epath.Path(tmp_path), sweep.runs[0], "")
    (one,) = standings(epath.Path(tmp_path), datetime.datetime.now(datetime.UTC))
    assert one.state == "finished"


def test_what_is_no_work_directory(tmp_path):
    assert_refused(
        f"{tmp_path} .* --workdir",
        lambda: standings(epath.Path(tmp_path), datetime.datetime.now(datetime.UTC)),
    )
