"""Provenance of a run: command, commit, versions and processor."""

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import types
from typing import Any

from etils import epath

from alibi.config import flatten
from alibi.errors import masked
from alibi.storage.files import SHA256, digest

ABOUT = "about"  # the JSON item of a checkpoint
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
    python, hashes = os.path.dirname(os.__file__) + os.sep, {}
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__dict__", {}).get("__file__") or ""
        installed = {"site-packages", "dist-packages"} & {*file.split(os.sep)}
        # __mp_main__: multiprocessing's second name of __main__, once it is loaded
        others = name.partition(".")[0] in ("alibi", "__mp_main__") or file.startswith(python)
        if not installed and not others and os.path.isfile(file):
            hashes[f"own file {name}"] = _file_hash(module)
    return hashes


def _file_hash(module: types.ModuleType) -> str:
    content = pathlib.Path(str(module.__file__)).read_bytes()
    return hashlib.sha256(content).hexdigest()[:12]


def method_files(position: str) -> dict[str, str]:
    """Returns the hashes of `own_files` that define the position methods of a config, or that these
    files import at their top level.
    """
    from alibi.positions import method_class, method_names  # not to read a run's files alone

    left = [method_class(name).__module__ for name in method_names(position)]
    own, found = own_files(), {}
    for module in left:  # of an installed package too
        if module.partition(".")[0] != "alibi":
            own[f"own file {module}"] = _file_hash(sys.modules[module])
    while left:
        module = left.pop()
        if (file := f"own file {module}") in own and file not in found:
            found[file] = own[file]
            left += _imports(sys.modules[module])
    return found


def _imports(module: types.ModuleType) -> list[str]:
    """Returns the names of modules, and of their attributes, that a file imports at its top level."""
    file, names = pathlib.Path(str(module.__file__)), []
    for node in ast.parse(file.read_bytes() if file.suffix == ".py" else b"").body:
        given = [alias.name for alias in getattr(node, "names", [])]
        if isinstance(node, ast.Import):
            names += given
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, module.__package__)
            names += [base, *(f"{base}.{name}" for name in given)]
    return names


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
    if content.pop(SHA256, None) != digest(content):
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
