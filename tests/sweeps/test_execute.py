"""What a sweep does with a failure, a full disk or a second process, and what it says of it."""

import concurrent.futures
import errno
import fcntl
import time
import types

import pytest
from etils import epath

from alibi.errors import REQUEUE, Interrupted
from alibi.runs import RunDirectory
from alibi.storage.claims import Claim, LostError, is_held
from alibi.sweeps import execute
from alibi.sweeps.execute import is_primary
from alibi.sweeps.launchers import Ended, Launcher
from tests.reporting.rowmaker import append_rows
from tests.sweeps.sweepmaker import PROJECT, finish, result, sweep_of


def test_a_limit_is_no_failure_of_a_run(tmp_path, monkeypatch):
    """The evaluation alone fails where a text is too short for all its lengths; in a sweep the row says so for good."""
    sweep = sweep_of(product={"position": ["alibi"]})
    finish(sweep, tmp_path, "alibi-L128-seed0")
    sweeper = execute.Sweeper(sweep, tmp_path)
    monkeypatch.setattr(sweeper, "_evaluate", lambda *_: "the text has 60 tokens")
    assert sweeper._bring_to_end(sweep.runs[0], "alibi", None) == "the text has 60 tokens"
    rows = [result(sweep, "alibi", length, None, error="the text has 60 tokens", limit=True) for length in (128, 256)]
    monkeypatch.setattr(sweeper, "_evaluate", lambda *_: append_rows(tmp_path / "results.jsonl", rows) or "too short")
    assert sweeper._bring_to_end(sweep.runs[0], "alibi", None) == ""


def test_a_full_disk_is_a_failure_of_the_run_that_met_it(tmp_path):
    sweep = sweep_of(product={"position": ["alibi", "t5"]})
    for name in ("alibi", "t5"):
        finish(sweep, tmp_path, f"{name}-L128-seed0")
    rows = [result(sweep, position, length) for position in ("alibi", "t5") for length in (128, 256)]
    append_rows(tmp_path / "results.jsonl", rows)
    reports = iter([OSError(errno.ENOSPC, "No space left on device"), "the report"])

    def report(failures):
        if isinstance(made := next(reports), OSError):
            raise made
        return made

    sweeper = execute.Sweeper(sweep, tmp_path, report=report)
    why = f"no space left to write {tmp_path}; what was saved before is whole: make space and repeat the command"
    assert sweeper.execute() == {"alibi-L128-seed0": why}, "the second run was done, and reported"


def test_paths_that_flags_cannot_carry_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds a comma"):
        execute.Sweeper(sweep_of(), tmp_path / "a,b")
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "c.py").write_text((PROJECT / "configs" / "quickstart.py").read_text())
    with pytest.raises(ValueError, match="holds a colon"):
        sweep_of(config=str(folder / "c.py"))


def test_a_sweep_says_how_long_it_took_for_what(tmp_path, monkeypatch, capsys):
    """Of three runs one is trained and evaluated before, one trained, one neither: it takes 2 h 0 min and 59 s."""
    sweep = sweep_of(product={"position": ["alibi", "t5", "none"]}, multiples=[1])
    for position in ("alibi", "t5"):
        finish(sweep, tmp_path, f"{position}-L128-seed0")
    append_rows(tmp_path / "results.jsonl", [result(sweep, "alibi", run="alibi-L128-seed0")])
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now, strftime=time.strftime)

    class Remote(Launcher):
        """Any other place than a process here."""

        def run(self, command, place):
            if command.script == "train.py":
                finish(sweep, tmp_path, "none-L128-seed0")
                clock.now += 2 * 3600 + 59
            else:
                position = "t5" if "/t5-L128-seed0" in command.flags[0] else "none"
                append_rows(tmp_path / "results.jsonl", [result(sweep, position, run=f"{position}-L128-seed0")])
                clock.now += 100
            return Ended(0)

    monkeypatch.setattr(execute, "time", clock)
    assert execute.Sweeper(sweep, tmp_path, report=lambda failures: "report", launcher=Remote()).execute() == {}
    assert capsys.readouterr().out.endswith("\nreport\ntook 2 h 4 min; runs trained: 1, evaluated: 2\n")


class Preempting(Launcher):
    """A place that takes the run of t5 back, and trains others, whose rows it makes, to their end."""

    def __init__(self, sweep, workdir):
        self.sweep, self.workdir, self.commands = sweep, workdir, []

    def run(self, command, place):
        self.commands.append(command)
        position = "t5" if "t5-L128-seed0" in " ".join(command.flags) else "alibi"
        if position == "t5":
            return Ended(REQUEUE, "process 1 was lost: no heartbeat")
        if command.script == "train.py":
            finish(self.sweep, self.workdir, "alibi-L128-seed0")
        else:
            rows = [result(self.sweep, position, length, run="alibi-L128-seed0") for length in (128, 256)]
            append_rows(self.workdir / "results.jsonl", rows)
        return Ended(0)


def test_a_preempted_run_is_unfinished_and_no_failure(tmp_path, capsys):
    sweep = sweep_of(product={"position": ["t5", "alibi"]})
    launcher = Preempting(sweep, tmp_path)
    sweeper = execute.Sweeper(sweep, tmp_path, report=lambda failures: f"failures: {failures}", launcher=launcher)
    assert execute.run_sweeper(sweeper) == REQUEUE
    assert sweeper.unfinished == ["t5-L128-seed0"]
    said = capsys.readouterr()
    assert "t5-L128-seed0 is unfinished: process 1 was lost: no heartbeat" in said.out
    assert "failures: {}\n" in said.out
    assert said.err == "unfinished: t5-L128-seed0; the same command goes on there\n"


def test_on_several_hosts_a_preempted_run_stops_the_sweep(tmp_path):
    """The next one would wait in vain for a host that is gone."""
    sweep = sweep_of(product={"position": ["t5", "alibi"]})
    launcher = Preempting(sweep, tmp_path)
    sweeper = execute.Sweeper(sweep, tmp_path, flags=("--multihost=True",), launcher=launcher)
    with pytest.raises(Interrupted):
        execute.run_sweeper(sweeper)
    assert len(launcher.commands) == 1


def test_the_lock_shows_a_sweep_at_work(tmp_path):
    place = epath.Path(tmp_path)
    assert not is_held(place)
    with (tmp_path / ".lock").open("a") as file:
        assert not is_held(place)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_held(place)
    assert not is_held(place)


def test_a_second_start_waits_and_finds_all_done(tmp_path, monkeypatch, capsys):
    """Each command is run once, whoever of the two begins."""
    monkeypatch.setattr("alibi.storage.claims.POLL_SECONDS", 0.05)
    sweep = sweep_of(product={"position": ["alibi"]}, multiples=[1])
    commands = []

    class Slow(Launcher):
        def run(self, command, place):
            commands.append(command.script)
            time.sleep(0.6)
            if command.script == "train.py":
                finish(sweep, tmp_path, "alibi-L128-seed0")
            else:
                append_rows(tmp_path / "results.jsonl", [result(sweep, "alibi", run="alibi-L128-seed0")])
            return Ended(0)

    sweepers = [execute.Sweeper(sweep, tmp_path, report=lambda _: "report", launcher=Slow()) for _ in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(execute.Sweeper.execute, sweepers)) == [{}, {}]
    assert commands == ["train.py", "eval_extrapolation.py"]
    said = capsys.readouterr().out
    assert said.count("another process is at work in") == said.count("alibi-L128-seed0: done") == 1


def test_a_run_that_a_killed_sweep_left_at_work_is_waited_for(tmp_path, monkeypatch, capsys):
    """The next sweep is not held back by it, and train.py would refuse, which is no failure."""
    monkeypatch.setattr(execute, "POLL_SECONDS", 0.05)
    sweep, run = sweep_of(product={"position": ["alibi"]}, multiples=[1]), tmp_path / "runs" / "alibi-L128-seed0"
    left = Claim(epath.Path(run), "training")

    class Waited(Launcher):
        def run(self, command, place):
            raise AssertionError(f"{command.script} was started beside it")

    def end():
        time.sleep(0.5)
        append_rows(tmp_path / "results.jsonl", [result(sweep, "alibi", run=run.name)])
        steps = sweep.runs[0].config.train.steps
        (run / "checkpoints" / str(steps)).mkdir(parents=True)
        RunDirectory(run).write_status("finished", step=steps, steps=steps, tokens_per_second=2048.0)
        left.release()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        ended = pool.submit(end)
        assert execute.Sweeper(sweep, tmp_path, report=lambda _: "report", launcher=Waited()).execute() == {}
        ended.result()
    said = capsys.readouterr().out
    assert said.count(f"another process is training in {run}; waiting until it ends") == 1
    assert "alibi-L128-seed0: done" in said


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_sweep_that_was_taken_over_starts_nothing_more(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    sweep = sweep_of(product={"position": ["alibi", "t5"]}, multiples=[1])
    commands = []

    class Other(Launcher):
        def run(self, command, place):
            commands.append(command.script)
            Claim(epath.Path(tmp_path), "at work")
            return Ended(1, "no memory")

    with pytest.raises(LostError, match="a process that started later is at work in"):
        execute.Sweeper(sweep, tmp_path, launcher=Other()).execute()
    assert commands == ["train.py"]
    assert not (tmp_path / "failures").exists()


def test_an_address_that_cannot_hold_runs_is_refused_before_any_work():
    with pytest.raises(ValueError, match="can't hold checkpoints: Orbax writes them to directories and gs:// only"):
        execute.Sweeper(sweep_of(), "s3://bucket/sweep")


@pytest.mark.parametrize(
    ("process_id", "multihost", "environment", "primary"),
    [
        (None, False, {}, True),
        (0, True, {"SLURM_PROCID": "3"}, True),
        (1, False, {}, False),
        (None, True, {"TPU_WORKER_ID": "0"}, True),
        (None, True, {"SLURM_PROCID": "2"}, False),
        (None, False, {"SLURM_PROCID": "2"}, True),  # a single process in a cluster's job
    ],
)
def test_one_process_of_many_writes_the_report(process_id, multihost, environment, primary):
    assert is_primary(process_id, multihost, environment) is primary
