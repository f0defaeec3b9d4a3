"""Runs a sweep: trains what is missing, evaluates, reports; each step in a process of its own."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from alibi.config import flatten
from alibi.errors import FAILED, REQUEUE, Interrupted, UserError, disk_errors_named
from alibi.reporting.report import RunSource, write_report
from alibi.reporting.writers import format_duration
from alibi.storage.claims import POLL_SECONDS, Claim, HeldError, LostError, awaited, is_held
from alibi.storage.files import resolve
from alibi.sweeps.definition import PROJECT, Evaluation, Run, Sweep
from alibi.sweeps.estimates import Speed
from alibi.sweeps.launchers import Command, Ended, Launcher, LocalProcesses, Place, check_jobs, places, suitable_jobs
from alibi.sweeps.state import (
    Directory,
    RunState,
    evaluation_command,
    read_failures,
    run_directory,
    survey,
    train_command,
    write_failure,
)
from alibi.sweeps.tasks import claim_place, pin, pin_anew

# For how long a task, when its other runs are done, waits for one that another process is at work on: what a killed
# task left of itself is gone by then, its lease included. Of several hosts the first one waits as long, and leaves
# before the others, whose run waits for the first one's for five minutes, have given up.
LEAVE_SECONDS = 120.0
# Ranks as the launchers of clusters tell them. Asking JAX would claim this host's devices, which the runs need.
RANK_VARIABLES = ("JAX_PROCESS_ID", "TPU_WORKER_ID", "CLOUD_TPU_TASK_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


class PreemptedError(Exception):
    """A run was stopped, though the sweep was not: it is unfinished, and can go on."""


class Sweeper:
    """Executes `sweep` in `workdir`, a directory or gs://BUCKET/PATH.

    Args:
      flags: given to every process (those of several hosts).
      primary: whether this process writes the reports.
      jobs: runs that go at the same time, each on its share of the machine's cores; 0: as
        many as suit the machine.
      report: writes what the results are wanted for and returns it as text, given the
        reasons of failed runs; by default `write_report`.
      launcher: where runs go; by default this machine's processes.
      share: the runs of a task, which does only these, at the same time as others do theirs; None: all. A task leaves
        a run that another process is at work on, and reports where it finds all runs of the sweep ended.

    Attributes:
      unfinished: names of runs that were stopped, or lost another process, while the others went on.
      left: names of the task's runs that were left to other processes.
    """

    def __init__(
        self,
        sweep: Sweep,
        workdir: Directory,
        *,
        flags: Sequence[str] = (),
        primary: bool = True,
        jobs: int = 1,
        report: Callable[[dict[str, str]], str] | None = None,
        launcher: Launcher | None = None,
        share: Sequence[Run] | None = None,
    ):
        run_directory(workdir, sweep.runs[0])  # raises for an address that can't hold runs
        self.sweep, self.store = sweep, resolve(workdir)
        if "," in str(self.store):
            raise ValueError(
                f"--workdir {self.store} holds a comma, which separates work directories; use a path without one"
            )
        if jobs > 1 and flags:
            raise ValueError(f"jobs={jobs} with several hosts: the runs would meet at one address; use jobs=1")
        if jobs:
            check_jobs(jobs, "--jobs")
        self.flags, self.primary = flags, primary
        self.is_task, self._runs = share is not None, tuple(sweep.runs if share is None else share)
        self.jobs = min(jobs or (1 if flags else suitable_jobs()), len(self._runs))
        self._places = places(self.jobs)[::-1]  # those that are free; the first one is taken first
        self._reporting = threading.Lock()
        self._shown = ""  # the latest report,
        self._is_stale = False  # whether a run has ended since,
        self._report_due = 0.0  # and the time of the next one, by the clock
        self._trained: set[str] = set()  # names of the runs that this start brought so far
        self._evaluated: set[str] = set()
        self.unfinished: list[str] = []
        self.left: list[str] = []
        self.report = report or functools.partial(
            write_report, self.store, sweep.title, runs=run_sources(sweep, self.store)
        )
        self.launcher = launcher or LocalProcesses(of_sweep=True)
        self._claim: Claim | None = None

    def execute(self) -> dict[str, str]:
        """Does all that is left to do.

        Returns:
          Why each failed run failed, by its name.

        Raises:
          ValueError: a work directory that can't be written, or of a task one that keeps another sweep.
          LostError: another sweep has taken the work directory over, thinking this one gone.
          Interrupted: a signal asked the sweep to stop, or of several hosts its run on any of them; or the first one
            of them met a run that another process was at work on.
        """
        failures: dict[str, str] = {}
        started = time.monotonic()
        with self._claimed(), self.launcher, concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:

            def bring(runs: Sequence[Run], until: float) -> list[Run]:
                """Those of `runs` that others still held at `until`, when the rest has come to its end."""
                results = pool.map(lambda run: self._execute_run(run, failures, until), runs)
                return [run for run, ended in zip(runs, results, strict=True) if not ended]

            held = bring(self._runs, 0.0 if self.is_task else math.inf)
            self.left = [run.name for run in bring(held, time.monotonic() + LEAVE_SECONDS)]
            if self.is_task and self.primary:
                self._report_if_last()
            elif self._is_stale:
                with disk_errors_named(self.store):
                    self._report()
        hours, minutes = divmod(int(time.monotonic() - started) // 60, 60)
        ended = f"runs trained: {len(self._trained)}, evaluated: {len(self._evaluated)}"
        print(f"\n{self._shown}\ntook {hours} h {minutes} min; {ended}", flush=True)
        return failures

    def _execute_run(self, run: Run, failures: dict[str, str], until: float) -> bool:
        """Brings one run to its end; False where another process, by the clock `until`, was still at work on it."""
        if self.launcher.stopped:
            raise Interrupted
        self._check_claim()
        heading = f"[{self.sweep.runs.index(run) + 1}/{len(self.sweep.runs)}] {run.name}"
        place = self._places.pop()  # a list's own operations need no lock
        try:
            with self._alone(run, heading, until) as lock:
                reason = self._bring_to_end(run, heading, dataclasses.replace(place, lock=lock, name=run.name))
        except HeldError as held:
            if self.flags:
                raise self._left_together(held) from None
            say(f"{heading}: {held.fact}; left to it")
            return False
        except (ValueError, OSError) as error:  # such as a damaged file of this run: the others go on
            reason = str(error)
        except (PreemptedError, LostError) as stop:
            self.unfinished.append(run.name)
            say(f"{run.name} is unfinished: {stop}")
            return True
        finally:
            self._places.append(place)
        with self._reporting:
            if reason:
                failures[run.name] = reason
                say(f"{run.name} failed: {reason}")
            if self.primary:
                self._check_claim()
                try:
                    self._record(run, reason)
                except UserError as error:  # no space left; when the command is repeated there may be
                    failures.setdefault(run.name, str(error))
                    say(str(error))
        return True

    @contextlib.contextmanager
    def _alone(self, run: Run, heading: str, until: float) -> Iterator[int | None]:
        """Holds `run`, when no other process does; gives the file descriptor of its lock, if that is one.

        Raises:
          HeldError: another process was still at work on it at `until`. With several hosts also where it has ended
            before: meanwhile the others have begun with what there was to do when they came.
          LostError: another process has taken it over meanwhile, thinking this one gone.
        """
        if not self.primary:  # the first process alone claims a run
            yield None
            return
        directory, told = run_directory(self.store, run), False
        if self.flags:
            until = time.monotonic() + LEAVE_SECONDS
        while True:
            try:
                claim = Claim(claim_place(self.store, run), "at work")
                if not is_held(directory.path):
                    break
                claim.release()  # such as a run that a killed sweep left, or a train.py by itself
                raise HeldError(f"another process is training in {directory}")
            except HeldError as held:
                if time.monotonic() >= until:
                    raise
                if not told:
                    say(f"{heading}: {held.fact}; waiting until it ends")
                told = True
            time.sleep(POLL_SECONDS)
            if self.launcher.stopped:
                raise Interrupted
        try:
            if told and self.flags:
                raise HeldError(f"another process was at work on {run.name}")
            # What it runs inherits the lock: it lasts until that has ended, whatever becomes of this process.
            yield None if claim.file is None else claim.file.fileno()
            claim.check()
        finally:
            claim.release()

    def _record(self, run: Run, reason: str) -> None:
        """Writes the report, from the first run on, so that there is something to look at.

        It is left to a later run where reports would take more than a tenth of the time: they read all metrics. A task
        writes none: what it had read might be older than what another one has written by now.
        """
        with disk_errors_named(self.store):
            write_failure(self.store, run.name, reason)
            self._is_stale = True
            if not self.is_task and time.monotonic() >= self._report_due:
                self._report()

    def _report(self) -> None:
        # Failures of an earlier start that were not tried again yet included, those of another sweep not.
        names = {run.name for run in self.sweep.runs}
        begun = time.monotonic()
        self._shown = self.report({name: why for name, why in read_failures(self.store).items() if name in names})
        self._is_stale, self._report_due = False, time.monotonic() + 10 * (time.monotonic() - begun)

    def _report_if_last(self) -> None:
        """Writes the report of a sweep all of whose runs have ended, as the last task finds it, or several at once."""
        states = survey(self.sweep, self.store)
        count = sum(bool(state.failure) or (state.is_trained and not state.missing) for state in states)
        if count == len(states):
            with disk_errors_named(self.store):
                self._report()
        else:
            self._shown = f"{count} of {len(states)} runs of the sweep have ended; whichever task ends last reports"

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
        (state,) = survey(dataclasses.replace(self.sweep, runs=(run,)), self.store)
        return state

    def _time_left(self) -> str:
        states = survey(dataclasses.replace(self.sweep, runs=self._runs), self.store)
        left = Speed.of(states).seconds_left(states, self.jobs)
        if left is None:
            return "the time left in all shows when one run is trained"
        return f"about {format_duration(left)} left in all"

    def _train(self, run: Run, place: Place) -> str:
        directory = run_directory(self.store, run)
        before = directory.status().get("updated")
        ended = self._run(train_command(run, self.store), place)
        if ended.code == 0:
            return ""
        status = directory.status()
        recorded = status["state"] == "failed" and status.get("updated") != before
        return status["reason"] if recorded else ended.reason("training")

    def _evaluate(self, run: Run, evaluation: Evaluation, place: Place) -> str:
        return self._run(evaluation_command(run, evaluation, self.store), place).reason("evaluation")

    def _run(self, command: Command, place: Place) -> Ended:
        ended = self.launcher.run(dataclasses.replace(command, flags=(*command.flags, *self.flags)), place)
        if self.flags and (ended.code == REQUEUE or ended.code < 0):
            # The other hosts' processes lost this one, or this one waited in vain for the first one's.
            self.launcher.stopped = True
            raise Interrupted
        if ended.code == REQUEUE:
            raise PreemptedError(ended.message or "it was stopped by a signal")
        return ended

    def _left_together(self, held: HeldError) -> Interrupted:
        """What ends the first of several hosts where it met another process: the others wait for a run of its."""
        self.launcher.stopped = True  # no further run is begun
        return Interrupted(f"{held.fact}; the same command, given again on all hosts, goes on when that has ended")

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        """Holds the work directory; waits while another sweep is at work in it. A task holds only its runs."""
        if not self.primary:
            yield
            return
        try:
            if self.is_task:
                pin(self.store, self.sweep)
            else:
                # The other hosts would not know that this one waits.
                self._claim = Claim(self.store, "at work") if self.flags else awaited(self.store, "at work", say)
        except HeldError as held:
            raise self._left_together(held) from None
        except OSError as error:
            raise ValueError(f"work directory {self.store} can't be written ({error}); choose another") from None
        try:
            if not self.is_task:
                pin_anew(self.store, self.sweep)
            yield
        finally:
            if self._claim is not None:
                self._claim.release()

    def _check_claim(self) -> None:
        if self._claim is not None:
            self._claim.check()


def run_sources(sweep: Sweep, workdir: Directory) -> list[RunSource]:
    """The configs, commands and work directories of the sweep's runs, for the report's page."""
    sources = []
    for run in sweep.runs:
        command = train_command(run, workdir)
        flags = shlex.join(command.flags).replace(f"{PROJECT}/", "")
        folder = run_directory(workdir, run).path
        sources.append(RunSource(run.name, flatten(run.config), f"python {command.script} {flags}", folder))
    return sources


def run_sweeper(sweeper: Sweeper) -> int:
    """Executes it and says on stderr how it ended; returns the exit code: 75 where runs can go on, 1 after failures."""
    failures = sweeper.execute()
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if failures:
        print("the same command tries the failed runs again", file=sys.stderr)
    if sweeper.left:
        print(f"left to the processes at work on them: {', '.join(sweeper.left)}", file=sys.stderr)
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
    # In one piece: print writes the line's end by itself, and other threads speak here too.
    print(f"{time.strftime('%H:%M:%S')} {text}\n", end="", flush=True)
