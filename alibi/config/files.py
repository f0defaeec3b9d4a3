"""Users' Python files, with get_config() or get_sweep(). Their errors take one line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from alibi.config.fields import as_text, nearest
from alibi.config.tree import (
    OPTIONS,
    OVER_UPDATES,
    Config,
    check_key,
    flatten,
    read_over_updates,
    read_value,
    replaced,
)
from alibi.errors import is_watched
from alibi.extras import needs

if TYPE_CHECKING:
    import ml_collections

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"  # in a clone of the project

_FILE = '''"""Every key of a config, as train.py --print_config wrote it: python train.py --config=FILE --workdir=DIR"""

import ml_collections

from alibi.config import base


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = base.get_config()
{keys}
    return base.apply(config, arg)
'''


def load_config(named: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the config in FILE.py or FILE.py:KEY=VALUE,..., with `overrides` of keys.

    If the overrides set `train.steps` below the file's warm-up, the warm-up becomes a tenth of them,
    with a line.

    Raises:
      ValueError: a file that is missing, fails or returns no config, an unknown key, or a refused value.
    """
    ((file, argument),) = re.findall(r"(?s)\A(.+?\.py|[^:]*)(?::(.*))?\Z", named)
    if not os.path.isfile(file):
        there = [path.stem for path in sorted(CONFIGS.glob("[!_]*.py"))]
        remedy = f"configs/ has {', '.join(there)}"
        if not there:  # outside of a clone
            remedy = "give one, which changes keys of alibi.config.base.get_config() and returns it"
        elif meant := nearest(pathlib.PurePath(file).stem, there):
            remedy = f"did you mean configs/{meant}.py?"
        raise ValueError(f"there is no config file {file!r}; {remedy}")
    config = call(file, "get_config", "configs/quickstart.py", *([argument] if argument else []))
    if not hasattr(config, "to_dict"):  # as a ConfigDict has, which is not imported here
        returned = (
            "None; is its return missing?" if config is None else f"a {type(config).__name__}"
        )
        raise ValueError(
            f"get_config() of {file} must return base.get_config() with other values, and returns {returned}"
        )
    for key, value in (overrides or {}).items():
        set_key(config, key, value)
    loaded = read_config(config)
    keys = {*re.findall(r"[\w.]+(?=\s*=)", argument), *(overrides or {})}
    before, steps = loaded.optimizer.warmup_steps, loaded.train.steps
    if "train.steps" in keys and "optimizer.warmup_steps" not in keys and before >= steps:
        loaded = replaced(loaded, {"optimizer.warmup_steps": steps // 10})
        line = f"optimizer.warmup_steps is {steps // 10} in place of {before}, to fit train.steps={steps}"
        if not is_watched():  # the sweep has said so
            print(line, file=sys.stderr)
    return loaded


def read_config(keys: Mapping[str, Any] | ml_collections.ConfigDict) -> Config:
    """Returns the config from nested mappings, such as a ConfigDict or config.json's content. Absent
    keys have their defaults.

    Raises:
      ValueError: an unknown key (the nearest is suggested), or a refused value.
    """
    content = keys if isinstance(keys, Mapping) else keys.to_dict()
    config = replaced(
        Config(), flatten({key: value for key, value in content.items() if key != "sha256"})
    )
    for key, pairs in config.over_updates.items():
        if (value := functools.reduce(getattr, key.split("."), config)) != pairs[-1][1]:
            raise ValueError(
                f"{key}={value} was assigned after the list {as_text(pairs)}; set both by base.set_key(config, "
                f"{key!r}, VALUE), which replaces the list"
            )
    return config


def make_config(arg: str = "", **changes: Any) -> Config:
    """Returns the default config with "KEY=VALUE,..." and `changes`, with __ for dots in their keys."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return replaced(Config(), flatten(_assignments(arg) | dotted))


def as_config_dict(config: Config) -> ml_collections.ConfigDict:
    """Returns `config` for config files: keys are attributes, and may refer to others."""
    needs("a config file", "ml_collections")
    import ml_collections

    # Types are checked when the config is read: a key may hold a value or a list.
    return ml_collections.ConfigDict(dataclasses.asdict(config), type_safe=False)


def apply(config: ml_collections.ConfigDict, arg: str) -> ml_collections.ConfigDict:
    """Sets "KEY=VALUE,KEY=VALUE" (dotted or short names) in `config` and returns it.

    Values that a config file derives with `config.get_ref(key)` follow the key.

    Raises:
      ValueError: a part without "=", an unknown key (the nearest is suggested) or a refused value.
    """
    for key, text in _assignments(arg).items():
        set_key(config, key, text)
    return config


def set_key(config: ml_collections.ConfigDict, key: str, value: object) -> None:
    """Sets a key (dotted or a short name) to a value, to a list over updates, or to the value of a text."""
    key = check_key(key)
    section, _, name = key.rpartition(".")
    if key in OVER_UPDATES:  # what refers to the key refers to its last value
        pairs = read_over_updates(key, value)
        config.changes = *(one for one in config.changes if one[0] != key), *pairs
        value = pairs[-1][2] if pairs else value
    value = read_value(key, value)
    owner = functools.reduce(
        lambda inner, part: inner[part], filter(None, section.split(".")), config
    )
    with (
        config.unlocked() if section in OPTIONS else contextlib.nullcontext(),
        config.ignore_type(),
    ):
        owner[name] = value


def whole_sequences(
    tokens: int, config: ml_collections.ConfigDict
) -> ml_collections.FieldReference:
    """Returns the largest multiple of config.train_length up to `tokens`, at least one."""
    length = config.get_ref("train_length")
    sequences = tokens // length
    return (sequences + 1 // (sequences + 1)) * length  # references know no max(sequences, 1)


def as_file(config: Config) -> str:
    """Returns a config file's text with every key in `config`."""
    lines, over = [], config.over_updates
    for key, value in flatten(config).items():
        value = over.get(key, tuple(value) if isinstance(value, list) else value)
        option = key.rpartition(".")[0] in OPTIONS or key in over
        if key == "changes":
            continue
        lines.append(
            f'    base.set_key(config, "{key}", {value!r})'
            if option
            else f"    config.{key} = {value!r}"
        )
    return _FILE.format(keys="\n".join(lines))


def call(file: str | os.PathLike[str], function: str, example: str, *arguments: Any) -> Any:
    """Calls a function in a Python file and returns its result.

    Args:
      example: names a file of the project with such a function, for errors.

    Raises:
      ValueError: no such file or function, or an error in it, with its line.
    """
    path = pathlib.Path(file)
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist or is no file; give a Python file such as {example}"
        )
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file; its name must end in .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, function):
            raise ValueError(f"{path} has no {function}(); define it as {example} does")
        return getattr(module, function)(*arguments)
    except ValueError:
        raise  # its message names the cause
    except (Exception, SystemExit) as error:  # sys.exit() there would end the command with success
        frames = traceback.extract_tb(error.__traceback__)
        line = next((one.lineno for one in frames[::-1] if one.filename == str(path)), 1)
        reason: object = error
        if isinstance(error, SyntaxError):
            line, reason = error.lineno, error.msg
        elif isinstance(error, ModuleNotFoundError) and error.name == "configs":
            reason = f"{error}; write from alibi.config import base, or start it in a clone"
        raise ValueError(
            f"{path} fails at line {line}: {type(error).__name__}: {reason}"
        ) from error


def _assignments(arg: str) -> dict[str, Any]:
    """Returns the text of each key in "KEY=VALUE,KEY=VALUE"."""
    texts = {}
    # a comma in position=rotary,none separates no keys
    for assignment in filter(None, map(str.strip, re.split(r",(?=\s*[\w.]+\s*=)", arg))):
        key, separator, text = assignment.partition("=")
        texts[key] = text
        if not separator:
            raise ValueError(
                f"config argument {assignment!r} is not KEY=VALUE; write for example position=alibi,length=512"
            )
    return texts
