"""Python files of users: get_config() of a config and get_sweep() of a sweep. Their errors take one
line.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from alibi.config.fields import nearest
from alibi.config.tree import Config, check_key, flatten, read_value, replaced
from alibi.errors import is_watched
from alibi.extras import needs

if TYPE_CHECKING:
    import ml_collections

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"  # of a clone of the project

_FILE = '''"""Every key of a config, as train.py --print_config wrote it: python train.py --config=FILE --workdir=DIR"""

import ml_collections

from alibi.config import base


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = base.get_config()
{keys}
    return base.apply(config, arg)
'''


def load_config(named: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the config of `named`, FILE.py or FILE.py:KEY=VALUE,..., with the values of
    `overrides` by key.

    A warm-up of the file that is longer than the given `train.steps` becomes a tenth of them, and
    a line says so.

    Raises:
      ValueError: a file that is missing, fails or returns no config; an unknown key or a refused
        value.
    """
    ((file, argument),) = re.findall(r"(?s)\A(.+?\.py|[^:]*)(?::(.*))?\Z", named)
    if not os.path.isfile(file):
        known = [path.stem for path in sorted(CONFIGS.glob("[!_]*.py"))]
        meant = nearest(pathlib.PurePath(file).stem, known)
        if not known:  # outside of a clone
            raise ValueError(
                f"there is no config file {file!r}; give the path of one, which changes keys of "
                "alibi.config.base.get_config() and returns it"
            )
        raise ValueError(
            f"there is no config file {file!r}; "
            + (f"did you mean configs/{meant}.py?" if meant else f"configs/ has {', '.join(known)}")
        )
    config = call(file, "get_config", "configs/quickstart.py", *([argument] if argument else []))
    if not hasattr(config, "to_dict"):  # as a ConfigDict has, which is not imported here
        given = "None; is its return missing?" if config is None else f"a {type(config).__name__}"
        raise ValueError(
            f"get_config() of {file} must return base.get_config() with other values, and returns {given}"
        )
    for key, value in (overrides or {}).items():
        set_key(config, key, value)
    read = read_config(config)
    keys = {*re.findall(r"[\w.]+(?=\s*=)", argument), *(overrides or {})}
    before, steps = read.optimizer.warmup_steps, read.train.steps
    if "train.steps" in keys and "optimizer.warmup_steps" not in keys and before >= steps:
        read = replaced(read, {"optimizer.warmup_steps": steps // 10})
        told = f"optimizer.warmup_steps is {steps // 10} in place of {before}, to fit train.steps={steps}"
        if not is_watched():  # the sweep has said so
            print(told, file=sys.stderr)
    return read


def read_config(given: Mapping[str, Any] | ml_collections.ConfigDict) -> Config:
    """Returns the config of nested mappings, such as a ConfigDict or a config.json of this version;
    absent keys have their defaults.

    Raises:
      ValueError: an unknown key (the nearest is suggested), or a value of another type or out of
        its range.
    """
    content = given if isinstance(given, Mapping) else given.to_dict()
    keys = {key: value for key, value in content.items() if key != "sha256"}
    return replaced(Config(), flatten(keys))


def make_config(arg: str = "", **changes: Any) -> Config:
    """Returns the default config with "KEY=VALUE,..." applied, then `changes` by key, with __ for
    each dot.
    """
    return replaced(
        Config(),
        _assignments(arg) | {key.replace("__", "."): value for key, value in changes.items()},
    )


def as_config_dict(config: Config) -> ml_collections.ConfigDict:
    """Returns `config` as a config file changes it: by attribute, and with references between keys."""
    needs("a config file", "ml_collections")
    import ml_collections

    # Types are checked when the config is read: a key may hold a value or a list.
    return ml_collections.ConfigDict(dataclasses.asdict(config), type_safe=False)


def apply(config: ml_collections.ConfigDict, arg: str) -> ml_collections.ConfigDict:
    """Applies "KEY=VALUE,KEY=VALUE" to `config` and returns it; keys are dotted or short names.

    If a config file derives a value from a key by `config.get_ref(key)`, the value follows the key.

    Raises:
      ValueError: a part without "=", an unknown key (the nearest is suggested) or a value of
        another type.
    """
    for key, text in _assignments(arg).items():
        set_key(config, key, text)
    return config


def set_key(config: ml_collections.ConfigDict, key: str, value: object) -> None:
    """Sets a key, dotted or a short name, to a value or to the value of a text."""
    key = check_key(key)
    section, _, name = key.rpartition(".")
    value = read_value(key, value)
    if section == "position_options":
        with config.unlocked(), config.ignore_type():
            config.position_options[name] = value
    else:
        (config[section] if section else config)[name] = value


def whole_sequences(
    tokens: int, config: ml_collections.ConfigDict
) -> ml_collections.FieldReference:
    """Returns the largest multiple of config.train_length up to `tokens`, at least
    config.train_length itself.
    """
    length = config.get_ref("train_length")
    sequences = tokens // length
    return (sequences + 1 // (sequences + 1)) * length  # references know no max(sequences, 1)


def as_file(config: Config) -> str:
    """Returns the text of a config file with every key of `config`."""
    lines = []
    for key, value in flatten(config).items():
        value = tuple(value) if isinstance(value, list) else value
        option = key.startswith("position_options.")
        lines.append(
            f'    base.set_key(config, "{key}", {value!r})'
            if option
            else f"    config.{key} = {value!r}"
        )
    return _FILE.format(keys="\n".join(lines))


def call(file: str | os.PathLike[str], function: str, example: str, *arguments: Any) -> Any:
    """Returns the result of `function` of a Python file; `example` names a file of the project with
    such a function.

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
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        line, reason = (
            (error.lineno, error.msg)
            if isinstance(error, SyntaxError)
            else ((lines or [1])[-1], error)
        )
        if isinstance(error, ModuleNotFoundError) and error.name == "configs":
            reason = f"{reason}; write from alibi.config import base, or start it in a clone"
        raise ValueError(
            f"{path} fails at line {line}: {type(error).__name__}: {reason}"
        ) from error


def _assignments(arg: str) -> dict[str, Any]:
    """Returns the values of "KEY=VALUE,KEY=VALUE" as text, by key."""
    given = {}
    # a comma in position=rotary,none separates no keys
    for part in filter(None, map(str.strip, re.split(r",(?=\s*[\w.]+\s*=)", arg))):
        key, separator, text = part.partition("=")
        given[key] = text
        if not separator:
            raise ValueError(
                f"config argument {part!r} is not KEY=VALUE; write for example position=alibi,length=512"
            )
    return given
