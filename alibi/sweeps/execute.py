"""Runs a sweep: trains, evaluates and reports unfinished runs, each step in its own process."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence

from alibi.config import flatten
from alibi.errors import (
    FAILED,
    REQUEUE,
    Interrupted,
    UserError,
    disk_errors_named,
)
from alibi.reporting.names import grouped
from alibi.reporting.report import RunSource, write_report
from alibi.reporting.writers import format_duration
from alibi.runs import usable_cores
from alibi.storage.claims import Claim, HeldError, LostError, is_held
from alibi.storage.files import resolve
from alibi.sweeps.definition import PROJECT, Run, Sweep
from alibi.sweeps.estimates import seconds_left
from alibi.sweeps.processes import LocalProcesses, Slot, is_on_cpu, make_slots, visible_gpus
from alibi.sweeps.state import (
    TASKS,
    Directory,
    evaluation_command,
    read_failures,
    record_end,
    record_sweep,
    run_directory,
    seeds_command,
    survey,
    train_command,
)

# The ranks that launchers of clusters set. Asking JAX would claim this host's devices, which the
# runs need.
RANK_VARIABLES = (
    "ALIBI_PROCESS_ID",
    "JAX_PROCESS_ID",
    "TPU_WORKER_ID",
    "CLOUD_TPU_TASK_ID",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "JOB_COMPLETION_INDEX",
)
# by default: small runs are most efficient on a core each, but unequal runs leave cores idle at the
# end
MOST_JOBS = 4


class PreemptedError(Exception):
    """A run was stopped, but the sweep was not. The run can go on."""


class Sweeper:
    """Executes `sweep` in `workdir`, a directory or gs://BUCKET/PATH.

    A run is claimed while it is trained and evaluated. With file locks, a run claimed by another
    process is left to it. At addresses, which have no locks, the process that started last goes on,
    and an earlier process leaves the run.

    Args:
      flags: flags for several hosts, for every process.
      primary: whether this process claims runs and writes records and reports.
      jobs: runs at a time, each on its share of the machine's cores, or 0 for as many as suit it.
      report: writes the report and returns it as text, given the reasons for failed runs, defaults to
        `write_report`.
      processes: runs the commands, defaults to processes on this machine.
      seeds_together: train runs that differ in their seed only in one program, on one device each.
      share: a task's runs, defaults to all. A task reports if all runs of the sweep have ended.

    Attributes:
      unfinished: under a run's name, why it was stopped while the others went on, or which process
        holds it.
      left: under a run's name, which process with a later start has taken it over.
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
        processes: LocalProcesses | None = None,
        share: Sequence[Run] | None = None,
        seeds_together: bool = False,
    ):
        # raises ValueError for an address that can't hold runs
        run_directory(workdir, sweep.runs[0])
        self.sweep, self.workdir = sweep, resolve(workdir)
        if "," in str(self.workdir):
            raise ValueError(
                f"--workdir {self.workdir} holds a comma, which separates work directories; use a path without one"
            )
        if jobs > 1 and flags:
            raise ValueError(
                f"jobs={jobs} with several hosts: the runs would meet at one address; use jobs=1"
            )
        if seeds_together and flags:
            raise ValueError(
                "--seeds_together trains on one device, and several hosts are named; leave one of them out"
            )
        if jobs > usable_cores():
            raise ValueError(
                f"--jobs={jobs} must be between 1 and {usable_cores()}, the processor cores of this machine"
            )
        self.flags, self.primary, self.is_task = flags, primary, share is not None
        self._runs = tuple(sweep.runs if share is None else share)
        alike = grouped(self._runs, lambda run: repr(dataclasses.replace(run.config, seed=0)))
        self._groups = list(alike.values()) if seeds_together else []
        suitable = min(usable_cores(), MOST_JOBS) if is_on_cpu() and not flags else 1
        self.jobs = min(jobs or suitable, len(self._runs))
        self._slots = make_slots(self.jobs)[::-1]  # the free ones; the first is taken first
        self._recording = threading.Lock()
        self._shown = ""  # the latest report
        self._is_stale = False  # whether a run has ended since
        self._report_due = 0.0  # the earliest time of the next report
        self.failures: dict[str, str] = {}
        self.unfinished: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.report = report or functools.partial(
            write_report, self.workdir, sweep.title, runs=run_sources(sweep, self.workdir)
        )
        self.processes = processes or LocalProcesses()

    def execute(self) -> dict[str, str]:
        """Trains, evaluates and reports the unfinished runs. Returns each failed run's reason.

        Raises:
          OSError: the work directory is not writable.
          ValueError: it holds another sweep, or with several hosts, another process holds a run.
          Interrupted: a signal asked the sweep to stop, or with several hosts, a run on any host.
        """
        started = time.monotonic()
        if self.primary:
            record_sweep(self.workdir, self.sweep, replace=not self.is_task)
        with self.processes, concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(self._train_seeds, self._groups))
            list(
                pool.map(
                    self._execute_run,
                    [run for run in self._runs if run.name not in self.unfinished | self.left],
                )
            )
        if self.primary:
            self._report_at_end()
        print(f"\n{self._shown}\ntook {format_duration(time.monotonic() - started)}", flush=True)
        return self.failures

    def _train_seeds(self, runs: Sequence[Run]) -> None:
        """Trains the runs in one program if several are not trained. If it fails, each is trained alone
        afterwards.
        """
        slot, claims = self._slots.pop(), list[Claim]()
        try:
            with contextlib.ExitStack() as stack:
                for run in runs:
                    claims.append(Claim(self.workdir / TASKS / run.name, "at work"))
                    stack.callback(claims[-1].release)
                states = survey(runs, self.workdir)
                untrained = [each.run for each in states if not each.is_trained]
                if len(untrained) < 2:
                    return
                names = ", ".join(run.name for run in untrained)
                say(f"{names}: training together; {self._time_left()}")
                slot_of_all = dataclasses.replace(
                    slot,
                    gpus=slot.gpus or tuple(visible_gpus()[:1]),
                    locks=tuple(claim.file.fileno() for claim in claims if claim.file),
                    name=f"{len(untrained)} seeds",
                )
                failure = self._run(seeds_command(untrained, self.workdir), slot_of_all, "training")
                for claim in claims:
                    claim.check()
                if failure:
                    say(f"{names}: what is left is trained by itself: {failure}")
        except (LostError, PreemptedError) as error:
            left = self.left if isinstance(error, LostError) else self.unfinished
            left |= {run.name: str(error) for run in untrained}
        except (ValueError, OSError):  # which `_execute_run` names
            pass
        finally:
            self._slots.append(slot)

    def _execute_run(self, run: Run) -> None:
        """Brings a run to its end, or leaves it to another process."""
        if self.processes.stopped:
            raise Interrupted
        slot, claim = self._slots.pop(), None  # a list's own operations need no lock
        try:
            if self.primary:
                claim = Claim(self.workdir / TASKS / run.name, "at work")
                directory = run_directory(self.workdir, run).path
                if is_held(directory):  # by a train.py that no sweep started
                    raise HeldError("training", directory)
            # Its processes inherit the lock, which lasts until they have ended, even if this
            # process is killed.
            locks = (claim.file.fileno(),) if claim and claim.file else ()
            failure = self._bring_to_end(run, dataclasses.replace(slot, locks=locks, name=run.name))
            if claim:
                claim.check()
        except (HeldError, LostError, PreemptedError) as error:
            if self.flags:  # the other hosts wait for this run
                raise
            # After a lost run the same command would take the run back; after any other it goes on.
            left = self.left if isinstance(error, LostError) else self.unfinished
            left[run.name] = str(error)
            say(f"{run.name} is unfinished: {error}")
            return
        # such as a damaged file of this run; the others go on
        except (ValueError, OSError) as error:
            failure = str(error)
        finally:
            if claim:
                claim.release()
            self._slots.append(slot)
        if failure:
            self.failures[run.name] = failure
            say(f"{run.name} failed: {failure}")
        if self.primary:
            with self._recording:
                self._record(run, failure)

    def _record(self, run: Run, failure: str) -> None:
        """Records how a run ended, and writes the report, in at most a tenth of the time."""
        try:
            with disk_errors_named(self.workdir):
                record_end(self.workdir, run, failure)
                self._is_stale = True
                # A task reports only at its end: another task may have ended since this task has
                # read the rows.
                if not self.is_task and time.monotonic() >= self._report_due:
                    self._report()
        except UserError as error:  # a full disk
            self.failures.setdefault(run.name, str(error))
            say(str(error))

    def _report(self) -> None:
        # Includes failures of an earlier start, but no failures of another sweep.
        names, begun = {run.name for run in self.sweep.runs}, time.monotonic()
        self._shown = self.report(
            {name: why for name, why in read_failures(self.workdir).items() if name in names}
        )
        self._is_stale, self._report_due = False, time.monotonic() + 10 * (time.monotonic() - begun)

    def _report_at_end(self) -> None:
        """Writes the report. A task does so only if all runs of the sweep have ended."""
        states = survey(self.sweep.runs, self.workdir) if self.is_task else []
        ended = [bool(state.failure) or state.is_done for state in states]
        if not all(ended):
            self._shown = (
                f"{sum(ended)} of {len(ended)} runs of the sweep have ended; the last task reports"
            )
        elif self.is_task or self._is_stale:
            with disk_errors_named(self.workdir):
                self._report()

    def _bring_to_end(self, run: Run, slot: Slot) -> str:
        """Trains and evaluates a run if needed. Returns why it failed, or ""."""
        heading = f"[{self.sweep.runs.index(run) + 1}/{len(self.sweep.runs)}] {run.name}"
        (state,) = survey([run], self.workdir)
        if state.state == "conflict":
            return f"{state.reason}; use another --workdir, or remove that directory"
        if state.is_done:
            say(f"{heading}: done")
            return ""
        if not state.is_trained:
            start = f" from update {state.step:,}" if state.step else ""
            say(f"{heading}: training{start}; {self._time_left()}")
            if failure := self._run(train_command(run, self.workdir), slot, "training"):
                return failure
            (state,) = survey([run], self.workdir)
        for evaluation in state.missing:
            say(f"{heading}: evaluating {evaluation}; {self._time_left()}")
            command = evaluation_command(run, evaluation, self.workdir)
            failure = self._run(command, slot, "evaluation")
            (state,) = survey([run], self.workdir)
            if failure and state.missing:  # a limit, such as a short text, has a row
                return failure
        if not (state.missing and self.primary):
            return ""
        return f"no result: {'; '.join(map(str, state.missing))}; results.jsonl says why"

    def _time_left(self) -> str:
        states = survey(self._runs, self.workdir)
        left = seconds_left(states, states, self.jobs)
        return (
            "time left: unknown" if left is None else f"about {format_duration(left)} left in all"
        )

    def _run(self, command: Sequence[str], slot: Slot, step: str) -> str:
        """Runs `command` and returns why `step`, such as "training", failed, or "".

        Raises:
          PreemptedError: it was stopped.
          Interrupted: it was stopped, with several hosts.
        """
        ended = self.processes.run([*command, *self.flags], slot)
        if self.flags and (ended.code == REQUEUE or ended.code < 0):
            # A process of another host is lost, and the next run would wait for it in vain.
            self.processes.stopped = True
            raise Interrupted
        if ended.code == REQUEUE:
            raise PreemptedError(ended.message or "it was stopped by a signal")
        return ended.reason(step)


def run_sources(sweep: Sweep, workdir: Directory) -> list[RunSource]:
    """Returns the configs, commands and work directories of the sweep's runs, for the report's
    page.
    """
    return [
        RunSource(
            run.name,
            flatten(run.config),
            f"python {shlex.join(train_command(run, workdir))}".replace(f"{PROJECT}/", ""),
            run_directory(workdir, run).path,
        )
        for run in sweep.runs
    ]


def run_sweeper(sweeper: Sweeper) -> int:
    """Executes a sweep and prints to stderr how it ended. Returns the exit code: 75 if runs can go on, 1
    after failures.
    """
    failures = sweeper.execute()
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if failures:
        print("the same command tries the failed runs again", file=sys.stderr)
    if sweeper.left:
        print(f"left to processes that started later: {', '.join(sweeper.left)}", file=sys.stderr)
    for name, reason in sweeper.unfinished.items():
        print(f"unfinished: {name}: {reason}; the same command goes on there", file=sys.stderr)
    if sweeper.unfinished:
        return REQUEUE
    texts = [  # ALiBi has no longest length
        run
        for run in sweeper.sweep.runs
        if run.config.position == "alibi" and run.config.objective.name == "next_token"
    ]
    if texts and sweeper.primary and not (failures or sweeper.left or sweeper.is_task):
        workdir = shlex.quote(str(run_directory(sweeper.workdir, texts[0])))
        print(f"write text with {texts[0].name} by")
        print(f"  python scripts/generate.py --workdir={workdir} --prompt='It was '")
    return FAILED if failures else 0


def is_primary(process_id: int | None, multihost: bool) -> bool:
    """Returns whether this process is the first, or alone.

    The launchers' variables count only with --multihost: a job with a single process may have any rank
    in its cluster.

    Raises:
      ValueError: no variable tells the rank, as on TPU VMs without Kubernetes.
    """
    if process_id is not None:
        return process_id == 0
    if not multihost:
        return True
    ranks = filter(str.isdigit, (os.environ.get(name, "") for name in RANK_VARIABLES))
    if (rank := next(ranks, None)) is None:
        raise ValueError(
            "--multihost: no variable of a launcher tells the rank of this process; set ALIBI_PROCESS_ID on each "
            "host, to 0 on one of them"
        )
    return int(rank) == 0


def say(text: str) -> None:
    # In one piece: print writes a line and its end separately, and other threads print here too.
    print(f"{time.strftime('%H:%M:%S')} {text}\n", end="", flush=True)
