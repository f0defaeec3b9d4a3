"""A sweep: a short Python file with a get_sweep() that lists runs and evaluation lengths.

    def get_sweep():
        return {
            "config": "configs/quickstart.py",  # for all runs, may end in :KEY=VALUE,...
            "product": {"position": ["sinusoidal", "alibi"], "train_length": [64, 128], "seed": [0, 1]},
            "multiples": [1, 2, 4],  # in train lengths, or "lengths" in tokens
        }

`product` makes a run for each combination of config keys. `runs` lists further runs as dictionaries
of config keys, which may also hold a `name`, a `config` and the evaluation keys. Evaluation keys,
for the sweep or for a run: `multiples` or `lengths`, `evaluators` (a name or several, defaults to
perplexity), any option of these evaluators, such as `split` or `stride` (a list: each in turn),
`override` (test the run with other values than it was trained with, such as {"position":
"rotary_ntk", "options": {"factor": 4}, "window": 256}) and `evaluations`, a list of dictionaries
with these keys. Values in `product` or `runs` replace values in `config`. A list over updates is one
value: "train_length": [128, ((0, 32), (200, 128))] makes two runs.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from alibi.config import Config
from alibi.config import files as config_files
from alibi.config.fields import as_text, did_you_mean, without_lists
from alibi.config.override import MODEL_KEYS, Override
from alibi.config.tree import check_key
from alibi.evaluation.base import Cell, Evaluator, make_evaluators, options_by_name
from alibi.reporting.measure import EVALUATORS, REGISTRY
from alibi.reporting.names import grouped

EVALUATION_KEYS = ("multiples", "lengths", "evaluators", "override")
SWEEP_KEYS = ("config", "product", "runs", "evaluations", "title")
OVERRIDE_KEYS = ("position", "options", *MODEL_KEYS)
PROJECT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation of a run in one process.

    Attributes:
      lengths: in tokens.
      override: other values than in training, as `effective` returns them.
      cells: the cells to measure, each with its evaluator.
    """

    evaluators: tuple[Evaluator, ...]
    lengths: tuple[int, ...]
    override: Override | None
    cells: tuple[tuple[Evaluator, Cell], ...]

    def __str__(self) -> str:
        named = grouped(self.cells, lambda pair: pair[0].name())
        lengths = ", ".join(f"{length:,}" for length in self.lengths)
        return " and ".join(f"{len(cells)} of {name}" for name, cells in named.items()) + (
            f" at {lengths}"
        )

    def to_json(self) -> str:
        """Returns the evaluation as text, for `from_json` in another process."""
        named = [{"evaluator": one.name()} | dataclasses.asdict(one) for one in self.evaluators]
        override = self.override and self.override.to_json()
        return json.dumps({"evaluators": named, "lengths": self.lengths, "override": override})

    @classmethod
    def from_json(cls, text: str) -> "Evaluation":
        """Returns the evaluators, lengths and override that `to_json` wrote."""
        content = without_lists(json.loads(text))
        named = [(one.pop("evaluator"), one) for one in content["evaluators"]]
        override = content["override"] and Override.from_json(content["override"])
        lengths = content["lengths"]
        return cls(tuple(itertools.starmap(REGISTRY.make, named)), lengths, override, ())


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: its name (and directory), its --config flags for train.py, and its evaluations."""

    name: str
    config_flags: list[str]
    config: Config
    evaluations: tuple[Evaluation, ...]

    @property
    def results(self) -> int:
        """The number of results when the run is complete."""
        return sum(len(evaluation.cells) for evaluation in self.evaluations)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Runs trained, evaluated and reported together."""

    title: str
    runs: tuple[Run, ...]

    def share(self, task: str) -> tuple[Run, ...]:
        """Returns a task's runs.

        Args:
          task: I/N, every N-th run from run I on, counted from 0, or the name of a run.

        Raises:
          ValueError: a task of neither form, or a number beyond the tasks or the runs.
        """
        if named := [run for run in self.runs if run.name == task]:
            return tuple(named)
        numbers = re.fullmatch(r"(\d+)/(\d+)", task)
        index, tasks = map(int, numbers.groups()) if numbers else (0, 0)
        if index >= min(tasks, len(self.runs)):
            raise ValueError(
                f"--task={task}: there are {len(self.runs)} runs; give I/N with I from 0 to {len(self.runs) - 1} and "
                f"I < N, or a run's name; {did_you_mean(task, [run.name for run in self.runs])}--dry_run lists them"
            )
        return self.runs[index::tasks]


def load_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Returns the sweep in a file, and checks all runs.

    Raises:
      ValueError: the file does not load or has no get_sweep(), a key is unknown (the nearest is
        suggested), the config or the model refuses a run, two names are equal.
    """
    definition = config_files.call(path, "get_sweep", "configs/sweeps/quickstart.py")
    if not isinstance(definition, Mapping):
        raise ValueError(
            f"get_sweep() of {path} must return a dictionary, not {type(definition).__name__}"
        )
    return make_sweep(definition, title=pathlib.Path(path).stem)


def make_sweep(definition: Mapping[str, Any], *, title: str) -> Sweep:
    """Returns the sweep of a definition, which the head of this module describes. Raises as `load_sweep`."""
    keys = (*SWEEP_KEYS, *evaluation_keys([definition, *definition.get("evaluations", ())]))
    _check_keys(definition, keys, "the sweep")
    if "config" not in definition:
        raise ValueError(
            "the sweep names no config; add for example 'config': 'configs/quickstart.py'"
        )
    product: Mapping[str, Sequence[Any]] = definition.get("product", {})
    for key, values in product.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(
                f"product key {key!r} needs a list of values, such as [0, 1]; got {values!r}"
            )
    combinations = itertools.product(*product.values()) if product else ()
    entries = [dict(zip(product, values, strict=True)) for values in combinations]
    entries += definition.get("runs", ())
    if not entries:
        raise ValueError(
            "the sweep has no runs; give 'product': {'position': [...]} or 'runs': [{...}, ...]"
        )
    runs = tuple(_make_run(run, definition) for run in entries)
    double = sorted(name for name, times in Counter(run.name for run in runs).items() if times > 1)
    if double:
        raise ValueError(
            f"runs of equal name: {', '.join(double)}; a run needs keys of its own, or a 'name'"
        )
    return Sweep(definition.get("title", title), runs)


def run_name(config: Config, overrides: Mapping[str, Any]) -> str:
    """Returns a readable name: method, train length, the run's other keys, and seed."""
    over = {key: as_text(pairs) for key, pairs in config.over_updates.items()}
    standard = {"position", "train_length", "length", "seed"}
    others = [
        f"{key.rpartition('.')[2]}={over.get(check_key(key), value)}"
        for key, value in overrides.items()
        if key not in standard or check_key(key) in over
    ]
    name = "-".join([config.position, f"L{config.train_length}", *others, f"seed{config.seed}"])
    return re.sub(r"[^\w.=+-]+", "_", name)


def resolve(file: str) -> pathlib.Path:
    """Returns the path of a config or sweep file: as given if it exists from here, else inside the
    project.
    """
    path = pathlib.Path(file)
    return path.absolute() if path.exists() else PROJECT / path


def load_config(config_file: str, overrides: Mapping[str, Any]) -> Config:
    """Returns the config of `config_file`, FILE or FILE:KEY=VALUE,..., with `overrides`, as
    train.py makes it.

    Raises:
      ValueError: as `load_sweep`.
    """
    return config_files.load_config(*_named(config_file, overrides))


def _named(config_file: str, overrides: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns FILE:KEY=VALUE,... with the overrides, and the overrides that hold a comma, which would end
    a value.
    """
    file, _, argument = config_file.partition(":")
    path = str(resolve(file))
    if ":" in path or (pathlib.Path(config_file).is_file() and ":" in config_file):
        raise ValueError(
            f"the path of the config {config_file} holds a colon, after which --config expects keys; "
            "move it to a path without one"
        )
    # Overrides belong to the argument: a config may derive values from it, such as a batch of whole
    # sequences.
    others = {key: value for key, value in overrides.items() if "," in str(value)}
    inside = (f"{key}={value}" for key, value in overrides.items() if key not in others)
    argument = ",".join(filter(None, [argument, *inside]))
    return f"{path}:{argument}" if argument else path, others


def _make_run(entry: Mapping[str, Any], sweep: Mapping[str, Any]) -> Run:
    # Loads JAX, which takes seconds. Nothing is computed, so no device is claimed.
    from alibi.training.setup import check_trainable

    of_evaluation = {"evaluations", *evaluation_keys([entry, *entry.get("evaluations", ())])}
    overrides = {key: entry[key] for key in entry if key not in {"name", "config", *of_evaluation}}
    try:
        named, others = _named(entry.get("config", sweep["config"]), overrides)
        config = config_files.load_config(named, others)
        check_trainable(config)
        evaluations = _evaluations(entry if of_evaluation & entry.keys() else sweep, config)
    except ValueError as error:
        shown = ", ".join(f"{key}={value}" for key, value in entry.items() if key != "evaluations")
        raise ValueError(f"run ({shown or 'without keys'}): {error}") from None
    name = entry.get("name") or run_name(config, overrides)
    if not re.fullmatch(r"[\w=+-][\w.=+-]*", name):
        raise ValueError(
            f"run name {name!r} must do as a directory's name: letters, digits and . = + - _"
        )
    flags = [
        f"--config={named}",
        *(f"--config.{key}={as_text(without_lists(value))}" for key, value in others.items()),
    ]
    return Run(name, flags, config, evaluations)


def evaluation_keys(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the keys of evaluations: their own, and the options of the evaluators in the registry and in
    `parts`.
    """
    named = {*EVALUATORS, *(name for entry in parts for name in _names(entry))}
    return [*EVALUATION_KEYS, *options_by_name(sorted(named))]


def _names(entry: Mapping[str, Any]) -> list[str]:
    names = entry.get("evaluators", "perplexity")
    return [names] if isinstance(names, str) else list(names)


def _evaluations(entry: Mapping[str, Any], config: Config) -> tuple[Evaluation, ...]:
    keys = evaluation_keys([entry])
    shared = {key: entry[key] for key in keys if key in entry}
    parts = [*([shared] if shared else []), *entry.get("evaluations", ())]
    if not parts:
        raise ValueError("nothing to evaluate; add for example 'multiples': [1, 2, 4] to the sweep")
    return tuple(_evaluation(evaluation, config) for evaluation in parts)


def _evaluation(entry: Mapping[str, Any], config: Config) -> Evaluation:
    """Returns an evaluation.

    Raises:
      ValueError: it would fail after the training.
    """
    _check_keys(entry, evaluation_keys([entry]), "an evaluation")
    if ("multiples" in entry) == ("lengths" in entry):
        raise ValueError(f"an evaluation needs either 'multiples' or 'lengths'; got {dict(entry)}")
    lengths = entry.get("lengths", [])
    lengths = [*lengths, *(config.train_length * times for times in entry.get("multiples", []))]
    if not lengths or any(not isinstance(length, int) or length < 1 for length in lengths):
        raise ValueError(
            f"evaluation lengths must be whole numbers of tokens, at least 1; got {lengths}"
        )
    lengths = sorted(set(lengths))
    options = {key: value for key, value in entry.items() if key not in EVALUATION_KEYS}
    several = [value if isinstance(value, list) else [value] for value in options.values()]
    evaluators: dict[Evaluator, None] = {}
    for values in itertools.product(*several):
        in_turn = dict(zip(options, values, strict=True))
        evaluators |= dict.fromkeys(make_evaluators(_names(entry), in_turn))
    for one in evaluators:
        one.check(config, lengths)
    cells = tuple((one, cell) for one in evaluators for cell in one.cells(config, lengths))
    override = _override(entry.get("override", {}), config)
    return Evaluation(tuple(evaluators), tuple(lengths), override, cells)


def _override(changes: Mapping[str, Any], config: Config) -> Override | None:
    """Returns the difference from the run's own `config`.

    Raises:
      ValueError: the run's parameters do not suffice.
    """
    from alibi.runs.overrides import effective, overridden

    _check_keys(changes, OVERRIDE_KEYS, "an override")
    changes = without_lists(changes)
    options = tuple(changes.get("options", {}).items())
    model = {key: changes.get(key) for key in MODEL_KEYS}
    override = effective(Override(changes.get("position"), options, **model), config)
    overridden(config, override)
    return override


def _check_keys(entry: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in entry:
        if key not in keys:
            raise ValueError(
                f"unknown key {key!r} in {where}; {did_you_mean(key, keys)}"
                f"there are: {', '.join(keys)}"
            )
