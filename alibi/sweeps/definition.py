"""What a sweep is: a short Python file whose get_sweep() lists runs and evaluation lengths.

    def get_sweep():
        return {
            "config": "configs/quickstart.py",  # what all runs share; may end in :KEY=VALUE,...
            "product": {"position": ["sinusoidal", "alibi"], "train_length": [64, 128], "seed": [0, 1]},
            "multiples": [1, 2, 4],  # of the train length; or "lengths" in tokens
        }

`product` makes one run of each combination of config keys; `runs` lists further ones
as dictionaries of config keys, which may also hold a `name` and the evaluation keys.
Evaluation keys, for the sweep or for one run: `multiples` or `lengths`, `stride` (a
number or several; default: the length), `split` (default: valid), `context_use` (True:
the same tokens at each length too), `passkey` (True: keys to be found
again at each length, in place of perplexity), `override` (what the run is tested under in place of
what it was trained with: {"position": "rotary_ntk", "options": {"factor": 4}, "window": 256},
any of these) and `evaluations`, a list of dictionaries of these. Values given with `product`
or `runs` win over `config`.
"""

import dataclasses
import itertools
import os
import pathlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from alibi.config import Config
from alibi.config import files as config_files
from alibi.config.fields import nearest
from alibi.config.override import Override

EVALUATION_KEYS = ("multiples", "lengths", "stride", "split", "context_use", "passkey", "override")
SWEEP_KEYS = ("config", "product", "runs", "evaluations", "title", *EVALUATION_KEYS)
PROJECT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One call of the evaluation: lengths in tokens, the stride (None: each length's own) and the split."""

    lengths: tuple[int, ...]
    stride: int | None
    split: str
    context_use: bool = False  # whether the same tokens are scored at each length too
    passkey: bool = False  # whether keys are to be found again at each length, in place of perplexity
    override: Override | None = None  # as `effective` gives it


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: its name (also its directory's), config file, the keys that differ from it, and its evaluations."""

    name: str
    config_file: str
    overrides: Mapping[str, Any]
    config: Config
    evaluations: tuple[Evaluation, ...]

    @property
    def results(self) -> int:
        """How many results it has when all is done."""
        return sum(len(evaluation.lengths) for evaluation in self.evaluations)

    def config_flags(self) -> list[str]:
        """The --config flags that give this run's config to train.py."""
        file, argument, others = _split(self.config_file, self.overrides)
        flags = [f"--config.{key}={value}" for key, value in others.items()]
        return [f"--config={resolve(file)}" + (f":{argument}" if argument else ""), *flags]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Runs that are trained, evaluated and reported together."""

    title: str
    runs: tuple[Run, ...]


def load_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Reads a sweep file and checks all of its runs, before the first one starts.

    Raises:
      ValueError: a file that does not load or has no get_sweep(), an unknown key (the
        nearest is suggested), a run that its config or the model refuses, equal names.
    """
    definition = config_files.call(path, "get_sweep", "configs/sweeps/quickstart.py")
    if not isinstance(definition, Mapping):
        raise ValueError(f"get_sweep() of {path} must return a dictionary, not {type(definition).__name__}")
    return make_sweep(definition, title=pathlib.Path(path).stem)


def make_sweep(definition: Mapping[str, Any], *, title: str) -> Sweep:
    """The sweep that `definition` describes (see this module's head); raises ValueError as `load_sweep` does."""
    _check_keys(definition, SWEEP_KEYS, "the sweep")
    if "config" not in definition:
        raise ValueError("the sweep names no config; add for example 'config': 'configs/quickstart.py'")
    combinations = _combinations(definition["product"]) if "product" in definition else []
    given = [*combinations, *definition.get("runs", ())]
    if not given:
        raise ValueError("the sweep has no runs; give 'product': {'position': [...]} or 'runs': [{...}, ...]")
    runs = tuple(_make_run(run, definition) for run in given)
    double = sorted(name for name, times in Counter(run.name for run in runs).items() if times > 1)
    if double:
        raise ValueError(f"runs of equal name: {', '.join(double)}; a run needs keys of its own, or a 'name'")
    return Sweep(definition.get("title", title), runs)


def run_name(config: Config, overrides: Mapping[str, Any]) -> str:
    """A readable name: method, train length and seed, then whatever else the run sets."""
    standard = {"position", "train_length", "length", "seed"}
    others = [f"{key.rpartition('.')[2]}={value}" for key, value in overrides.items() if key not in standard]
    name = "-".join([config.position, f"L{config.train_length}", *others, f"seed{config.seed}"])
    return re.sub(r"[^\w.=+-]+", "_", name)


def resolve(file: str) -> pathlib.Path:
    """A config file's path: as given if it exists from here, else inside the project."""
    path = pathlib.Path(file)
    return path.absolute() if path.exists() else PROJECT / path


def _combinations(product: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    for key, values in product.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"product key {key!r} needs a list of values, such as [0, 1]; got {values!r}")
    return [dict(zip(product, values, strict=True)) for values in itertools.product(*product.values())]


def _make_run(given: Mapping[str, Any], sweep: Mapping[str, Any]) -> Run:
    config_file = given.get("config", sweep["config"])
    evaluation_keys = {"evaluations", *EVALUATION_KEYS}
    overrides = {key: given[key] for key in given if key not in {"name", "config", *evaluation_keys}}
    try:
        config = load_config(config_file, overrides)
        name = given.get("name") or run_name(config, overrides)
        evaluations = _evaluations(given if evaluation_keys & given.keys() else sweep, config)
        _check_run(config, evaluations)
    except ValueError as error:
        shown = ", ".join(f"{key}={value}" for key, value in given.items() if key != "evaluations")
        raise ValueError(f"run ({shown or 'without keys'}): {error}") from None
    if not re.fullmatch(r"[\w=+-][\w.=+-]*", name):
        raise ValueError(f"run name {name!r} must do as a directory's name: letters, digits and . = + - _")
    return Run(name, config_file, overrides, config, evaluations)


def _split(config_file: str, overrides: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """The config's file, its argument with the overrides in it, and those that can't stand there."""
    file, _, argument = config_file.partition(":")
    # A comma would end a value inside the argument; such values have a flag of their own.
    others = {key: value for key, value in overrides.items() if "," in str(value)}
    inside = (f"{key}={value}" for key, value in overrides.items() if key not in others)
    return file, ",".join(filter(None, [argument, *inside])), others


def load_config(config_file: str, overrides: Mapping[str, Any]) -> Config:
    """The config of `config_file`, FILE or FILE:KEY=VALUE,..., with `overrides`; raises ValueError as `load_sweep`."""
    # As train.py will: a config may derive values from its argument, such as a batch of whole sequences.
    file, argument, others = _split(config_file, overrides)
    if ":" in str(resolve(file)) or (pathlib.Path(config_file).is_file() and ":" in config_file):
        raise ValueError(
            f"the path of the config {config_file} holds a colon, after which --config expects keys; "
            "move it to a path without one"
        )
    return config_files.load_config(f"{resolve(file)}:{argument}", others)


def _evaluations(given: Mapping[str, Any], config: Config) -> tuple[Evaluation, ...]:
    train_length = config.train_length
    parts = list(given.get("evaluations", ()))
    own = {key: given[key] for key in EVALUATION_KEYS if key in given}
    evaluations = []
    for part in [own, *parts] if own else parts:
        _check_keys(part, EVALUATION_KEYS, "an evaluation")
        if ("multiples" in part) == ("lengths" in part):
            raise ValueError(f"an evaluation needs either 'multiples' or 'lengths'; got {dict(part)}")
        lengths = part["lengths"] if "lengths" in part else [train_length * times for times in part["multiples"]]
        wrong = [length for length in lengths if not isinstance(length, int) or length < 1]
        if wrong or not lengths:
            raise ValueError(f"evaluation lengths must be whole numbers of tokens, at least 1; got {list(lengths)}")
        stride, split = part.get("stride"), part.get("split", "valid")
        strides = stride if isinstance(stride, Sequence) else [stride]
        context_use, passkey = part.get("context_use", False), part.get("passkey", False)
        if passkey and {"stride", "split", "context_use"} & part.keys():
            raise ValueError(f"an evaluation of passkeys has lengths and an override alone; got {dict(part)}")
        override = _override(part.get("override", {}), config)
        evaluations += [Evaluation(tuple(lengths), one, split, context_use, passkey, override) for one in strides]
    if not evaluations:
        raise ValueError("nothing to evaluate; add for example 'multiples': [1, 2, 4] to the sweep")
    return tuple(evaluations)


def _override(given: Mapping[str, Any], config: Config) -> Override | None:
    """What differs from the run's own `config`; ValueError where its parameters don't suffice for it."""
    _check_keys(given, ("position", "options", "window"), "an override")
    if not given:
        return None
    from alibi.runs.overrides import effective, overridden

    options = tuple(given.get("options", {}).items())
    override = effective(Override(given.get("position"), options, given.get("window")), config)
    overridden(config, override)
    return override


def _check_run(config: Config, evaluations: Sequence[Evaluation]) -> None:
    """Raises ValueError for what the model, its training or its evaluation would refuse, hours later perhaps."""
    # Only here: these load JAX, which takes seconds. Nothing is computed, so no device is claimed.
    from alibi.data.pieces import SPLITS
    from alibi.evaluation.windows import plan
    from alibi.training.setup import check_trainable

    check_trainable(config)
    for one in evaluations:
        if one.passkey and config.data.tokenizer != "bytes":
            raise ValueError(f"data.tokenizer={config.data.tokenizer} with passkeys, which are told to byte models")
        if one.split not in SPLITS:
            raise ValueError(f"split {one.split!r} is unknown; use one of {', '.join(SPLITS)}")
        if not config.data[one.split]:
            raise ValueError(f"the config names no {one.split} text: data.{one.split} is empty; set it")
        if one.stride is not None and not isinstance(one.stride, int):
            raise ValueError(f"stride={one.stride!r} must be a whole number of tokens, or a list of them")
        for length in one.lengths:
            plan(1, length, one.stride)


def _check_keys(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in given:
        if key not in known:
            meant = nearest(key, known)
            raise ValueError(f"unknown key {key!r} in {what}; did you mean {meant!r}? There are: {', '.join(known)}")
