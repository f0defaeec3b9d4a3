"""Engines take commands to machines: each gets a text of what to run, in its own language, and queues and restarts it.

What is run goes on where it stopped and says by its exit code whether to start it again, so an engine needs to know
nothing of runs: REQUEUE and death by a signal mean again, any other code but 0 that a person must mend something.
"""

import abc
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from alibi.errors import FAILED, REQUEUE, UserError
from alibi.storage.atomic import is_address
from alibi.sweeps.definition import PROJECT
from alibi.sweeps.launchers import Command, LocalProcesses, check_jobs, places

# Of a disk of one machine, or of its memory.
LOCAL_TYPES = {
    "apfs",
    "btrfs",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "hfs",
    "overlay",
    "ramfs",
    "tmpfs",
    "vfat",
    "xfs",
    "zfs",
}
LOCAL_PREFIXES = ("/tmp", "/var/tmp", "/dev/shm", "/run")
# Minutes, MM:SS, HH:MM:SS, or days with hours, minutes and seconds as far as wanted.
SLURM_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
# An option of sbatch that asks for GPUs, of the job or of each node, whose one task has them; a kind may precede them.
SLURM_GPUS = re.compile(r"(?:(-G|--gpus=)|--gpus-per-(?:node|task)=|--gres=gpu:)(?:[\w.-]+:)?(\d+)")


@dataclasses.dataclass(frozen=True)
class Job:
    """What an engine is to run: one command, or a sweep in tasks.

    Attributes:
      name: for people; engines that restrict names change it.
      command: with paths that hold wherever it runs.
      workdir: where it writes.
      tasks: parts of a sweep, each a command with a --task of its own; 0: the command as it is.
      restarts: how often each is started again at most.
      grace: seconds between the signal that asks it to stop and its end.
    """

    name: str
    command: Command
    workdir: str
    tasks: int = 0
    restarts: int = 100
    grace: int = 120

    def commands(self) -> list[Command]:
        """The command of each task."""
        if not self.tasks:
            return [self.command]
        return [self.with_task(f"{number}/{self.tasks}") for number in range(self.tasks)]

    def with_task(self, task: str) -> Command:
        return dataclasses.replace(self.command, flags=(*self.command.flags, f"--task={task}"))


class Engine(abc.ABC):
    """Something that runs jobs on machines."""

    program = ""  # by which it is given work
    devices: int | None = None  # of each task, where that is known before it begins

    def path_of(self, file: pathlib.Path) -> str:
        """The path of this machine's `file` where the commands run; raises ValueError where it is not there."""
        return str(file)

    def check_seen(self, workdir: str, file: pathlib.Path) -> None:
        """Raises ValueError where the commands seem not to see what they need: `workdir`, `file`, this clone."""
        return None  # on this machine they do

    @abc.abstractmethod
    def render(self, job: Job) -> str:
        """What the engine takes; the same for the same job. Raises ValueError for a job that it can't run."""

    @abc.abstractmethod
    def submit(self, job: Job) -> int:
        """Hands `job` over; returns an exit code. Raises UserError where the engine refuses it."""

    def check_installed(self) -> None:
        """Raises ValueError where this machine can't give work to the engine."""
        if self.program and shutil.which(self.program) is None:
            raise ValueError(
                f"there is no {self.program} on this machine, by which --engine={type(self).__name__.lower()} is given "
                "work; submit from one that has it, or use --engine=local"
            )


class Local(Engine):
    """Processes of this machine, `at_once` at a time, each on its share of the cores and GPUs."""

    def __init__(self, at_once: int = 1):
        check_jobs(at_once, "--at_once")
        self._places = places(at_once)[::-1]
        self._at_once = at_once

    def render(self, job: Job) -> str:
        return "".join(f"{shlex.join(_words(command))}\n" for command in job.commands())

    def submit(self, job: Job) -> int:
        with LocalProcesses() as launcher, concurrent.futures.ThreadPoolExecutor(self._at_once) as pool:
            codes = list(pool.map(lambda command: self._run(launcher, command, job.restarts), job.commands()))
        return REQUEUE if REQUEUE in codes else FAILED if any(codes) else 0

    def _run(self, launcher: LocalProcesses, command: Command, restarts: int) -> int:
        place = self._places.pop()
        try:
            for restart in range(restarts + 1):
                code = launcher.run(command, place).code
                if code != REQUEUE and code >= 0:
                    return code
                if restart < restarts:
                    print(f"ended with {code}, starts again: {shlex.join(command.flags)}", file=sys.stderr, flush=True)
            return REQUEUE
        finally:
            self._places.append(place)


class Slurm(Engine):
    """Slurm: a job of `nodes` machines, and a sweep as an array of such.

    Args:
      time: limit of one start, as sbatch takes it; "": that of the partition.
      at_once: tasks of a sweep that run at a time; 0: as many as there is room for.
      options: further options of sbatch, such as --partition=gpu, each a word; of these also the GPUs are counted.
    """

    program = "sbatch"

    def __init__(self, nodes: int = 1, time: str = "", options: Sequence[str] = (), at_once: int = 0):
        if time and not SLURM_TIME.fullmatch(time):
            raise ValueError(f"--time={time} is no time of Slurm; give minutes, HH:MM:SS or D-HH:MM:SS")
        if wrong := [option for option in options if not re.match(r"-\w|--\w", option) or "\n" in option]:
            raise ValueError(f"--sbatch={wrong[0]} is no option of sbatch; give for example --sbatch=--partition=gpu")
        self._nodes, self._time, self._options = nodes, time, options
        self._most = f"%{at_once}" if at_once else ""
        for asked in filter(None, map(SLURM_GPUS.fullmatch, options)):
            self.devices = int(asked[2]) * (1 if asked[1] else nodes)

    def check_seen(self, workdir: str, file: pathlib.Path) -> None:
        if not is_address(workdir):
            check_shared(workdir, "--workdir", "give one on a shared file system, or gs://BUCKET/PATH")
        check_shared(PROJECT, "this clone", "clone it to a shared file system")
        check_shared(file, "the file", "move it to a shared file system")
        # Not resolved: in a virtual environment it is a link to a Python that each machine may have.
        python = pathlib.Path(sys.executable).parent
        check_shared(python, "this Python of", "use a virtual environment on a shared file system, such as the clone's")

    def render(self, job: Job) -> str:
        log = "%x-%A_%a.log" if job.tasks else "%x-%j.log"
        if not is_address(job.workdir):
            log = f"{_log_folder(job)}/{log}".replace("%", "%%", job.workdir.count("%"))
        options = [
            f"--job-name={job.name}",
            *([f"--array=0-{job.tasks - 1}{self._most}"] if job.tasks else []),
            f"--nodes={self._nodes}",
            "--ntasks-per-node=1",
            *([f"--time={self._time}"] if self._time else []),
            f"--signal=TERM@{job.grace}",
            "--requeue",
            "--open-mode=append",
            f"--output={log}",
            *self._options,
        ]
        command = job.with_task(f"$SLURM_ARRAY_TASK_ID/{job.tasks}") if job.tasks else job.command
        if self._nodes > 1:
            command = dataclasses.replace(command, flags=(*command.flags, "--multihost"))
        return SBATCH.format(
            options="".join(f"#SBATCH {shlex.quote(option)}\n" for option in options),
            command=" ".join(map(_quoted, _words(command))),
            requeue=REQUEUE,
            restarts=job.restarts,
        )

    def submit(self, job: Job) -> int:
        if not is_address(job.workdir):
            pathlib.Path(_log_folder(job)).mkdir(parents=True, exist_ok=True)
        number = handed_over(["sbatch", "--parsable"], self.render(job)).split(";")[0]
        print(f"submitted as job {number}: squeue --job={number}; scancel {number}", file=sys.stderr)
        return 0


SBATCH = """\
#!/bin/bash
{options}
trap : TERM  # of this shell; the command answers it
srun --kill-on-bad-exit=0 {command}
code=$?
echo "ended with exit code $code" >&2
# The last task of an array has the number of the array itself.
job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
# {requeue}: stopped with what was done saved. From 129 on: killed, but by 130 a person's Ctrl-C.
again() {{ [ $code -eq {requeue} ] || [ $code -eq 129 ] || [ $code -gt 130 ]; }}
if again && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
  # Not where Slurm ends the job itself: it requeues what it preempts, and what was cancelled is to stay so.
  [ "$(squeue --noheader --format=%t --job=$job)" != R ] || scontrol requeue $job
fi
exit $code
"""


def _log_folder(job: Job) -> str:
    return f"{job.workdir}/slurm"


def _quoted(word: str) -> str:
    return f'"{word}"' if word.startswith("--task=$") else shlex.quote(word)


def _words(command: Command) -> list[str]:
    """The words of a command on machines that see this one's files."""
    return [sys.executable, str(PROJECT / command.script), *command.flags]


def handed_over(words: Sequence[str], text: str) -> str:
    """What the program `words` prints of the `text` that it reads; raises UserError where it fails."""
    ended = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise UserError(f"{words[0]} refused the job: {' '.join(ended.stderr.split())}")
    return ended.stdout.strip()


def check_shared(path: str | os.PathLike[str], what: str, mend: str) -> None:
    """Raises ValueError where `path` lies on a file system that other machines don't see, as far as its type tells.

    The message begins with `what` the path is, and says by `mend` what to do.
    """
    place = pathlib.Path(path).expanduser().resolve()
    under = next((prefix for prefix in LOCAL_PREFIXES if place.is_relative_to(prefix)), None)
    kind = _file_system(place)
    if under is None and kind not in LOCAL_TYPES:
        return
    where = f"under {under}" if under else f"on a file system of type {kind}"
    raise ValueError(
        f"{what} {place} lies {where}, which other machines don't see; {mend}, or give --shared if they do see it"
    )


def _file_system(place: pathlib.Path) -> str:
    """The type of the file system that `place` lies on, or will; "" where the system doesn't tell (not Linux)."""
    best, kind = pathlib.Path(), ""
    try:
        lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        escaped = fields.split()[4]
        mounted = pathlib.Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), escaped))
        if place.is_relative_to(mounted) and len(mounted.parts) >= len(best.parts):
            best, kind = mounted, rest.split()[0]
    return kind
