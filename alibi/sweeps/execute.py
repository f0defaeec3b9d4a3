"""Runs a sweep: trains what is missing, evaluates, reports; each step in a process of its own."""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from alibi.errors import FAILED, REQUEUE, UserError, disk_errors_named
from alibi.parallel.signals import Interrupted
from alibi.reporting.report import write_report
from alibi.sweeps.definition import Evaluation, Run, Sweep
from alibi.sweeps.estimates import Speed, format_duration
from alibi.sweeps.launchers import Command, Ended, Launcher, LocalProcesses, Place, places, suitable_jobs
from alibi.sweeps.state import (
    RunState,
    evaluation_command,
    read_failures,
    run_directory,
    survey,
    train_command,
    try_lock,
    write_failure,
)

# Ranks as the launchers of clusters tell them. Asking JAX would claim this host's devices, which the runs need.
RANK_VARIABLES = ("JAX_PROCESS_ID", "TPU_WORKER_ID", "CLOUD_TPU_TASK_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


class PreemptedError(Exception):
    """A run was stopped, though the sweep was not: it is unfinished, and can go on."""


class Sweeper:
    """Executes `sweep` in `workdir`.

    Args:
      flags: given to every process (those of several hosts).
      primary: whether this process writes the reports.
      jobs: runs that go at the same time, each on its share of the machine's cores; 0: as
        many as suit the machine.
      report: writes what the results are wanted for and returns it as text, given the
        reasons of failed runs; by default `write_report`.
      launcher: where runs go; by default this machine's processes.

    Attributes:
      unfinished: names of runs that were stopped, or lost another process, while the others went on.
    """

    def __init__(
        self,
        sweep: Sweep,
        workdir: pathlib.Path,
        *,
        flags: Sequence[str] = (),
        primary: bool = True,
        jobs: int = 1,
        report: Callable[[dict[str, str]], str] | None = None,
        launcher: Launcher | None = None,
    ):
        self.sweep, self.workdir = sweep, workdir.absolute()
        if "," in str(self.workdir):
            raise ValueError(
                f"--workdir {self.workdir} holds a comma, which separates work directories; use a path without one"
            )
        if jobs > 1 and flags:
            raise ValueError(f"jobs={jobs} with several hosts: the runs would meet at one address; use jobs=1")
        self.flags, self.primary = flags, primary
        self.jobs = min(jobs or (1 if flags else suitable_jobs()), len(sweep.runs))
        self._places = places(self.jobs)[::-1]  # those that are free; the first one is taken first
        self._reporting = threading.Lock()
        self._shown = ""  # the latest report
        self._trained: set[str] = set()  # names of the runs that this start brought so far
        self._evaluated: set[str] = set()
        self.unfinished: list[str] = []
        self.report = report or functools.partial(write_report, self.workdir, sweep.title)
        self.launcher = launcher or LocalProcesses()

    def execute(self) -> dict[str, str]:
        """Does all that is left to do.

        Returns:
          Why each failed run failed, by its name.

        Raises:
          ValueError: a work directory that can't be written.
          Interrupted: a signal asked the sweep to stop, or of several hosts its run on any of them.
        """
        failures: dict[str, str] = {}
        started = time.monotonic()
        with self._lock(), self.launcher, concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            for done in [pool.submit(self._execute_run, number, failures) for number in range(len(self.sweep.runs))]:
                done.result()
        hours, minutes = divmod(int(time.monotonic() - started) // 60, 60)
        ended = f"runs trained: {len(self._trained)}, evaluated: {len(self._evaluated)}"
        print(f"\n{self._shown}\ntook {hours} h {minutes} min; {ended}", flush=True)
        return failures

    def _execute_run(self, number: int, failures: dict[str, str]) -> None:
        if self.launcher.stopped:
            raise Interrupted
        run, place = self.sweep.runs[number], self._places.pop()  # a list's own operations need no lock
        try:
            reason = self._bring_to_end(run, f"[{number + 1}/{len(self.sweep.runs)}] {run.name}", place)
        except (ValueError, OSError) as error:  # such as a damaged file of this run: the others go on
            reason = str(error)
        except PreemptedError as stop:
            self.unfinished.append(run.name)
            return say(f"{run.name} is unfinished: {stop}")
        finally:
            self._places.append(place)
        with self._reporting:
            if reason:
                failures[run.name] = reason
                say(f"{run.name} failed: {reason}")
            if self.primary:
                try:
                    self._record(run, reason)
                except UserError as error:  # no space left; when the command is repeated there may be
                    failures.setdefault(run.name, str(error))
                    say(str(error))

    def _record(self, run: Run, reason: str) -> None:
        """Writes the report, after each run, so that there is something to look at from the first one on."""
        with disk_errors_named(self.workdir):
            write_failure(self.workdir, run.name, reason)
            # Those of an earlier start that were not tried again yet included, those of another sweep not.
            names = {run.name for run in self.sweep.runs}
            self._shown = self.report({name: why for name, why in read_failures(self.workdir).items() if name in names})

    def _bring_to_end(self, run: Run, heading: str, place: Place) -> str:
        """Trains and evaluates one run, as far as that is not done; returns why it failed, or ""."""
        state = self._state(run)
        if state.state == "conflict":
            return f"{state.reason}; use another --workdir, or remove that directory"
        if state.is_trained and not state.missing:
            say(f"{heading}: done")
            return ""
        if not state.is_trained:
            at = f" from update {state.step:,}" if state.step else ""
            say(f"{heading}: training{at}; {self._time_left()}")
            if reason := self._train(run, place):
                return reason
            self._trained.add(run.name)
        for evaluation in self._state(run).missing:
            say(f"{heading}: evaluating at {_listed(evaluation)}; {self._time_left()}")
            reason = self._evaluate(run, evaluation, place)
            if reason and self._state(run).missing:  # of a limit, such as that of a short text, there is a row
                return reason
            self._evaluated.add(run.name)
        left = self._state(run).missing if self.primary else ()
        return f"no result at {'; '.join(map(_listed, left))}; results.jsonl says why" if left else ""

    def _state(self, run: Run) -> RunState:
        (state,) = survey(dataclasses.replace(self.sweep, runs=(run,)), self.workdir)
        return state

    def _time_left(self) -> str:
        states = survey(self.sweep, self.workdir)
        left = Speed.of(states).seconds_left(states, self.jobs)
        if left is None:
            return "the time left in all shows when one run is trained"
        return f"about {format_duration(left)} left in all"

    def _train(self, run: Run, place: Place) -> str:
        directory = run_directory(self.workdir, run)
        before = directory.status().get("updated")
        ended = self._run(train_command(run, self.workdir), place)
        if ended.code == 0:
            return ""
        status = directory.status()
        recorded = status["state"] == "failed" and status.get("updated") != before
        return status["reason"] if recorded else ended.reason("training")

    def _evaluate(self, run: Run, evaluation: Evaluation, place: Place) -> str:
        return self._run(evaluation_command(run, evaluation, self.workdir), place).reason("evaluation")

    def _run(self, command: Command, place: Place) -> Ended:
        ended = self.launcher.run(dataclasses.replace(command, flags=(*command.flags, *self.flags)), place)
        if ended.code == REQUEUE and self.flags:
            self.launcher.stopped = True  # the other hosts' sweeps see the same
            raise Interrupted
        if ended.code == REQUEUE:
            raise PreemptedError(ended.message or "it was stopped by a signal")
        return ended

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Holds the work directory; waits while another sweep, or a run that a killed one left, is at work in it."""
        try:
            self.workdir.mkdir(parents=True, exist_ok=True)
            file = (self.workdir / ".lock").open("a")
        except OSError as error:
            raise ValueError(f"work directory {self.workdir} can't be written ({error}); choose another") from None
        with file:
            if self.primary:
                if not try_lock(file.fileno()):
                    say(f"another process is at work in {self.workdir}; waiting until it ends (Ctrl-C to leave)")
                    fcntl.flock(file, fcntl.LOCK_EX)
                # Children inherit it: it lasts until the last of them has ended, whatever becomes of this process.
                self.launcher.lock = file.fileno()
            yield


def run_sweeper(sweeper: Sweeper) -> int:
    """Executes it and says on stderr how it ended; returns the exit code: 75 where runs can go on, 1 after failures."""
    failures = sweeper.execute()
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if failures:
        print("the same command tries the failed runs again", file=sys.stderr)
    if sweeper.unfinished:
        print(f"unfinished: {', '.join(sweeper.unfinished)}; the same command goes on there", file=sys.stderr)
        return REQUEUE
    return FAILED if failures else 0


def is_primary(process_id: int | None, multihost: bool, environment: dict[str, str] | os._Environ) -> bool:
    """Whether this is the process that writes reports: the first one, or the only one.

    A launcher's variables count only where the user says that there are several
    processes: a job of a single one may lie anywhere in its cluster.
    """
    if process_id is not None:
        return process_id == 0
    if not multihost:
        return True
    ranks = (environment.get(name, "") for name in RANK_VARIABLES)
    return int(next(filter(str.isdigit, ranks), "0")) == 0


def _listed(evaluation: Evaluation) -> str:
    return ", ".join(f"{length:,}" for length in evaluation.lengths)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
