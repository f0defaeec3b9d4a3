"""The code of a run: the library's commit and hash, and the user's own files."""

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Collection

from alibi.config import Config
from alibi.storage.cache import file_sha256

COMMIT = "ALIBI_COMMIT"  # in the environment: the commit of code outside of a checkout
_LIBRARY = pathlib.Path(__file__).resolve().parents[1]


@functools.cache
def git_commit() -> str:
    """Returns this code's commit, with "-dirty" if tracked files differ.

    Outside a checkout, as in an image or a package, it is $ALIBI_COMMIT, or "unknown".
    """
    try:
        _, commit, changes = (
            subprocess.run(
                ["git", *words], cwd=_LIBRARY.parent, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (
                ["ls-files", "--error-unmatch", __file__],  # not a checkout around the package
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get(COMMIT) or "unknown"
    return commit + ("-dirty" if changes else "")


@functools.cache
def code_hash() -> str:
    """Returns twelve hex digits of a SHA-256 over the library's files."""
    hashed = hashlib.sha256()
    for file in sorted(_LIBRARY.rglob("*.py")):
        hashed.update(str(file.relative_to(_LIBRARY)).encode() + file.read_bytes())
    return hashed.hexdigest()[:12]


def own_files() -> dict[str, str]:
    """Returns a hash for each loaded file that is neither Python's, an installed package's nor the
    library's.
    """
    files = {
        name: getattr(module, "__dict__", {}).get("__file__") or ""
        for name, module in sys.modules.copy().items()
        if name != "__mp_main__"  # multiprocessing's second name of __main__
    }
    return {
        f"own file {name}": _file_hash(file) for name, file in files.items() if _is_own(name, file)
    }


def _file_hash(file: str) -> str:
    status = os.stat(file)
    return _hash_of(file, status.st_mtime_ns, status.st_size)


@functools.cache  # a start asks a dozen times, and a method may read a large table
def _hash_of(file: str, *unchanged: int) -> str:
    return file_sha256(file)[:12]


def _is_own(name: str, file: str, packages: Collection[str] = ()) -> bool:
    """Returns whether a module is the user's own, or of the installed `packages`."""
    package, python = name.partition(".")[0], os.path.dirname(os.__file__) + os.sep
    installed = file.startswith(python) or {"site-packages", "dist-packages"} & {
        *file.split(os.sep)
    }
    return package != "alibi" and (package in packages or not installed) and os.path.isfile(file)


def method_files(config: Config, positions: str = "", *, training: bool = True) -> dict[str, str]:
    """Returns the `code_files` of a config's position methods (or of those in `positions`) and objective, and
    with `training` also of its optimizer and schedule. (Its tokens identify a corpus.)
    """
    from alibi.objectives import REGISTRY  # not to read a run's files alone
    from alibi.positions import method_class, method_names

    modules = [
        method_class(name).__module__ for name in method_names(positions or config.positions)
    ]
    addresses = [REGISTRY.address(config.objective.name)]
    if training:
        from alibi.optimizers import OPTIMIZER_NAMES, SCHEDULE_NAMES

        addresses.append(OPTIMIZER_NAMES.address(config.optimizer.name))
        addresses.append(SCHEDULE_NAMES.address(config.optimizer.schedule))
    return code_files(*modules, *(address.partition(":")[0] for address in addresses))


def code_files(*modules: str) -> dict[str, str]:
    """Returns a hash for each file that `modules` consist of, without the library's.

    That is their own files, files that these import anywhere (the user's, or in the modules'
    packages), and files in their folders that strings in them name. Nothing is loaded.
    """
    packages, hashes = {name.partition(".")[0] for name in modules}, dict[str, str]()
    left, seen = [(name, _source(name)) for name in modules], set[str]()
    while left:
        name, file = left.pop()
        if _is_own(name, file, packages) and (path := os.path.realpath(file)) not in seen:
            seen.add(path)  # files may name each other
            hashes[f"own file {name}"] = _file_hash(file)
            left += _mentioned(name, pathlib.Path(file))
    return hashes


def _source(name: str) -> str:
    """Returns the file of a module, without loading it, or "" without a file."""
    top, *parts = name.split(".")
    with contextlib.suppress(ImportError, ValueError):  # a loaded module may have no spec
        spec = importlib.util.find_spec(top)
        for part in parts:
            folders = (spec and spec.submodule_search_locations) or []
            spec = importlib.machinery.PathFinder.find_spec(part, folders)
        return (spec and spec.origin) or ""
    return getattr(sys.modules.get(name), "__file__", None) or ""


def _mentioned(name: str, file: pathlib.Path) -> list[tuple[str, str]]:
    """Returns names and files that a module's file may use: the package above, imported modules and
    attributes, and files in its folder that strings name.
    """
    above, nodes, strings = name.rpartition(".")[0], list[ast.AST](), list[str]()
    modules, parts = [above], (name if file.stem == "__init__" else above).split(".")
    with contextlib.suppress(SyntaxError, ValueError):  # no Python, or never loaded
        nodes += ast.walk(ast.parse(file.read_bytes() if file.suffix == ".py" else b""))
    for node in nodes:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            around = parts[: len(parts) - node.level + 1 if node.level else 0]
            base = ".".join(filter(None, [*around, node.module]))
            modules += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and re.search(
            r"import_module$|__import__$", ast.unparse(node.func)
        ):
            named = [str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant)]
            modules += [start + value for value in named for start in ("", ".".join(parts))]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)  # no module: "train" is seldom train.py
    # not /proc/cpuinfo, nor a large text elsewhere
    inside = [text for text in strings if not {"..", "/"} & {*pathlib.PurePath(text).parts}]
    beside = [(f"{name}'s {text}", str(file.parent / text)) for text in inside]
    return beside + [(module, _source(module)) for module in modules]
