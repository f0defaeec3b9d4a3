"""Tasks of EleutherAI's harness (the package `lm_eval`) on trained runs: tasks -> results, table.

The harness reads a task's data and computes its metrics; `alibi.evaluation.harness` answers.
"""

import collections
import contextlib
import dataclasses
import difflib
import importlib.metadata
import json
import math
import os
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from alibi.data.hosted import offline, reachable
from alibi.evaluation.evaluate import RunOptions
from alibi.evaluation.harness import harness_model
from alibi.evaluation.output import print_once
from alibi.evaluation.subject import row_of
from alibi.extras import needs
from alibi.progress import is_terminal
from alibi.reporting.rows import Row
from alibi.reporting.writers import aligned
from alibi.runs.trained import TrainedRun
from alibi.storage.cache import content_key
from alibi.storage.files import check_writable, resolve, write_whole

BOOTSTRAP = 1000  # resamples for the standard error of metrics that are no means
FEWSHOT_SEED = 1234  # the harness's own default, and 0 for Python's random numbers
FOLDER = "harness"  # of the result files in an output directory


@dataclasses.dataclass(frozen=True)
class Options(RunOptions):
    """The options of an evaluation by tasks; a length is that of the windows.

    Raises:
      ValueError: a number out of its range, no task, or a missing folder.
    """

    multiples: tuple[int, ...] = (1,)
    tasks: tuple[str, ...] = ()  # names of tasks, groups and tags, or YAML files
    include_path: str | None = None  # a folder with the YAML files of further tasks
    num_fewshot: int | None = None  # examples before each question; None: as the task says
    limit: float | None = None  # samples of each task; below 1: their share; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks:
            raise ValueError("no task is named; give --tasks=NAME,NAME")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num_fewshot={self.num_fewshot} must be at least 0")
        if self.limit is not None and not (0 < self.limit < 1 or self.limit % 1 == 0 < self.limit):
            raise ValueError(
                f"limit={self.limit} must be a whole number of samples, or a share of them below 1"
            )
        if self.include_path is not None and not os.path.isdir(self.include_path):
            raise ValueError(
                f"include_path={self.include_path} is no folder; name one with YAML files of tasks"
            )


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """A metric of a task or a group of tasks."""

    of: Row  # run, checkpoint, length and origin; without results
    task: str
    task_version: str  # "": it has none
    metric: str
    filter: str  # of the answers, before the metric
    value: float | None  # None: not finite
    stderr: float | None  # None: the harness has none for this metric
    samples: int | None
    num_fewshot: int | None
    limit: float | None
    harness: str  # the version of lm_eval

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the result's line; keys without a value are left out."""
        own = {key: value for key, value in vars(self).items() if key != "of" and value is not None}
        about = self.of.to_json()
        return {key: about[key] for key in about if key not in ("corpus", "split")} | own


def evaluate_tasks(workdir: str | os.PathLike[str], options: Options) -> list[TaskResult]:
    """Evaluates a run by tasks at each length; writes each task's results to a file, and prints a
    table.

    Raises:
      MissingPackageError: the package lm_eval is not installed.
      ValueError: several hosts, a run that is not causal, a length
        for which its method is not defined, or a task that is unknown or can't be loaded.
    """
    needs("a task of the harness", "lm_eval")
    from lm_eval.evaluator import evaluate

    if jax.process_count() > 1:
        raise ValueError("tasks of the harness run on one host; start one process")
    run = options.trained(os.fspath(workdir))
    if not run.config.objective.causal:
        raise ValueError(
            f"{run} was trained for objective={run.config.objective.name}; tasks need objective=next_token"
        )
    lengths = options.lengths_of(run.config.train_length)
    for length in lengths:
        if reason := run.undefined(length):
            raise ValueError(f"{run.title} has no result at --length={length:,}: {reason}")
    folder = resolve(options.output_dir)
    check_writable(folder)
    tasks = _load_tasks(options)
    # its own processes would be forks of a process with JAX's threads
    os.environ["DISABLE_MULTIPROC"] = "1"
    results: list[TaskResult] = []
    for length in lengths:
        # the harness prints notes
        with contextlib.redirect_stdout(sys.stderr):
            found = evaluate(
                harness_model(run, length),
                tasks,
                limit=options.limit,
                bootstrap_iters=BOOTSTRAP,
                log_samples=False,
            )
        results += _results(run, length, options, found)
    files = collections.defaultdict(list)
    for result in results:
        files[_file_name(result)].append(json.dumps(result.to_json(), allow_nan=False) + "\n")
    for name, lines in files.items():
        write_whole(folder / FOLDER / name, "".join(lines))
    print(_table(results), end="")
    print_once(f"results: {folder / FOLDER}")
    return results


def _load_tasks(options: Options) -> Any:
    """Returns the tasks, with the few-shot options; looks for a network only if a task's data is
    not on this machine.
    """
    import datasets
    from lm_eval.tasks import TaskManager

    names, own = list(options.tasks), options.include_path
    # the index of the harness's own 14,000 tasks takes seconds
    manager = TaskManager(include_path=own, include_defaults=False)
    if not set(names) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=own)
    for name in names:
        if name not in manager.all_tasks and not os.path.isfile(name):
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks, n=5))
            raise ValueError(
                f"there is no task {name!r}; {f'near names: {near}' if near else 'no name is near'}; --include_path "
                "adds a folder of tasks"
            )
    random.seed(0)
    np.random.seed(FEWSHOT_SEED)
    if not is_terminal():
        datasets.disable_progress_bars()
    loaded = _load_here_or_online(manager, names)
    for task in loaded["tasks"].values():
        default = task.get_config("num_fewshot")
        # as the harness does: a task with 0 can't take examples
        if default is None or (options.num_fewshot is not None and default != 0):
            task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


def _load_here_or_online(manager: Any, names: list[str]) -> Any:
    """Returns `manager.load(names)`, without a network if that is enough."""
    import huggingface_hub.constants as hub

    for is_online in (False, True):
        try:
            with contextlib.nullcontext() if is_online else offline():
                return manager.load(names)
        except Exception as error:  # a task is code, and may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            failed = f"--tasks={','.join(names)} can't be loaded"
            if is_online:
                raise ValueError(f"{failed}: {reason}") from error
            if hub.HF_HUB_OFFLINE or not reachable([hub.ENDPOINT]):
                why = "HF_HUB_OFFLINE" if hub.HF_HUB_OFFLINE else f"{hub.ENDPOINT} doesn't answer"
                raise ValueError(f"{failed} without a network ({why}): {reason}") from error


def _results(
    run: TrainedRun, length: int, options: Options, found: Mapping[str, Any]
) -> list[TaskResult]:
    """Returns the results of a length from those of `lm_eval.evaluator.evaluate`."""
    made = []
    for task, metrics in found["results"].items():
        cell = {"length": length, "task": task}
        row = row_of(run, corpus=task, split="", evaluator=FOLDER, cell=cell)
        samples = found["n-samples"].get(task, {}).get("effective", metrics.get("sample_len"))
        for key, value in metrics.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            one = TaskResult(
                of=row,
                task=task,
                task_version=str(found["versions"].get(task, "")),
                metric=metric,
                filter=name,
                value=_finite(value),
                stderr=_finite(metrics.get(f"{metric}_stderr,{name}")),
                samples=samples,
                num_fewshot=found["n-shot"].get(task),
                limit=options.limit,
                harness=importlib.metadata.version("lm_eval"),
            )
            made.append(one)
    return made


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _file_name(result: TaskResult) -> str:
    """Returns the name of a task's file: another evaluation of the same kind replaces it."""
    key = {"of": str(result.of.measurement)}
    key |= {"shots": str(result.num_fewshot), "limit": str(result.limit)}
    run, length, step = result.of.run, result.of.length, result.of.step
    return f"{run}-length={length}-step={step}-{content_key(key)[:8]}.jsonl"


def _table(results: Sequence[TaskResult]) -> str:
    """Returns a text table of the results."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    header = ["task", "metric", "filter", "length", "shots", "samples", "value", "stderr"]
    body = [
        [
            *(one.task, one.metric, one.filter, f"{one.of.length:,}", str(one.num_fewshot)),
            *(f"{one.samples:,}" if one.samples else "-", number(one.value), number(one.stderr)),
        ]
        for one in results
    ]
    return aligned([header, *body], left=(0, 1, 2))
