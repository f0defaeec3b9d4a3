"""Tasks of a sweep: which runs each does, that no run is done twice, and that all do one and the same sweep."""

import concurrent.futures
import dataclasses
import json
import pathlib
import time

import pytest
from etils import epath

from alibi.errors import REQUEUE, Interrupted
from alibi.storage.claims import Claim, is_held
from alibi.sweeps import execute, tasks
from alibi.sweeps.definition import Evaluation
from alibi.sweeps.execute import Sweeper, run_sweeper
from alibi.sweeps.launchers import Ended, Launcher
from alibi.sweeps.state import read_failures
from alibi.sweeps.tasks import SWEEP_FILE, claim_place, pin, pin_anew, pinned, share_of
from tests.reporting.rowmaker import append_rows
from tests.sweeps.sweepmaker import finish, result, sweep_of

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
        ("0/0", "--task=0/0: N of I/N must be at least 1, such as --task=0/6"),
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


def done(*positions):
    return {(script, position) for script in ("train.py", "eval_extrapolation.py") for position in positions}


def test_tasks_that_overlap_do_each_run_once_and_one_of_them_reports(tmp_path, swift):
    """Two of the whole sweep and one of a run, at the same time, as by a job that was submitted twice."""
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
    assert list(pinned(epath.Path(tmp_path))) == [run.name for run in sweep.runs]
    again = Trainer(sweep, tmp_path)
    assert run_sweeper(Sweeper(sweep, tmp_path, share=shares[0], launcher=again, report=lambda _: "the report")) == 0
    assert again.commands == [], "a retry finds all done"


def test_a_run_that_is_held_is_left_and_the_task_does_its_others(tmp_path, swift, capsys):
    sweep = sweep_of(product={"position": ["alibi", "t5", "none"]}, multiples=[1])
    held, trainer = Claim(claim_place(epath.Path(tmp_path), sweep.runs[0]), "at work"), Trainer(sweep, tmp_path)
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
    held, trainer = Claim(claim_place(epath.Path(tmp_path), sweep.runs[0]), "at work"), Trainer(sweep, tmp_path)
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
    store = epath.Path(tmp_path)
    pin(store, before)
    pin(store, sweep_of(product={"position": ["alibi", "t5"], "seed": [0]}, multiples=[1]))
    with pytest.raises(ValueError, match=r"have changed since it began in .* \(changed: alibi-L128-seed0; new: none"):
        Sweeper(now, tmp_path, share=now.runs).execute()
    with pytest.raises(ValueError, match=r"\(their order\); give the sweep and its config as they were"):
        pin(store, sweep_of(product={"position": ["t5", "alibi"], "seed": [0]}, multiples=[1]))
    at_work = Claim(claim_place(store, before.runs[1]), "at work")
    with pytest.raises(ValueError, match="at work are tasks on t5-L128-seed0"):
        pin_anew(store, now)
    at_work.release()
    pin_anew(store, now)
    assert list(pinned(store)) == [run.name for run in now.runs]
    for damaged in ("{", '{"runs": {"alibi-L128-seed0": "0a1b2c3d4e5f"}}'):  # and one of before, which was of hashes
        (tmp_path / SWEEP_FILE).write_text(damaged)
        pin(store, before)
        assert list(pinned(store)) == [run.name for run in before.runs], "what is damaged says nothing"


def test_what_is_kept_of_a_sweep_outlives_new_keys_of_evaluations(tmp_path, monkeypatch):
    """What is at its default isn't written, so that a sweep under way goes on with a version that knows more keys."""
    override = {"position": "rotary_ntk", "options": {"factor": 4.0}}
    evaluations = [{"lengths": [64, 128], "stride": 32}, {"lengths": [128], "override": override}]
    sweep, store = sweep_of(product={"position": ["rotary"]}, evaluations=evaluations), epath.Path(tmp_path)
    pin(store, sweep)
    (kept,) = json.loads((tmp_path / SWEEP_FILE).read_text())["runs"].values()
    assert kept["evaluations"][1] == {"lengths": [64, 128], "stride": 32, "split": "valid"}
    (run,) = sweep.runs
    assert pinned(store)[run.name].evaluations == run.evaluations

    @dataclasses.dataclass(frozen=True)
    class Younger(Evaluation):
        """With a key that there was not when the sweep began."""

        temperature: float = 1.0

    def of_today(**more):
        fields = [{one.name: getattr(each, one.name) for one in dataclasses.fields(each)} for each in run.evaluations]
        today = dataclasses.replace(run, evaluations=tuple(Younger(**one, **more) for one in fields))
        return dataclasses.replace(sweep, runs=(today,))

    monkeypatch.setattr(tasks, "Evaluation", Younger)
    pin(store, of_today())
    with pytest.raises(ValueError, match=r"\(changed: rotary-L128-seed0\)"):
        pin(store, of_today(temperature=0.5))


def test_a_sweep_without_tasks_keeps_what_it_is_unless_tasks_do_another(tmp_path, swift):
    before, now = (sweep_of(product={"position": [name]}, multiples=[1]) for name in ("alibi", "t5"))
    store = epath.Path(tmp_path)
    execute.Sweeper(before, tmp_path, launcher=Trainer(before, tmp_path), report=lambda _: "the report").execute()
    assert list(pinned(store)) == ["alibi-L128-seed0"]
    at_work, other = Claim(claim_place(store, before.runs[0]), "at work"), Trainer(now, tmp_path)
    with pytest.raises(ValueError, match="at work are tasks on alibi-L128-seed0"):
        Sweeper(now, tmp_path, launcher=other, report=lambda _: "the report").execute()
    assert not is_held(store)
    at_work.release()
    assert other.commands == []
    Sweeper(now, tmp_path, launcher=other, report=lambda _: "the report").execute()
    assert list(pinned(store)) == ["t5-L128-seed0"]


@pytest.mark.parametrize("given_back", [True, False])
def test_of_several_hosts_the_first_leaves_a_held_run_so_that_all_begin_again(tmp_path, monkeypatch, swift, given_back):
    """The others have begun with what there was to do: their run would wait for one that is done meanwhile."""
    monkeypatch.setattr(execute, "LEAVE_SECONDS", 60.0 if given_back else 0.1)
    sweep = sweep_of(product={"position": ["alibi", "t5"]}, multiples=[1])
    held, trainer = Claim(claim_place(epath.Path(tmp_path), sweep.runs[0]), "at work"), Trainer(sweep, tmp_path)
    first = Sweeper(sweep, tmp_path, share=sweep.runs, flags=("--multihost=True",), launcher=trainer)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        left = pool.submit(run_sweeper, first)
        if given_back:
            time.sleep(0.6)  # it has looked, for 0.3 s
            held.release()
        with pytest.raises(Interrupted, match="the same command, given again on all hosts, goes on"):
            left.result()
    held.release()
    assert trainer.commands == []
    assert not is_held(claim_place(epath.Path(tmp_path), sweep.runs[0]))


def test_of_several_hosts_one_whose_process_met_nobody_is_started_again(tmp_path):
    """JAX ends a process by SIGABRT where the first one's doesn't come: that is no failure of the run."""
    sweep = sweep_of(product={"position": ["alibi"]}, multiples=[1])
    trainer = Trainer(sweep, tmp_path, ends={"alibi": Ended(-6)})
    other = Sweeper(sweep, tmp_path, share=sweep.runs, flags=("--multihost=True",), primary=False, launcher=trainer)
    with pytest.raises(Interrupted):
        run_sweeper(other)


def test_hosts_without_tasks_leave_a_work_directory_that_is_held(tmp_path):
    held, sweep = Claim(epath.Path(tmp_path), "at work"), sweep_of(product={"position": ["alibi"]}, multiples=[1])
    first = Sweeper(sweep, tmp_path, flags=("--multihost=True",), launcher=Trainer(sweep, tmp_path))
    with pytest.raises(Interrupted, match="another process is at work in"):
        run_sweeper(first)
    held.release()
