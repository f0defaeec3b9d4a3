"""Trained runs: work directory, identity and provenance; `alibi.runs.trained` loads a run for use."""

from alibi.extras import EXTRAS, needs

needs(__name__, *EXTRAS["train"])

from alibi.runs.directory import RunDirectory
from alibi.runs.identity import config_hash, evaluation_hash, may_differ
from alibi.runs.provenance import (
    code_hash,
    git_commit,
    jax_settings,
    make_provenance,
    method_files,
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
    "may_differ",
    "method_files",
    "process_facts",
    "processor",
    "usable_cores",
    "versions",
]
