"""Provenance of a run: command, commit, versions and processor."""

import contextlib
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import sys
from typing import Any

from etils import epath

from alibi.config import flatten
from alibi.errors import masked
from alibi.runs.code import code_hash, git_commit, own_files
from alibi.storage.files import SHA256, digest

ABOUT = "about"  # the JSON item of a checkpoint
STEP, TOKENIZER = "step", "tokenizer_fingerprint"  # its keys for the update, and of an import
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


def facts(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the text, tokenizer and position method of a run's record."""
    corpus = record.get("corpus", {})
    tokenizer = corpus.get("train", {}).get("tokenizer_fingerprint")
    return {
        **{f"the SHA-256 of the {split} text": corpus[split].get("sha256") for split in corpus},
        **record.get("method_files", {}),
        TOKENIZER: record.get(TOKENIZER, tokenizer),  # imported runs have no corpus
    }


def changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the facts that differ between two records, each with both values. A file of a position
    method also counts if only one record has it.
    """
    theirs, ours = facts(before), facts(now)
    return {
        key: (theirs.get(key), ours.get(key))
        for key in sorted(theirs | ours)
        if theirs.get(key) != ours.get(key)
        and (key.startswith("own file") or None not in (theirs.get(key), ours.get(key)))
    }


def jax_settings() -> dict[str, Any]:
    """Returns the values of `SETTINGS` in this process."""
    import jax  # not to read a run's files alone

    return {name: getattr(jax.config, name) for name in SETTINGS}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of packages that a run computes with."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return installed | {"python": sys.version.split()[0]}


def process_facts(options: Any) -> dict[str, Any]:
    """Returns the facts that must be equal on all processes of a command, for `hosts.check_alike`:
    `options` (a config, a dataclass or a mapping), code, versions, JAX's settings, own files.
    """
    keys = {key: value for key, value in flatten(options).items() if key != "data.cache_dir"}
    return {**keys, "code": code_hash(), **versions(), **jax_settings(), **own_files()}


def read_about(checkpoint: epath.Path) -> dict[str, Any]:
    """Returns the JSON part of a checkpoint: config, provenance, validation NLL and checksums.

    Orbax's manager must be called on all processes, this on any.

    Raises:
      ValueError: it is damaged.
      OSError: it can't be read.
    """
    content = json.loads((checkpoint / ABOUT / "metadata").read_bytes())  # Orbax's name
    if not isinstance(content, dict) or content.pop(SHA256, None) != digest(content):
        raise ValueError(f"{checkpoint}'s {ABOUT} differs from the saved one")
    return content


def make_provenance(**more: Any) -> dict[str, Any]:
    """Returns command, commit, versions, processor and cores, and `more`."""
    return {
        "command": list(map(masked, sys.argv)),
        "commit": git_commit(),
        "code": code_hash(),
        "versions": versions(),
        "jax": jax_settings(),
        "processor": processor(),
        "cores": usable_cores(),
        **more,
    }


def usable_cores() -> int:
    """Returns how many processor cores this process may use, all on macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def processor() -> str:
    """Returns this host's CPU model, or its architecture where the system names no model."""
    with contextlib.suppress(OSError):
        cpus = pathlib.Path("/proc/cpuinfo").read_text()
        if named := re.search(r"model name\s*: (.*)", cpus):  # none on most ARM CPUs
            return named[1]
    return platform.processor() or platform.machine()
