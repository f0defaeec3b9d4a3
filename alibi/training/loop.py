"""Training: from a config and a work directory to checkpoints and metrics."""

import contextlib
import dataclasses
import functools
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from typing import Any

import jax

from alibi.config import Config
from alibi.errors import (
    SIGNALS,
    Interrupted,
    disk_errors_named,
    is_watched,
    signals_handled,
    signals_raised,
)
from alibi.parallel import hosts
from alibi.parallel.sharding import make_mesh
from alibi.runs import RunDirectory, process_facts
from alibi.training.record import NonFiniteLossError
from alibi.training.setup import Job, make_job
from alibi.training.updates import StopRequest, Updates, check_one_update, failure_recorded

__all__ = ["Interrupted", "NonFiniteLossError", "train", "train_seeds"]


def train(config: Config, workdir: str) -> dict[str, Any]:
    """Trains a run in `workdir` from its latest checkpoint, or without one from the parameters of
    `config.init_from`, if set.

    A finished run stays as it is. If its last checkpoint was lost, it goes on from an earlier one.

    Returns:
      The run's final status (see `RunDirectory.status`).

    Raises:
      ValueError: before any work, for a refused config, corpus or work directory.
      NonFiniteLossError: the loss diverged.
      UserError: no space left.
      Interrupted: one of SIGNALS arrived. From the first update on a checkpoint was saved.
    """
    return train_seeds(config, {config.seed: workdir})[0]


def train_seeds(config: Config, workdirs: Mapping[int, str]) -> list[dict[str, Any]]:
    """Trains a run of `config` for each seed, all in one program, as `train` does each alone.

    If a run's loss diverges, the run ends, and the others go on. Speeds in rows and statuses are of a run, so
    its share of the device.

    Args:
      workdirs: the work directory of each seed.

    Returns:
      The runs' final statuses.

    Raises:
      ValueError: as `train`, and for several seeds on several devices, at different updates, or beside
        a tracker of one run.
      NonFiniteLossError: the loss of a run diverged. With several seeds, after the others' last update.
      UserError, Interrupted: as `train`.

    Example:
      >>> train_seeds(config, {seed: f"workdirs/copy-seed{seed}" for seed in range(100)})
    """
    several = jax.process_count() > 1
    signals = set(SIGNALS) - ({signal.SIGTERM} if several else set())  # that is JAX's
    with signals_raised(signals) as received, contextlib.ExitStack() as stack:
        if config.init_from:  # absolute: the command may be repeated elsewhere
            config = dataclasses.replace(config, init_from=str(RunDirectory(config.init_from)))
        hosts.check_alike({"workdir": ",".join(workdirs.values()), **process_facts(config)})
        mesh, runs = make_mesh(config.mesh), [*map(RunDirectory, workdirs.values())]
        together = len(runs) > 1
        if together and mesh.size > 1:
            raise ValueError(
                f"{len(runs)} seeds train together on one device, and the mesh has {mesh.size}; let the "
                "process see one (CUDA_VISIBLE_DEVICES=0), or train each seed by itself"
            )
        if together and (config.log.wandb or config.log.trackio):
            raise ValueError(
                "log.wandb and log.trackio hold one run of a process, and --seeds trains several; leave them out"
            )
        jobs: list[Job] = []
        for seed, run in zip(workdirs, runs, strict=True):
            files = jobs[0].files if jobs else None  # the same text
            jobs.append(make_job(dataclasses.replace(config, seed=seed), run, mesh, files))
        steps = config.train.steps
        if all(hosts.broadcast(lambda: [_is_finished(run, steps) for run in runs])):
            return [run.status() for run in runs]
        if together:
            check_one_update(jobs, [max(run.saved_steps(), default=0) for run in runs])
        for job, run in zip(jobs, runs, strict=True):
            stack.enter_context(disk_errors_named(run))
            hosts.broadcast(
                functools.partial(run.claim, job.config, job.files["train"].tokenizer())
            )
            if hosts.is_primary():
                stack.callback(run.release)
        if hosts.is_primary():  # only now are all runs this process's own
            for run in runs:
                stack.enter_context(failure_recorded(run, steps))
        updates, stop = Updates(jobs, stack), StopRequest()
        if received:
            raise Interrupted
        with signals_handled(stop.answer, signals):
            updates.run(stop)
        if hosts.is_primary() and not is_watched() and updates.left:
            print(
                f"finished; {_next_command(*(run.job.run for run in updates.left))}",
                file=sys.stderr,
            )
    if updates.diverged:
        raise NonFiniteLossError("; ".join(updates.diverged))
    return [run.status() for run in runs]


def _is_finished(run: RunDirectory, steps: int) -> bool:
    """Returns whether all `steps` updates are made, and prints it, or that the last checkpoint is lost."""
    status = run.status()
    if status["step"] < steps:
        return False
    finished = status["state"] == "finished" and status["step"] in run.saved_steps()
    if status["state"] == "finished":
        rest = f"but its checkpoint of update {status['step']} was lost since"
        if finished:
            rest = f"with {status['steps']} updates; {_next_command(run)}"
        print(f"{run} was finished before, {rest}", file=sys.stderr)
    return finished


def _next_command(*runs: RunDirectory) -> str:
    flags = shlex.join([f"--workdirs={','.join(map(str, runs))}", "--multiples=1,2,4,8"])
    installed = os.path.basename(sys.argv[0]) == "alibi-train"
    command = "alibi-eval" if installed else "python eval_extrapolation.py"
    return f"evaluate it by\n  {command} {flags}"
