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

import os
import pathlib
import sys

from absl import flags

# A clone works without being installed: python scripts/submit.py has only scripts/ on its path.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from alibi import command_line

ENGINES = {  # with the flags that not all have
    "local": ("at_once",),
    "slurm": ("at_once", "nodes", "time", "sbatch"),
    "jobset": ("image", "queue", "accelerator", "topology", "chips_per_host", "namespace", "service_account"),
}

_ENGINE = flags.DEFINE_enum("engine", None, list(ENGINES), "what runs it")
_SWEEP = flags.DEFINE_string("sweep", None, "FILE.py with get_sweep(), or")
command_line.define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "place of the run or the sweep; may be gs://BUCKET/PATH")
_GO = flags.DEFINE_bool("go", False, "submit it; local: run it")
_SHARED = flags.DEFINE_bool("shared", False, "other machines see --workdir and this clone, though it doesn't look so")
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
    from alibi.runs.store import open_store
    from alibi.sweeps.definition import load_sweep
    from alibi.sweeps.tasks import pin_anew

    if (_SWEEP.value is None) == (flags.FLAGS.config is None):
        raise ValueError("give --sweep=FILE.py, or --config=FILE.py of one run; --help shows how the command is used")
    engine = _engine()
    sweep, store = _SWEEP.value and load_sweep(_SWEEP.value), open_store(_WORKDIR.value)
    job = _job(store, len(sweep.runs) if sweep else 0)
    text = engine.render(job)
    if not _GO.value:
        print(text, end="")
        print("nothing was submitted; --go does", file=sys.stderr)
        return 0
    engine.check_installed()
    if sweep:
        pin_anew(store, sweep)
    print(text, end="", flush=True)
    code = engine.submit(job)
    print(f"look at it by: python scripts/status.py {store}", file=sys.stderr)
    return code


def _engine():
    from alibi.sweeps.engines import Local, Slurm
    from alibi.sweeps.jobset import JobSet

    for engine, names in ENGINES.items():
        if given := [name for name in names if flags.FLAGS[name].present and name not in ENGINES[_ENGINE.value]]:
            raise ValueError(f"--{given[0]} is of --engine={engine}; leave it out of --engine={_ENGINE.value}")
    if _ENGINE.value == "local":
        return Local(_AT_ONCE.value or 1)
    if _ENGINE.value == "slurm":
        return Slurm(_NODES.value, _TIME.value, _SBATCH.value, _AT_ONCE.value or 0)
    if missing := [flag.name for flag in (_IMAGE, _QUEUE, _TOPOLOGY) if flag.value is None]:
        raise ValueError(f"--engine=jobset needs --{missing[0]} ({flags.FLAGS[missing[0]].help})")
    return JobSet(
        _IMAGE.value, _QUEUE.value, _ACCELERATOR.value, _TOPOLOGY.value, _CHIPS.value, _NAMESPACE.value, _ACCOUNT.value
    )


def _job(store, runs: int):
    """What is to be run; raises ValueError where other machines would not see what it needs."""
    from alibi.atomic import is_address
    from alibi.runs.directory import check_address
    from alibi.sweeps.definition import PROJECT
    from alibi.sweeps.engines import Job, check_shared
    from alibi.sweeps.launchers import Command

    if _TASKS.value is not None and _TASKS.value > runs:
        raise ValueError(
            f"--tasks={_TASKS.value}: the sweep has {runs} runs; give at most as many tasks"
            if runs
            else "--tasks parts a sweep; leave it out with --config"
        )
    if is_address(str(store)):
        check_address(str(store))
    elif _ENGINE.value == "jobset" and not _SHARED.value:
        raise ValueError(
            f"--workdir {store} is a path, which pods don't see; give gs://BUCKET/PATH, or --shared if they do"
        )
    elif _ENGINE.value == "slurm" and not _SHARED.value:
        check_shared(store.path, "--workdir")
    if _ENGINE.value == "slurm" and not _SHARED.value:
        check_shared(PROJECT, "this clone")
    workdir = f"--workdir={store}"
    if runs:
        command = Command("scripts/sweep.py", (f"--sweep={_file(_SWEEP.value)}", workdir))
    else:
        config, *overrides = command_line.config_words()
        file, colon, argument = config.removeprefix("--config=").partition(":")
        command = Command("train.py", (f"--config={_file(file)}{colon}{argument}", *overrides, workdir))
    tasks = (_TASKS.value or runs) if runs else 0
    return Job(_NAME.value or store.name, command, str(store), tasks, _RESTARTS.value, _GRACE.value)


def _file(name: str) -> str:
    """The path of a file where the command runs: on machines that see this one's files, or in an image."""
    from alibi.sweeps.definition import PROJECT

    path = pathlib.Path(name).expanduser()
    path = (path if path.exists() else PROJECT / path).absolute()
    if _ENGINE.value != "jobset":
        return str(path)
    if not path.is_relative_to(PROJECT):
        raise ValueError(f"{path} lies outside this repository, which is what --image holds; move it to configs/")
    return os.fspath(path.relative_to(PROJECT))


if __name__ == "__main__":
    command_line.run(main, required=("engine", "workdir"), addresses=("workdir",), resumes=command_line.RESUMES)
