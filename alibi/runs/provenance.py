"""Provenance of a run: command, commit, versions and processor cores."""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys
from typing import Any

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

    Outside a checkout, as in an image, it is $ALIBI_COMMIT, or "unknown".
    """
    try:
        commit, changes = (
            subprocess.run(
                ["git", *words], cwd=_LIBRARY.parent, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
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
    """Returns a hash of each loaded file of the user's own, by its module: of neither Python, a
    package nor the library.
    """
    folders = (*map(os.path.realpath, (sys.prefix, sys.base_prefix)), _LIBRARY)
    others = tuple(f"{folder}{os.sep}" for folder in folders)
    hashes = {}
    for name, module in sys.modules.copy().items():
        file = os.path.realpath(getattr(module, "__dict__", {}).get("__file__") or os.devnull)
        # multiprocessing's second name of __main__, once it is loaded
        second = name == "__mp_main__"
        if not second and os.path.isfile(file) and not file.startswith(others):
            content = pathlib.Path(file).read_bytes()
            hashes[f"own file {name}"] = hashlib.sha256(content).hexdigest()[:12]
    return hashes


def method_files(position: str) -> dict[str, str]:
    """Returns the hashes of `own_files` that define the position methods of a config."""
    from alibi.positions import method_class, method_names  # not to read a run's files alone

    methods = [method_class(name) for name in method_names(position)]
    modules = {f"own file {kind.__module__}" for method in methods for kind in method.__mro__}
    return {name: hashed for name, hashed in own_files().items() if name in modules}


def jax_settings() -> dict[str, Any]:
    """Returns the values of `SETTINGS` in this process."""
    import jax  # not to read a run's files alone

    return {name: getattr(jax.config, name) for name in SETTINGS}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages by which a run computes."""
    return {package: importlib.metadata.version(package) for package in PACKAGES} | {
        "python": sys.version.split()[0]
    }


def make_provenance(**more: Any) -> dict[str, Any]:
    """Returns command, commit, versions and CPU cores; `more` adds devices, corpus, parameters."""
    made_by = {
        "command": sys.argv,
        "commit": git_commit(),
        "code": code_hash(),
        "versions": versions(),
        "jax": jax_settings(),
    }
    return {**made_by, "cores": usable_cores(), **more}


def usable_cores() -> int:
    """Returns the number of processor cores of this process; all cores on macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
