"""A run: work directory, identity, provenance and checkpoints."""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])

from alibi.runs.code import code_hash, git_commit, method_files
from alibi.runs.directory import RunDirectory
from alibi.runs.identity import config_hash, evaluation_hash
from alibi.runs.provenance import (
    jax_settings,
    make_provenance,
    process_facts,
    processor,
    usable_cores,
    versions,
)

__all__ = [
    "RunDirectory",
    "code_hash",
    "config_hash",
    "evaluation_hash",
    "git_commit",
    "jax_settings",
    "make_provenance",
    "method_files",
    "process_facts",
    "processor",
    "usable_cores",
    "versions",
]
