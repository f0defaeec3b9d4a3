"""A sweep and its tasks: no run is made twice, failures differ from stops, and a single report is
written.
"""

import concurrent.futures
import contextlib
import errno
import os
import pathlib
import re
import time

import pytest

from alibi.errors import REQUEUE, Interrupted
from alibi.storage.claims import Claim, HeldError
from alibi.storage.files import resolve
from alibi.sweeps.execute import Sweeper, is_primary, run_sweeper
from alibi.sweeps.processes import Ended
from alibi.sweeps.state import SWEEP_FILE, TASKS, read_failures, record_sweep, recorded_runs
from tests.refusals import assert_refused
from tests.reporting.rowmaker import append_rows
from tests.storage.locks import without_locks
from tests.sweeps.sweepmaker import PROJECT, finish, result, sweep_of


class Trainer(contextlib.ExitStack):
    """Takes the place of processes: trains a run, or makes its row, in `seconds`; or takes its end
    of `ends`.
    """

    stopped = False

    def __init__(self, sweep, workdir: pathlib.Path, seconds=0.0, ends=None):
        super().__init__()
        self.sweep, self.workdir, self.seconds, self.ends = sweep, workdir, seconds, ends or {}
        self.commands: list[tuple[str, str]] = []

    def run(self, command, slot):
        name = next(run.name for run in self.sweep.runs if f"runs/{run.name}" in " ".join(command))
        position = name.partition("-")[0]
        self.commands.append((command[0], position))
        time.sleep(self.seconds)
        if position in self.ends:
            end = self.ends[position]
            return end(command) if callable(end) else end
        if command[0] == "train.py":
            finish(self.sweep, self.workdir, name)
        else:
            append_rows(self.workdir / "results.jsonl", [result(self.sweep, position, run=name)])
        return Ended(0)


def sweeper_of(
    sweep, workdir, trainer=None, report=lambda failures: f"failures: {failures}", **options
):
    return Sweeper(
        sweep, workdir, processes=trainer or Trainer(sweep, workdir), report=report, **options
    )


def of_methods(*methods, **changed):
    return sweep_of(**({"product": {"position": list(methods)}, "multiples": [1]} | changed))


def made(*positions):
    return {
        (script, position)
        for script in ("train.py", "eval_extrapolation.py")
        for position in positions
    }


def test_a_limit_is_no_failure_of_a_run(tmp_path):
    """The evaluation alone fails if a text is too short for all its lengths; in a sweep its row
    says so for good.
    """
    sweep = of_methods("alibi")
    finish(sweep, tmp_path, "alibi-L128-seed0")
    short = Ended(1, "the text has 60 tokens")
    assert sweeper_of(
        sweep, tmp_path, Trainer(sweep, tmp_path, ends={"alibi": short})
    ).execute() == {"alibi-L128-seed0": "the text has 60 tokens"}

    def end(command):
        append_rows(
            tmp_path / "results.jsonl",
            [result(sweep, "alibi", 128, None, error="short", limit=True)],
        )
        return short

    assert (
        sweeper_of(sweep, tmp_path, Trainer(sweep, tmp_path, ends={"alibi": end})).execute() == {}
    )


def test_a_full_disk_is_a_failure_of_the_run_that_met_it(tmp_path):
    sweep = of_methods("alibi", "t5")
    reports = iter([OSError(errno.ENOSPC, "No space left on device"), "the report"])

    def report(failures):
        if isinstance(written := next(reports), OSError):
            raise written
        return written

    failures = sweeper_of(sweep, tmp_path, report=report).execute()
    assert list(failures) == ["alibi-L128-seed0"], "the second run was done, and reported"
    assert "no space left to write" in failures["alibi-L128-seed0"]


def test_paths_that_flags_or_checkpoints_cannot_have_are_refused(tmp_path):
    assert_refused("holds a comma", lambda: Sweeper(sweep_of(), tmp_path / "a,b"))
    assert_refused("can't hold checkpoints", lambda: Sweeper(sweep_of(), "s3://bucket/sweep"))
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "c.py").write_text((PROJECT / "configs" / "quickstart.py").read_text())
    assert_refused("holds a colon", sweep_of, config=str(folder / "c.py"))


def test_a_preempted_run_is_unfinished_and_no_failure(tmp_path, capsys):
    sweep, ends = (
        of_methods("t5", "alibi"),
        {"t5": Ended(REQUEUE, "process 1 was lost: no heartbeat")},
    )
    sweeper = sweeper_of(sweep, tmp_path, Trainer(sweep, tmp_path, ends=ends))
    assert run_sweeper(sweeper) == REQUEUE
    assert sweeper.unfinished == {"t5-L128-seed0": "process 1 was lost: no heartbeat"}
    printed = capsys.readouterr()
    assert "t5-L128-seed0 is unfinished: process 1 was lost: no heartbeat" in printed.out
    assert "failures: {}\n" in printed.out
    why = "process 1 was lost: no heartbeat; the same command goes on there"
    assert printed.err == f"unfinished: t5-L128-seed0: {why}\n"


@pytest.mark.parametrize(("code", "primary"), [(REQUEUE, True), (-6, False)])
def test_on_several_hosts_a_lost_process_stops_the_sweep(tmp_path, code, primary):
    """The next run would wait in vain. JAX ends a process by SIGABRT if the first process's run
    does not come.
    """
    sweep = of_methods("t5", "alibi")
    trainer = Trainer(sweep, tmp_path, ends={"t5": Ended(code)})
    with pytest.raises(Interrupted):
        run_sweeper(
            sweeper_of(sweep, tmp_path, trainer, flags=("--multihost=True",), primary=primary)
        )
    assert len(trainer.commands) == 1


def test_on_several_hosts_a_run_of_another_process_ends_the_sweep(tmp_path):
    sweep = of_methods("alibi")
    held = Claim(resolve(tmp_path) / TASKS / "alibi-L128-seed0", "at work")
    assert_refused(
        "at work",
        lambda: run_sweeper(sweeper_of(sweep, tmp_path, flags=("--multihost=True",))),
        raised=HeldError,
    )
    held.release()


@pytest.mark.slow
def test_tasks_that_overlap_make_each_run_once_and_one_of_them_reports(tmp_path):
    """Two tasks of the whole sweep and a third of a run, at the same time, as of a job submitted
    twice.
    """
    sweep = of_methods("alibi", "t5", "none")
    trainer, reports = Trainer(sweep, tmp_path, seconds=0.3), []
    shares = [sweep.share(task) for task in ("0/1", "0/1", "none-L128-seed0")]
    tasks = [
        sweeper_of(sweep, tmp_path, trainer, lambda _: reports.append(1) or "", share=share)
        for share in shares
    ]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        codes = list(pool.map(run_sweeper, tasks))
    assert set(codes) <= {0, REQUEUE}, "a held run may be begun again"
    assert len(trainer.commands) == 6, "a command was run twice"
    assert set(trainer.commands) == made("alibi", "t5", "none")
    assert 1 <= len(reports) <= 3
    assert list(recorded_runs(resolve(tmp_path))) == [run.name for run in sweep.runs]
    again = Trainer(sweep, tmp_path)
    assert run_sweeper(sweeper_of(sweep, tmp_path, again, share=shares[0])) == 0
    assert again.commands == [], "a retry finds all done"


@pytest.mark.parametrize("folder", [TASKS, "runs"], ids=["by-a-sweep", "by-train.py"])
def test_a_held_run_is_left_and_the_task_makes_its_others(tmp_path, capsys, folder):
    sweep = of_methods("alibi", "t5", "none")
    held = Claim(resolve(tmp_path) / folder / sweep.runs[0].name, "at work")
    trainer = Trainer(sweep, tmp_path)
    task = sweeper_of(
        sweep, tmp_path, trainer, lambda _: pytest.fail("not all ended"), share=sweep.runs, jobs=0
    )
    assert run_sweeper(task) == REQUEUE, "if its owner was killed, the next start goes on"
    assert set(trainer.commands) == made("t5", "none")
    printed = capsys.readouterr()
    assert "2 of 3 runs of the sweep have ended; the last task reports" in printed.out
    assert re.fullmatch(
        rf"unfinished: alibi-L128-seed0: another process is .* in {tmp_path}/.* \(process {os.getpid()} on .*, "
        "or one that it started\\); wait for it, or stop it; the same command goes on there\n",
        printed.err,
    )
    held.release()
    plain = Trainer(sweep, tmp_path)
    assert run_sweeper(sweeper_of(sweep, tmp_path, plain)) == 0
    assert set(plain.commands) == made("alibi")


def test_without_locks_the_process_that_started_last_goes_on(tmp_path, monkeypatch, capsys):
    without_locks(monkeypatch)
    sweep = of_methods("alibi")

    def taken_over(command):
        Claim(resolve(tmp_path) / TASKS / "alibi-L128-seed0", "at work")
        return Ended(1, "another start has begun since")

    first = sweeper_of(
        sweep, tmp_path, Trainer(sweep, tmp_path, ends={"alibi": taken_over}), share=sweep.runs
    )
    assert run_sweeper(first) == 0
    assert list(first.left) == ["alibi-L128-seed0"]
    assert read_failures(tmp_path) == {}
    last = Trainer(sweep, tmp_path)
    assert run_sweeper(sweeper_of(sweep, tmp_path, last, share=sweep.runs)) == 0
    assert set(last.commands) == made("alibi")


def test_codes_say_whether_to_requeue_and_failures_of_all_tasks_are_reported(tmp_path, capsys):
    sweep = of_methods("alibi", "t5")
    first, second = sweep.runs[:1], sweep.runs[1:]
    failing = Trainer(sweep, tmp_path, ends={"t5": Ended(1, "no such file")})
    assert run_sweeper(sweeper_of(sweep, tmp_path, failing, share=second)) == 1
    assert "failed: t5-L128-seed0: no such file\n" in capsys.readouterr().err
    stopped = Trainer(sweep, tmp_path, ends={"alibi": Ended(REQUEUE, "it was stopped by a signal")})
    assert run_sweeper(sweeper_of(sweep, tmp_path, stopped, share=first)) == REQUEUE
    reported = []
    assert run_sweeper(sweeper_of(sweep, tmp_path, report=reported.append, share=first)) == 0
    assert reported == [{"t5-L128-seed0": "no such file"}] == [read_failures(tmp_path)]


def test_a_changed_sweep_is_refused_with_the_runs_that_differ(tmp_path):
    """A task never replaces the record of another sweep; a whole sweep does, unless a task is at
    work.
    """
    before, now = of_methods("alibi", "t5"), of_methods("alibi", "none", multiples=[1, 2])
    place = resolve(tmp_path)
    record_sweep(place, before, replace=False)
    record_sweep(place, of_methods("alibi", "t5"), replace=False)
    differing = (
        r"have changed since it began in .* \(alibi-L128-seed0, none-L128-seed0, t5-L128-seed0\)"
    )
    assert_refused(differing, lambda: sweeper_of(now, tmp_path, share=now.runs).execute())
    assert_refused(
        r"\(their order\)", lambda: record_sweep(place, of_methods("t5", "alibi"), replace=False)
    )
    at_work = Claim(place / TASKS / "t5-L128-seed0", "at work")
    assert_refused(
        "at work are tasks on t5-L128-seed0", lambda: sweeper_of(now, tmp_path).execute()
    )
    at_work.release()
    record_sweep(place, now, replace=True)
    assert list(recorded_runs(place)) == [run.name for run in now.runs]
    (tmp_path / SWEEP_FILE).write_text("{")
    record_sweep(place, before, replace=False)
    assert list(recorded_runs(place)) == [run.name for run in before.runs], (
        "a damaged record is replaced"
    )


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
def test_one_process_of_many_writes_the_report(
    monkeypatch, process_id, multihost, environment, primary
):
    monkeypatch.setattr(os, "environ", environment)
    assert is_primary(process_id, multihost) is primary


def test_several_hosts_without_ranks_are_refused(monkeypatch):
    """Else each would train all runs."""
    monkeypatch.setattr(os, "environ", {})
    assert_refused("ALIBI_PROCESS_ID", is_primary, None, multihost=True)
