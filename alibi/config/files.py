"""Python files that a user gives: a config's get_config() and a sweep's get_sweep(); their mistakes are one line."""

import contextlib
import functools
import importlib.util
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import ml_collections

from alibi.config.ranges import check_numbers
from configs import base

_FILE = '''"""Every key of a config, as train.py --print_config wrote it: python train.py --config=FILE --workdir=DIR"""

import ml_collections

from configs import base

nan, inf = float("nan"), float("inf")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    config = base.get_config()
{keys}
    return base.apply(config, arg)
'''

CONFIGS = pathlib.Path(base.__file__).resolve().parent


def load_config(named: str) -> ml_collections.ConfigDict:
    """The config that `named`, FILE.py or FILE.py:KEY=VALUE,..., gives, with every key and no other.

    Raises:
      ValueError: a file that isn't there, doesn't load or gives no config, an unknown key
        (the nearest is suggested), a number outside its range.
    """
    file, _, argument = named.partition(":")
    if not os.path.isfile(file):
        raise ValueError(f"there is no config file {file!r}; did you mean {_nearest_config(file)}?")
    config = call(file, "get_config", "configs/quickstart.py", *([argument] if argument else []))
    if not isinstance(config, ml_collections.ConfigDict):
        given = "None; is its return missing?" if config is None else f"a {type(config).__name__}"
        raise ValueError(
            f"get_config() of {file} must return a ConfigDict, begun as base.get_config(), and gives {given}"
        )
    _check_keys(file, config)
    check_numbers(config)
    return config


def as_file(config: ml_collections.ConfigDict) -> str:
    """A config file that gives `config`: every key with its value, whatever the defaults become."""
    sections: dict[str, list[str]] = {}
    for key in base.leaf_keys(config):
        value = functools.reduce(lambda section, name: section[name], key.split("."), config)
        option = key.startswith("position_options.")
        line = f'base.set_key(config, "{key}", {value!r})' if option else f"config.{key} = {value!r}"
        sections.setdefault(key.rpartition(".")[0], []).append(f"    {line}\n")
    return _FILE.format(keys="\n".join("".join(lines) for lines in sections.values()))


def call(file: str | os.PathLike[str], function: str, example: str, *arguments: Any) -> Any:
    """What `function` of a Python file gives; the file `example` of the project has one.

    Raises:
      ValueError: no such file or function, or an error in it, with its line.
    """
    path = pathlib.Path(file)
    if not path.is_file():
        raise ValueError(f"{path} does not exist or is no file; give a Python file such as {example}")
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file; its name must end in .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with _mistakes_named(path, "does not load"):
        spec.loader.exec_module(module)
    if not hasattr(module, function):
        kind = function.removeprefix("get_")
        raise ValueError(f"{path} has no {function}(); a {kind} file defines one, as {example} does")
    with _mistakes_named(path, f"fails in {function}()", passing=ValueError):
        return getattr(module, function)(*arguments)


@contextlib.contextmanager
def _mistakes_named(path: pathlib.Path, what: str, passing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Errors inside become a ValueError that names the file's line; those that are `passing` say enough already."""
    try:
        yield
    except passing:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = "" if line is None else f" at line {line}"
        said = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        raise ValueError(f"{path} {what}: {type(error).__name__}{where}: {said}") from error


def _check_keys(file: str, config: ml_collections.ConfigDict) -> None:
    """Raises ValueError for keys that no config has, and for keys that this one lacks."""
    known, found = base.leaf_keys(base.get_config()), base.leaf_keys(config)
    for key in found:
        if key not in known and not key.startswith("position_options."):
            raise ValueError(f"get_config() of {file} sets an {base.unknown(key, known)}")
    if lacking := set(known).difference(found):
        some = ", ".join(sorted(lacking)[:3]) + (", ..." if len(lacking) > 3 else "")
        raise ValueError(f"get_config() of {file} lacks {some}; let it begin with base.get_config()")


def _nearest_config(file: str) -> str:
    """`file` with its ending if only that is missing, else the project's config of the nearest name."""
    if os.path.isfile(f"{file}.py"):
        return f"{file}.py"
    known = {path.stem: path for path in sorted(CONFIGS.glob("[!_]*.py"))}
    path = known[base.nearest(pathlib.PurePath(file).stem, known, cutoff=0.5) or "quickstart"]
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
