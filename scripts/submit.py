"""Gives a sweep, or one long training, to the engine that a cluster has; without --go it prints what would be given.

    python scripts/submit.py --engine=slurm --sweep=configs/sweeps/quickstart.py --workdir=DIR --time=4:00:00 [--go]
    python scripts/submit.py --engine=slurm --nodes=4 --config=configs/cc100_1b3.py --workdir=DIR
    python scripts/submit.py --engine=jobset --queue=QUEUE --image=IMAGE --topology=4x4 --config=... --workdir=gs://B/DIR
    python scripts/submit.py --engine=local --at_once=2 --sweep=... --workdir=DIR --go

A sweep goes in --tasks, by default one for each run, each `sweep.py --task=I/N`: the last one to end
reports, and `sweep.py` without --task does so at any time. The engine queues, starts and restarts: what was
stopped by a signal (exit code 75) or killed goes on, what failed is not started again. docs/scaling.md tells
of each engine. Look at the runs by `python scripts/status.py DIR`.
"""

import json
import os
import pathlib
import sys

from absl import flags

# A clone works without being installed: python scripts/submit.py has only scripts/ on its path.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from alibi.cli import command_line


def _local():
    from alibi.sweeps.engines import Local

    return Local(_AT_ONCE.value or 1)


def _slurm():
    from alibi.sweeps.engines import Slurm

    return Slurm(_NODES.value, _TIME.value, _SBATCH.value, _AT_ONCE.value or 0)


def _jobset():
    from alibi.sweeps.jobset import JobSet

    needed = (_IMAGE, _QUEUE, _ACCELERATOR, _TOPOLOGY)
    if missing := [flag.name for flag in needed if not flag.value]:
        raise ValueError(f"--engine=jobset needs --{missing[0]} ({flags.FLAGS[missing[0]].help})")
    return JobSet(*(flag.value for flag in (*needed, _CHIPS, _NAMESPACE, _ACCOUNT)))


ENGINES = {  # what makes each, and the flags that not all have
    "local": (_local, ("at_once",)),
    "slurm": (_slurm, ("at_once", "nodes", "time", "sbatch")),
    "jobset": (
        _jobset,
        ("image", "queue", "accelerator", "topology", "chips_per_host", "namespace", "service_account"),
    ),
}

_ENGINE = flags.DEFINE_enum("engine", None, list(ENGINES), "what runs it")
_SWEEP = flags.DEFINE_string("sweep", None, "FILE.py with get_sweep(); give this or --config")
command_line.define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "place of the run or the sweep; may be gs://BUCKET/PATH")
_GO = flags.DEFINE_bool("go", False, "submit it; local: run it")
_SHARED = flags.DEFINE_bool("shared", False, "other machines see what the job needs, though it doesn't look so")
_NAME = flags.DEFINE_string("name", None, "of the job; by default the last part of --workdir")
_TASKS = flags.DEFINE_integer("tasks", None, "parts of the sweep; by default one for each run", lower_bound=1)
_RESTARTS = flags.DEFINE_integer("restarts", 100, "of each task, after it was stopped or killed", lower_bound=0)
_GRACE = flags.DEFINE_integer("grace", 120, "seconds between the signal to stop and the end", lower_bound=1)
_AT_ONCE = flags.DEFINE_integer(
    "at_once", None, "tasks at a time; local: by default 1, each on its share of the cores and GPUs", lower_bound=1
)
_NODES = flags.DEFINE_integer("nodes", 1, "slurm: machines of each task", lower_bound=1)
_TIME = flags.DEFINE_string("time", "", "slurm: limit of each start, as D-HH:MM:SS")
_SBATCH = flags.DEFINE_multi_string(
    "sbatch", [], "slurm: an option of sbatch, such as --sbatch=--partition=gpu; several"
)
_IMAGE = flags.DEFINE_string("image", None, "jobset: container image whose working directory is this repository")
_QUEUE = flags.DEFINE_string("queue", None, "jobset: LocalQueue of Kueue")
_ACCELERATOR = flags.DEFINE_string("accelerator", "tpu-v5-lite-podslice", "jobset: kind of TPU, as nodes are labelled")
_TOPOLOGY = flags.DEFINE_string("topology", None, "jobset: chips of the slice, such as 4x4")
_CHIPS = flags.DEFINE_integer("chips_per_host", 4, "jobset: of the slice's machines", lower_bound=1)
_NAMESPACE = flags.DEFINE_string("namespace", "", "jobset: of Kubernetes")
_ACCOUNT = flags.DEFINE_string("service_account", "", "jobset: by which pods reach the bucket")


def main() -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")  # this process computes nothing
    from alibi.storage.store import open_store
    from alibi.sweeps.definition import load_sweep
    from alibi.sweeps.tasks import pin_anew
    from alibi.sweeps.watch import SUBMITTED_FILE

    if (_SWEEP.value is None) == (flags.FLAGS.config is None):
        raise ValueError("give --sweep=FILE.py, or --config=FILE.py of one run; --help shows how the command is used")
    engine = _engine()
    sweep, store = load_sweep(_SWEEP.value) if _SWEEP.value is not None else None, open_store(_WORKDIR.value)
    _check_configs(sweep, engine.devices)
    job = _job(engine, store, len(sweep.runs) if sweep else 0)
    text = engine.render(job)
    if not _GO.value:
        print(text, end="")
        print("nothing was submitted; --go does", file=sys.stderr)
        return 0
    engine.check_installed()
    if sweep:
        pin_anew(store, sweep)
    else:  # so that there is something to look at before it starts
        store.write(SUBMITTED_FILE, json.dumps({"engine": _ENGINE.value, "name": job.name}) + "\n")
    print(text, end="", flush=True)
    code = engine.submit(job)
    print(f"look at it by: python scripts/status.py {store}", file=sys.stderr)
    return code


def _engine():
    make, known = ENGINES[_ENGINE.value]
    for engine, (_, names) in ENGINES.items():
        if given := [name for name in names if flags.FLAGS[name].present and name not in known]:
            raise ValueError(f"--{given[0]} is of --engine={engine}; leave it out of --engine={_ENGINE.value}")
    return make()


def _check_configs(sweep, devices: int | None) -> None:
    """Raises ValueError for a config that can't be trained, where it is known on the devices that it will have."""
    from alibi.runs import completed
    from alibi.training.setup import check_trainable

    if sweep is None:
        check_trainable(completed(flags.FLAGS.config), devices)
        return
    for run in sweep.runs if devices else ():  # as it was loaded they were checked for devices of any number
        try:
            check_trainable(run.config, devices)
        except ValueError as error:
            raise ValueError(f"run {run.name}: {error}") from None


def _job(engine, store, runs: int):
    """What is to be run; raises ValueError where other machines would not see what it needs."""
    from alibi.runs.directory import check_address
    from alibi.storage.atomic import is_address
    from alibi.sweeps.definition import resolve
    from alibi.sweeps.engines import Job
    from alibi.sweeps.launchers import Command

    if not runs and (given := [flag.name for flag in (_TASKS, _AT_ONCE) if flag.value is not None]):
        raise ValueError(f"--{given[0]} is of a sweep's tasks; leave it out with --config")
    if _TASKS.value is not None and _TASKS.value > runs:
        raise ValueError(f"--tasks={_TASKS.value}: the sweep has {runs} runs; give at most as many tasks")
    if is_address(str(store)):
        check_address(str(store))
    if runs:
        file, words = resolve(os.path.expanduser(_SWEEP.value)).absolute(), []
        script, given = "scripts/sweep.py", f"--sweep={engine.path_of(file)}"
    else:
        config, *words = command_line.config_words()
        name, colon, argument = config.removeprefix("--config=").partition(":")
        file = resolve(os.path.expanduser(name)).absolute()
        script, given = "train.py", f"--config={engine.path_of(file)}{colon}{argument}"
    if not _SHARED.value:
        engine.check_seen(str(store), file)
    command = Command(script, (given, *words, f"--workdir={store}"))
    tasks = (_TASKS.value or runs) if runs else 0
    return Job(_NAME.value or store.name, command, str(store), tasks, _RESTARTS.value, _GRACE.value)


if __name__ == "__main__":
    command_line.run(main, required=("engine", "workdir"), addresses=("workdir",), resumes=command_line.RESUMES)
