"""Which config keys make a run what it is: two configs that differ only in the others are of the same run."""

import hashlib
import json
import os
from typing import Any

import ml_collections

from alibi.storage.atomic import is_address

# Keys, and sections with a dot, that say how a run is computed and watched, not what it computes.
MAY_DIFFER = ("mesh.", "eval.", "checkpoint.", "log.", "data.cache_dir", "model.attention", "model.remat",
              "model.scan_layers", "model.products", "model.logits_chunk", "train.max_device_tokens")  # fmt: skip
# Keys that are younger than some runs, and the value that says what these computed without them; of eval.dtype,
# what evaluations of any run now take.
YOUNGER = {"imported_from": "", "init_from": "", "model.window": 0, "model.skip_epsilon": 0.0, "eval.dtype": "float32",
           "data.document_end": "file", "data.tokenizer_train_bytes": -1, "data.passkey_distance": 0,
           "model.scan_layers": False, "model.products": "auto",
           "log.wandb": False, "log.trackio": False, "log.project": ""}  # fmt: skip


def completed(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """A copy of `config`, in which keys that are younger than it have the value that it was computed with."""
    config = config.copy_and_resolve_references()
    known = flatten(config)
    with config.unlocked():
        config.update_from_flattened_dict({key: value for key, value in YOUNGER.items() if key not in known})
    return config


def may_differ(key: str) -> bool:
    """Whether a run may go on with another value of this config key: it says how the run is computed, not what."""
    return any(key == known or (known.endswith(".") and key.startswith(known)) for known in MAY_DIFFER)


def config_hash(config: ml_collections.ConfigDict) -> str:
    """Twelve hex digits that are the same for configs of the same run: those that differ only where they may."""
    return hashlib.sha256(json.dumps(defining(config), sort_keys=True).encode()).hexdigest()[:12]


def evaluation_hash(config: ml_collections.ConfigDict) -> str:
    """`config_hash`, and after it eval.dtype where that is not the run's own: their rows are no measurements alike."""
    own = config.eval.dtype == config.model.dtype
    return config_hash(config) + ("" if own else f"-{config.eval.dtype}")


def defining(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The leaves that say what a run computes, by dotted key."""
    leaves = {key: value for key, value in flatten(config).items() if not may_differ(key)}
    if "data.tokenizer_file" in leaves:
        leaves["data.tokenizer_file"] = ""  # where it lies; `RunDirectory.claim` compares what it holds
    if leaves.get("init_from") and not is_address(leaves["init_from"]):
        leaves["init_from"] = os.path.abspath(os.path.expanduser(leaves["init_from"]))  # from wherever it was named
    return {key: value for key, value in leaves.items() if key not in YOUNGER or value != YOUNGER[key]}


def flatten(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The leaves of a config by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            leaves.update({f"{key}.{inner}": leaf for inner, leaf in flatten(value).items()})
        else:
            leaves[key] = list(value) if isinstance(value, tuple) else value
    return leaves
