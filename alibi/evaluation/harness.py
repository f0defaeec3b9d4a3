"""Tasks of EleutherAI's harness (the package `lm_eval`) on trained runs: multiple choice, text,
perplexity.

The harness builds requests of text and computes metrics; a run answers requests in windows of a
length. Continuations and rolling windows are scored as rows of a few lengths, so that each length
compiles once.
"""

import collections
import contextlib
import dataclasses
import difflib
import importlib.metadata
import itertools
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from alibi.data.cache import content_key
from alibi.data.hosted import offline, reachable
from alibi.evaluation.extrapolation import RunOptions
from alibi.evaluation.output import print_once, row_of
from alibi.evaluation.perplexity import unrounded
from alibi.evaluation.windows import windows_of
from alibi.generation.sampling import Sampling
from alibi.generation.texts import Prompt, Writer
from alibi.model.decoder import DecoderLM
from alibi.parallel.sharding import batch_parts
from alibi.progress import Progress, is_terminal
from alibi.reporting.rows import Row
from alibi.reporting.writers import aligned
from alibi.runs.trained import TrainedRun
from alibi.storage.files import check_writable, resolve, write_whole

LEAST_LENGTH = 16  # of a row of requests; longer rows double up to the window
MAX_TOKENS = 256  # of an answer, if its task does not say; the harness's own default
BOOTSTRAP = 1000  # resamples for the standard error of metrics that are no means
FEWSHOT_SEED = 1234  # the harness's own default, and 0 for Python's random numbers
FOLDER = "harness"  # of the result files in an output directory

Pair = tuple[list[int], list[int]]  # the ids of a context and of its continuation


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
    metric: str
    filter: str  # of the answers, before the metric
    value: float | None  # None: not finite
    stderr: float | None  # None: the harness has none for this metric
    samples: int | None
    num_fewshot: int | None
    limit: float | None
    task_version: str | None
    harness: str  # the version of lm_eval

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the result's line; keys without a value are left out."""
        own = {key: value for key, value in vars(self).items() if key != "of" and value is not None}
        about = self.of.to_json()
        return {key: about[key] for key in about if key not in ("corpus", "split", "stride")} | own


class PairScorer:
    """Scores continuations of contexts by a run's model.

    A row of requests is padded at its end to a power of two or to the window, and a batch holds
    `run.batch_tokens` inputs on each device. For methods that depend on the length of a sequence
    every row is the beginning of a window, so a score does not depend on the padding.

    Args:
      run: of a causal objective.
      length: inputs of a window; a longer context loses its beginning.
    """

    def __init__(self, run: TrainedRun, length: int):
        self.run, self.length = run, length
        powers = itertools.takewhile(
            lambda size: size < length, (LEAST_LENGTH << n for n in itertools.count())
        )
        self.lengths = [*powers, length]
        self.programs = jax.jit(_nll_and_greedy(run.model, length), static_argnames="greedy")

    def score(
        self, pairs: Sequence[Pair], *, greedy: bool = True, title: str = "requests"
    ) -> list[tuple[float, bool]]:
        """Returns for each pair the log-probability of the continuation in nats, and whether each
        of its tokens is the likeliest after the tokens before it.

        An empty context is the boundary that stands before a text. Without `greedy` the second
        result is meaningless.

        Raises:
          ValueError: a continuation without a token, or longer than the window.
        """
        for _, continuation in pairs:
            if not 0 < len(continuation) <= self.length:
                raise ValueError(
                    f"a continuation has {len(continuation):,} tokens; it needs 1 to --length={self.length:,}"
                )
        tokens = [((context or [self._boundary]) + to) for context, to in pairs]
        _say_cut(sum(len(ids) > self.length + 1 for ids in tokens), len(pairs), self.length)
        tokens = [ids[-self.length - 1 :] for ids in tokens]
        sizes = [next(n for n in self.lengths if n >= len(ids) - 1) for ids in tokens]
        order = sorted(range(len(pairs)), key=lambda number: -sizes[number])
        found = [(0.0, True)] * len(pairs)
        with Progress(f"{self.run.name}: {title}", len(pairs), "request") as bar:
            for size, numbers in itertools.groupby(order, key=lambda number: sizes[number]):
                for part, rows in self._batches(list(numbers), size):
                    inputs = np.full((rows, size), self._boundary, np.int32)
                    targets = np.full((rows, size), -1, np.int32)
                    for row, number in enumerate(part):
                        ids, scored = tokens[number], len(pairs[number][1])
                        inputs[row, : len(ids) - 1] = ids[:-1]
                        targets[row, len(ids) - 1 - scored : len(ids) - 1] = ids[-scored:]
                    batch = jax.device_put((inputs, targets), self.run.model.sharding)
                    nll, likeliest = map(
                        np.asarray, self.programs(self.run.params, *batch, greedy=greedy)
                    )
                    for row, number in enumerate(part):
                        total = nll[row].sum(dtype=np.float64)
                        found[number] = -float(total), bool(likeliest[row].all())
                    bar.update(len(part))
        return found

    @property
    def _boundary(self) -> int:
        return self.run.tokenizer.boundary_id

    def _batches(self, numbers: list[int], size: int) -> Iterator[tuple[list[int], int]]:
        """Yields the numbers of each batch with its rows, of which the last ones may be empty."""
        devices = batch_parts(self.run.model.sharding)
        needed = -(-len(numbers) // devices)
        rows = devices * min(max(1, self.run.batch_tokens // size), 1 << (needed - 1).bit_length())
        for start in range(0, len(numbers), rows):
            yield numbers[start : start + rows], rows


def _nll_and_greedy(model: DecoderLM, total: int) -> Any:
    """Returns the function of parameters, inputs and targets to the NLL of each target in nats, and
    whether it is the likeliest token; 0 and True for negative targets.

    Args:
      total: the length of the sequences that begin with the inputs.
    """

    def computed(
        module: DecoderLM,
        inputs: Int[Array, "rows length"],
        targets: Int[Array, "rows length"],
        greedy: bool,
    ) -> tuple[Float[Array, "rows length"], Bool[Array, "rows length"]]:
        features = module.features(inputs, total=total)
        nll = module.vocabulary.token_nll(features, targets, True)
        if not greedy:
            return nll, targets < 0
        rows, length, width = features.shape
        # as in the loss, the logits of a range of positions exist at a time
        chunk = min(
            length, max(1, module.config.logits_chunk * batch_parts(module.sharding) // rows)
        )
        padded = jnp.pad(features, ((0, 0), (0, -length % chunk), (0, 0)))
        likeliest = jax.lax.map(
            lambda part: jnp.argmax(module.vocabulary.logits(part, True), axis=-1),
            jnp.moveaxis(padded.reshape(rows, -1, chunk, width), 1, 0),
        )
        likeliest = jnp.moveaxis(likeliest, 0, 1).reshape(rows, -1)[:, :length]
        return nll, (likeliest == targets) | (targets < 0)

    def score(params: PyTree, inputs: Array, targets: Array, *, greedy: bool) -> Any:
        with unrounded(model):
            return model.apply({"params": params}, inputs, targets, greedy, method=computed)

    return score


def write_answers(
    run: TrainedRun,
    length: int,
    contexts: Sequence[str],
    seeds: Sequence[int],
    given: Mapping[str, Any],
) -> list[str]:
    """Returns the run's answer to each context, up to the first stop string.

    Prompt and answer share a window, so a longer context loses its beginning; methods that depend
    on the length of a sequence take the window's.

    Args:
      seeds: of the answers, if they are drawn.
      given: max_gen_toks, until, do_sample, temperature, top_k, top_p and min_p, as the harness
        normalizes them; a line names others, which have no effect.

    Raises:
      ValueError: an answer as long as the window.
    """
    options = dict(given)
    count, stop = options.pop("max_gen_toks"), [text for text in options.pop("until") if text]
    if count >= length:
        raise ValueError(
            f"a task asks for answers of up to {count:,} tokens, and --length={length:,} leaves no room for a "
            f"question; use a --length above {count:,}"
        )
    draws, limits = options.pop("do_sample"), ("temperature", "top_k", "top_p", "min_p")
    drawn = {key: options.pop(key) for key in limits if key in options}
    sample = Sampling(**drawn) if draws else Sampling(temperature=0.0)
    if options:
        print_once(f"{run.name}: options of generation without effect here: {options}")
    ids = [run.tokenizer.encode_beginning(context) for context in contexts]
    _say_cut(sum(len(own) > length - count for own in ids), len(ids), length - count)
    prompts = [
        Prompt(own[-(length - count) :], seed, {}) for own, seed in zip(ids, seeds, strict=True)
    ]
    answers = []
    with Progress(f"{run.name}: answers", len(prompts), "answer") as bar:
        for answer in Writer(run, sample, count, stop).write(prompts, total=length):
            answers.append(answer.text)
            bar.update(1)
    return answers


def _say_cut(cut: int, requests: int, most: int) -> None:
    if cut:
        print_once(
            f"{cut:,} of {requests:,} requests are longer than {most:,} tokens, and lost their beginning; "
            "--length sets the window"
        )


def harness_model(run: TrainedRun, length: int) -> Any:
    """Returns the run as an `lm_eval.api.model.LM` with windows of `length` inputs.

    The token that stands before a text without context is the boundary that stood before each text
    in training: `<|endoftext|>` or its like of BPE, `</s>` of words, a line end of bytes. Rolling
    windows are the harness's: they don't overlap, but the last one reads a full window.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    scorer, tokenizer = PairScorer(run, length), run.tokenizer

    class RunModel(TemplateLM):
        eot_token_id = tokenizer.boundary_id
        max_length = length
        max_gen_toks = MAX_TOKENS

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return tokenizer.encode_open(string)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            for context, continuation in (request.args for request in requests):
                if not context and not tokenizer.encode_open(continuation):
                    raise ValueError(f"the continuation {continuation!r} has no token")
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return scorer.score([(context, to) for _, context, to in requests], title="choices")

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
            windows: list[tuple[int, Pair]] = [
                (number, make_disjoint_window(window))
                for number, request in enumerate(requests)
                for window in get_rolling_token_windows(
                    tokenizer.encode_open(request.args[0]), self.prefix_token_id, length, 1
                )
            ]
            totals = [0.0] * len(requests)
            scores = scorer.score([pair for _, pair in windows], greedy=False, title="windows")
            for (number, _), (total, _) in zip(windows, scores, strict=True):
                totals[number] += total
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
            alike = collections.defaultdict(list)
            for number, request in enumerate(requests):
                alike[json.dumps(request.args[1], sort_keys=True)].append(number)
            texts: dict[int, str] = {}
            for options, numbers in alike.items():
                given = normalize_gen_kwargs(json.loads(options), MAX_TOKENS)
                contexts = [requests[number].args[0] for number in numbers]
                answers = write_answers(run, length, contexts, numbers, given)
                texts |= zip(numbers, answers, strict=True)
            return [texts[number] for number in range(len(requests))]

    return RunModel()


def evaluate_tasks(workdir: str | os.PathLike[str], options: Options) -> list[TaskResult]:
    """Evaluates a run by tasks at each length; writes each task's results to a file, and prints a
    table.

    Raises:
      ValueError: the package lm_eval is missing, several hosts, a run that is not causal, a length
        for which its method is not defined, or a task that is unknown or can't be loaded.
    """
    try:
        from lm_eval.evaluator import evaluate
    except ImportError as error:
        raise ValueError(
            f"tasks need the package lm_eval ({error}); pip install 'lm-eval==0.4.13'"
        ) from None
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
    assert run.params is not None  # loaded here: a missing checkpoint is told before the requests
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
    import huggingface_hub.constants as hub
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
    try:
        with offline():
            loaded = manager.load(names)
    except Exception as error:  # a task is code, and may raise anything
        if hub.HF_HUB_OFFLINE or not reachable([hub.ENDPOINT]):
            raise ValueError(
                f"--tasks={','.join(names)} can't be loaded without a network ({hub.ENDPOINT} doesn't answer): "
                f"{_first_line(error)}"
            ) from error
        try:
            loaded = manager.load(names)
        except Exception as error:
            raise ValueError(
                f"--tasks={','.join(names)} can't be loaded: {_first_line(error)}"
            ) from error
    for task in loaded["tasks"].values():
        default = task.get_config("num_fewshot")
        # as the harness does: a task with 0 can't take examples
        if default is None or (options.num_fewshot is not None and default != 0):
            task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _results(
    run: TrainedRun, length: int, options: Options, found: Mapping[str, Any]
) -> list[TaskResult]:
    """Returns the results of a length from those of `lm_eval.evaluator.evaluate`."""
    made = []
    for task, metrics in found["results"].items():
        windows = dataclasses.replace(windows_of(1, length), mode=FOLDER)
        row = row_of(run, windows, corpus=task, split="")
        samples = found["n-samples"].get(task, {}).get("effective", metrics.get("sample_len"))
        for key, value in metrics.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{name}")
            made.append(
                TaskResult(
                    row, task, metric, name, _finite(value), _finite(stderr), samples,
                    found["n-shot"].get(task), options.limit, _text(found["versions"].get(task)),
                    importlib.metadata.version("lm_eval"),
                )
            )  # fmt: skip
    return made


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _file_name(result: TaskResult) -> str:
    """Returns the name of a task's file: another evaluation of the same kind replaces it."""
    key = {"of": str(result.of.scoring), "task": result.task}
    key |= {"shots": str(result.num_fewshot), "limit": str(result.limit)}
    run, length, step = result.of.run, result.of.eval_length, result.of.step
    return f"{run}-length={length}-step={step}-{content_key(key)[:8]}.jsonl"


def _table(results: Sequence[TaskResult]) -> str:
    """Returns a text table of the results."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    header = ["task", "metric", "filter", "length", "shots", "samples", "value", "stderr"]
    body = [
        [
            *(one.task, one.metric, one.filter, f"{one.of.eval_length:,}", str(one.num_fewshot)),
            *(f"{one.samples:,}" if one.samples else "-", number(one.value), number(one.stderr)),
        ]
        for one in results
    ]
    return aligned([header, *body], left=(0, 1, 2))
