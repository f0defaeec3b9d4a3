"""Identity of a run: the config keys that define it, and their hash."""

import hashlib
import json
import os
from typing import Any

import ml_collections

from alibi.storage.files import is_address

# Keys, and sections with a dot, that say how a run is computed and watched, not what it computes.
MAY_DIFFER = ("mesh.", "eval.", "checkpoint.", "log.", "data.cache_dir", "model.attention", "model.remat",
              "model.scan_layers", "model.products", "model.logits_chunk", "train.max_device_tokens")  # fmt: skip


def may_differ(key: str) -> bool:
    """Returns whether a run may go on with another value of this config key, since its numbers don't depend on it."""
    return any(key == known or (known.endswith(".") and key.startswith(known)) for known in MAY_DIFFER)


def config_hash(config: ml_collections.ConfigDict) -> str:
    """Returns twelve hex digits, equal for configs that differ only in keys that `may_differ`."""
    return hashlib.sha256(json.dumps(defining(config), sort_keys=True).encode()).hexdigest()[:12]


def evaluation_hash(config: ml_collections.ConfigDict) -> str:
    """Returns `config_hash`, and eval.dtype after it if it is not model.dtype: rows of both are not comparable."""
    own = config.eval.dtype == config.model.dtype
    return config_hash(config) + ("" if own else f"-{config.eval.dtype}")


def defining(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the leaves that define a run, by dotted key."""
    leaves = {key: value for key, value in flatten(config).items() if not may_differ(key)}
    leaves["data.tokenizer_file"] = ""  # the tokenizer itself is compared by `RunDirectory.claim`
    if leaves.get("init_from") and not is_address(leaves["init_from"]):
        leaves["init_from"] = os.path.abspath(os.path.expanduser(leaves["init_from"]))
    return leaves


def flatten(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the leaves of a config by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            leaves.update({f"{key}.{inner}": leaf for inner, leaf in flatten(value).items()})
        else:
            leaves[key] = list(value) if isinstance(value, tuple) else value
    return leaves
