"""Provenance of a run: command, commit, versions and processor."""

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Collection
from typing import Any

from etils import epath

from alibi.config import flatten
from alibi.errors import masked
from alibi.storage.cache import file_sha256
from alibi.storage.files import SHA256, digest

ABOUT = "about"  # the JSON item of a checkpoint
STEP, TOKENIZER = "step", "tokenizer_fingerprint"  # its keys for the update, and of an import
COMMIT = "ALIBI_COMMIT"  # in the environment: the commit of code outside of a checkout
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "datasets",
    "tokenizers",
    "numpy",
)
# Settings of JAX with which the same program computes other numbers; those of SEEDED change the
# initial parameters and dropout.
SEEDED = "jax_default_prng_impl", "jax_threefry_partitionable"
SETTINGS = (*SEEDED, "jax_enable_x64", "jax_default_matmul_precision")
_LIBRARY = pathlib.Path(__file__).resolve().parents[1]


@functools.cache
def git_commit() -> str:
    """Returns the commit of this code, with "-dirty" if tracked files differ from it.

    Outside a checkout of it, as in an image or a package, it is $ALIBI_COMMIT, or "unknown".
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
    """Returns twelve hex digits of the SHA-256 of the library's files, which also changes without a
    commit.
    """
    hashed = hashlib.sha256()
    for file in sorted(_LIBRARY.rglob("*.py")):
        hashed.update(str(file.relative_to(_LIBRARY)).encode() + file.read_bytes())
    return hashed.hexdigest()[:12]


def own_files() -> dict[str, str]:
    """Returns a hash of each loaded file of the user's own, by its module: of neither Python, an
    installed package nor the library.
    """
    hashes = {}
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__dict__", {}).get("__file__") or ""
        # __mp_main__: multiprocessing's second name of __main__, once it is loaded
        if name != "__mp_main__" and _is_own(name, file):
            hashes[f"own file {name}"] = file_sha256(file)[:12]
    return hashes


def _is_own(name: str, file: str, packages: Collection[str] = ()) -> bool:
    """Returns whether a module is the user's own, or of the installed `packages`."""
    package, python = name.partition(".")[0], os.path.dirname(os.__file__) + os.sep
    installed = file.startswith(python) or {"site-packages", "dist-packages"} & {
        *file.split(os.sep)
    }
    return package != "alibi" and (package in packages or not installed) and os.path.isfile(file)


def method_files(position: str) -> dict[str, str]:
    """Returns the `code_files` of the position methods of a config."""
    from alibi.positions import method_class, method_names  # not to read a run's files alone

    return code_files(*(method_class(name).__module__ for name in method_names(position)))


def code_files(*modules: str) -> dict[str, str]:
    """Returns a hash of each file that the code of loaded `modules` consists of, without the
    library's.

    These are the files of the modules, and the user's own files, or those of the modules' packages,
    that such a file imports anywhere in its code, and the files that its strings name. None is
    loaded for this, so the result does not depend on which are.
    """
    packages, found = {name.partition(".")[0] for name in modules}, dict[str, str]()
    left = [(name, _source(name)) for name in modules]
    while left:
        name, file = left.pop()
        if (key := f"own file {name}") not in found and _is_own(name, file, packages):
            found[key] = file_sha256(file)[:12]
            left += _mentioned(name, pathlib.Path(file))
    return found


def _source(name: str) -> str:
    """Returns the file of a module, without loading it; "" without a file."""
    top, *parts = name.split(".")
    with contextlib.suppress(ImportError, ValueError):  # a loaded module may have no spec
        spec = importlib.util.find_spec(top)
        for part in parts:
            folders = (spec and spec.submodule_search_locations) or []
            spec = importlib.machinery.PathFinder.find_spec(part, folders)
        return (spec and spec.origin) or ""
    return getattr(sys.modules.get(name), "__file__", None) or ""


def _mentioned(name: str, file: pathlib.Path) -> list[tuple[str, str]]:
    """Returns name and place of the package above a module, of the modules and attributes that its
    file imports, and of files that its strings name.
    """
    above, strings, nodes = name.rpartition(".")[0], list[str](), list[ast.AST]()
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
            given = [str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant)]
            modules += [start + value for value in given for start in ("", ".".join(parts))]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
    beside = [(f"{name}'s {value}", str(file.parent / value)) for value in strings]
    return beside + [(module, _source(module)) for module in modules]


def facts(about: dict[str, Any]) -> dict[str, Any]:
    """Returns what a run's record says of its text, tokenizer, position method and parent."""
    corpus = about.get("corpus", {})
    tokenizer = corpus.get("train", {}).get("tokenizer_fingerprint")
    return {
        **{f"the SHA-256 of the {split} text": corpus[split].get("sha256") for split in corpus},
        **about.get("method_files", {}),
        TOKENIZER: about.get(TOKENIZER, tokenizer),  # imported runs have no corpus
        "parent": about.get("parent"),
    }


def changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the facts that two records tell otherwise, each with both values; a file of a position
    method also if one of them does not know it.
    """
    pairs = {
        key: (facts(before).get(key), facts(now).get(key)) for key in facts(before) | facts(now)
    }
    return {
        key: (old, new)
        for key, (old, new) in sorted(pairs.items())
        if old != new and (key.startswith("own file") or None not in (old, new))
    }


def jax_settings() -> dict[str, Any]:
    """Returns the values of `SETTINGS` in this process."""
    import jax  # not to read a run's files alone

    return {name: getattr(jax.config, name) for name in SETTINGS}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages by which a run computes."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {"python": sys.version.split()[0]}


def process_facts(given: Any) -> dict[str, Any]:
    """Returns the facts in which all processes of a command must be alike, for `hosts.check_alike`:
    the keys `given` (a config, options or a mapping), code, versions, settings of JAX and the user's
    own files.
    """
    keys = {key: value for key, value in flatten(given).items() if key != "data.cache_dir"}
    return {**keys, "code": code_hash(), **versions(), **jax_settings(), **own_files()}


def read_about(checkpoint: epath.Path) -> dict[str, Any]:
    """Returns config, provenance, validation NLL and checksums of a checkpoint, see
    `Checkpoints.save`; one process may read alone, which Orbax's manager does not allow.

    Raises:
      ValueError: it is damaged.
      OSError: it can't be read.
    """
    content = json.loads((checkpoint / ABOUT / "metadata").read_bytes())  # Orbax's name
    if not isinstance(content, dict) or content.pop(SHA256, None) != digest(content):
        raise ValueError(f"{checkpoint}'s {ABOUT} differs from the saved one")
    return content


def make_provenance(**more: Any) -> dict[str, Any]:
    """Returns command, commit, versions, processor and its cores; `more` adds devices, corpus,
    parameters.
    """
    made_by = {
        "command": list(map(masked, sys.argv)),
        "commit": git_commit(),
        "code": code_hash(),
        "versions": versions(),
        "jax": jax_settings(),
    }
    return {**made_by, "processor": processor(), "cores": usable_cores(), **more}


def usable_cores() -> int:
    """Returns the number of processor cores of this process; all cores on macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def processor() -> str:
    """Returns the model name of this host's CPU, or its architecture where the system tells no name."""
    with contextlib.suppress(OSError):
        cpus = pathlib.Path("/proc/cpuinfo").read_text()
        if named := re.search(r"model name\s*: (.*)", cpus):  # none on most ARM CPUs
            return named[1]
    return platform.processor() or platform.machine()
