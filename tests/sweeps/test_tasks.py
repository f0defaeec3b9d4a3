"""Tasks of a sweep: which runs each does, that no run is done twice, and that all do one and the same sweep."""

import concurrent.futures
import fcntl
import functools
import pathlib
import time

import pytest

from alibi.errors import REQUEUE
from alibi.runs.lease import Claim
from alibi.runs.store import Folder
from alibi.sweeps import execute
from alibi.sweeps.execute import Sweeper, run_sweeper
from alibi.sweeps.launchers import Ended, Launcher
from alibi.sweeps.state import read_failures
from alibi.sweeps.tasks import SWEEP_FILE, claim_place, known_runs, pin, pin_anew, share_of
from tests.reporting.rowmaker import append_rows
from tests.sweeps.sweepmaker import finish, result, sweep_of
from tests.sweeps.test_execute import no_locks

METHODS = ["alibi", "t5", "none", "rotary", "sinusoidal", "learned"]
SIX = {"position": METHODS}


@pytest.mark.parametrize(
    ("task", "positions"),
    [("0/3", ["alibi", "rotary"]), ("2/3", ["none", "learned"]), ("5/8", ["learned"]), ("t5-L128-seed0", ["t5"])],
)
def test_a_task_has_every_nth_run_or_the_named_one(task, positions):
    assert [run.config.position for run in share_of(sweep_of(product=SIX, multiples=[1]), task)] == positions


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("6/7", "--task=6/7 is beyond the sweep's 6 runs; give --task=0/6 to 5/6"),
        ("3/3", "--task=3/3: tasks are counted from 0, so there are 0/3 to 2/3"),
        ("0/0", "--task=0/0: tasks are counted from 0"),
        ("t5-L128", "--task=t5-L128 is neither a part of the sweep, such as 0/6, nor one of its 6 runs; did you mean "
         "'t5-L128-seed0'"),
    ],
)  # fmt: skip
def test_a_task_that_there_is_not(task, message):
    with pytest.raises(ValueError, match=message):
        share_of(sweep_of(product=SIX, multiples=[1]), task)


class Trainer(Launcher):
    """Trains a run in `seconds`, and makes its row; `ends` says otherwise by method. Notes the commands of all."""

    def __init__(self, sweep, workdir: pathlib.Path, seconds=0.0, ends=None):
        self.sweep, self.workdir, self.seconds, self.ends = sweep, workdir, seconds, ends or {}
        self.commands: list[tuple[str, str]] = []

    def run(self, command, place):
        name = next(run.name for run in self.sweep.runs if f"runs/{run.name}" in " ".join(command.flags))
        position = name.partition("-")[0]
        self.commands.append((command.script, position))
        time.sleep(self.seconds)
        if position in self.ends:
            return self.ends[position]
        if command.script == "train.py":
            finish(self.sweep, self.workdir, name)
        else:
            append_rows(self.workdir / "results.jsonl", [result(self.sweep, position, run=name)])
        return Ended(0)


@pytest.fixture
def swift(monkeypatch):
    """Claims without their waits, and tasks that leave what is held after half a second."""
    monkeypatch.setattr(execute, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(execute, "LEAVE_SECONDS", 0.5)
    monkeypatch.setattr(execute, "Claim", functools.partial(Claim, beat=0.1, stale=60.0))


def done(*positions):
    return {(script, position) for script in ("train.py", "eval_extrapolation.py") for position in positions}


@pytest.mark.parametrize("locks", [True, False])
def test_tasks_that_overlap_do_each_run_once_and_one_of_them_reports(tmp_path, monkeypatch, swift, locks):
    """Two of the whole sweep and one of a run, at the same time, as by a job that was submitted twice."""
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    sweep = sweep_of(product={"position": ["alibi", "t5", "none"]}, multiples=[1])
    trainer, reports = Trainer(sweep, tmp_path, seconds=0.3), []
    shares = [share_of(sweep, task) for task in ("0/1", "0/1", "none-L128-seed0")]
    tasks = [
        Sweeper(sweep, tmp_path, share=share, launcher=trainer, report=lambda _: reports.append(1) or "the report")
        for share in shares
    ]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run_sweeper, tasks)) == [0, 0, 0]
    assert len(trainer.commands) == 6, "a command was run twice"
    assert set(trainer.commands) == done("alibi", "t5", "none")
    assert 1 <= len(reports) <= 3
    assert known_runs(Folder(tmp_path)) == [run.name for run in sweep.runs]
    again = Trainer(sweep, tmp_path)
    assert run_sweeper(Sweeper(sweep, tmp_path, share=shares[0], launcher=again, report=lambda _: "the report")) == 0
    assert again.commands == [], "a retry finds all done"


def test_a_run_that_is_held_is_left_and_the_task_does_its_others(tmp_path, swift, capsys):
    sweep = sweep_of(product={"position": ["alibi", "t5", "none"]}, multiples=[1])
    held, trainer = Claim(claim_place(Folder(tmp_path), sweep.runs[0]), "at work"), Trainer(sweep, tmp_path)
    task = Sweeper(sweep, tmp_path, share=sweep.runs, launcher=trainer, report=lambda _: pytest.fail("not all ended"))
    assert run_sweeper(task) == 0
    assert set(trainer.commands) == done("t5", "none")
    said = capsys.readouterr()
    assert "2 of 3 runs of the sweep have ended; whichever task ends last reports" in said.out
    assert said.err == "left to the processes at work on them: alibi-L128-seed0\n"
    held.release()
    # The command without a task waits for nobody now, does what is left, and reports.
    plain = Trainer(sweep, tmp_path)
    assert run_sweeper(Sweeper(sweep, tmp_path, launcher=plain, report=lambda _: "the report")) == 0
    assert set(plain.commands) == done("alibi")


def test_a_run_that_is_given_back_meanwhile_is_done(tmp_path, swift):
    """As what a killed task left of itself, which ends soon after."""
    sweep = sweep_of(product={"position": ["alibi"]}, multiples=[1])
    held, trainer = Claim(claim_place(Folder(tmp_path), sweep.runs[0]), "at work"), Trainer(sweep, tmp_path)
    task = Sweeper(sweep, tmp_path, share=sweep.runs, launcher=trainer, report=lambda _: "the report")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        code = pool.submit(run_sweeper, task)
        time.sleep(0.2)
        held.release()
        assert code.result() == 0
    assert set(trainer.commands) == done("alibi")


def test_codes_say_whether_to_requeue_and_failures_of_all_tasks_are_reported(tmp_path, swift):
    sweep = sweep_of(product={"position": ["alibi", "t5"]}, multiples=[1])
    ends = {"t5": Ended(1, "no such file")}
    failing = Sweeper(sweep, tmp_path, share=sweep.runs[1:], launcher=Trainer(sweep, tmp_path, ends=ends))
    assert run_sweeper(failing) == 1
    ends = {"alibi": Ended(REQUEUE, "it was stopped by a signal")}
    stopped = Sweeper(sweep, tmp_path, share=sweep.runs[:1], launcher=Trainer(sweep, tmp_path, ends=ends))
    assert run_sweeper(stopped) == REQUEUE
    told = []
    last = Sweeper(sweep, tmp_path, share=sweep.runs[:1], launcher=Trainer(sweep, tmp_path), report=told.append)
    assert run_sweeper(last) == 0
    assert told == [{"t5-L128-seed0": "no such file"}] == [read_failures(tmp_path)]


def test_a_sweep_that_changed_between_tasks_is_refused_with_what_differs(tmp_path):
    before = sweep_of(product={"position": ["alibi", "t5"], "seed": [0]}, multiples=[1])
    now = sweep_of(product={"position": ["alibi", "none"], "seed": [0]}, multiples=[1, 2])
    store = Folder(tmp_path)
    pin(store, before)
    pin(store, sweep_of(product={"position": ["alibi", "t5"], "seed": [0]}, multiples=[1]))
    with pytest.raises(
        ValueError, match=r"have changed since tasks began in .* \(changed: alibi-L128-seed0; new: none"
    ):
        Sweeper(now, tmp_path, share=now.runs).execute()
    with pytest.raises(ValueError, match=r"\(their order\); give the sweep and its config as they were"):
        pin(store, sweep_of(product={"position": ["t5", "alibi"], "seed": [0]}, multiples=[1]))
    at_work = Claim(claim_place(store, before.runs[1]), "at work")
    with pytest.raises(ValueError, match="at work are tasks on t5-L128-seed0"):
        pin_anew(store, now)
    at_work.release()
    pin_anew(store, now)
    assert known_runs(store) == [run.name for run in now.runs]
    (tmp_path / SWEEP_FILE).write_text("{")
    pin(store, before)  # what is damaged says nothing
