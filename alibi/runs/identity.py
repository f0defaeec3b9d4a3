"""The identity of a run: two configs are of the same run if they differ only in how it is computed
and watched.
"""

import hashlib
import json
import os
from typing import Any

from alibi.config import Config, flatten
from alibi.data.corpus import SPLITS
from alibi.data.textfiles import TextFiles
from alibi.runs.former import hashed
from alibi.storage.files import is_address

# Keys, and sections with a dot: they decide how a run is computed and watched, not its results.
MAY_DIFFER = ("mesh.", "eval.", "checkpoint.", "log.", "data.cache_dir", "model.attention", "model.remat",
              "model.scan_layers", "model.products", "model.logits_chunk", "train.max_device_tokens")  # fmt: skip
# Keys whose default is left out of the hash: a new key changes no hash.
HASHED_IF_SET = ("imported_from", "init_from", "model.window", "model.skip_epsilon", "model.logit_scale",
                 "model.max_position", "model.normalizer", "model.logit_cap", "model.qk_norm",
                 "model.attention_gate", "model.head_size", "model.num_kv_heads", "model.gated",
                 "model.parallel", "model.norm", "model.embedding_norm", "model.qkv_bias", "model.out_bias",
                 "model.feed_forward_bias", "model.embedding_scale", "model.logits_scale", "model.vocab_rows",
                 "model.param_dtype", "model.qk_norm_joint", "model.clip_qkv", "model.attention_scale",
                 "data.document_end", "data.tokenizer_train_bytes",
                 "data.passkey_distance", "data.isolate_documents", "objective.name",
                 "objective.mask_rate", "objective.mask_random", "objective.mask_kept")  # fmt: skip
_DEFAULTS = flatten(Config())


def may_differ(key: str) -> bool:
    """Returns whether a run may go on with another value of this config key."""
    return any(
        key == known or (known.endswith(".") and key.startswith(known)) for known in MAY_DIFFER
    )


def config_hash(config: Config) -> str:
    """Returns twelve hex digits, equal for configs of the same run."""
    leaves = {
        key: value
        for key, value in hashed(config.position, defining(config)).items()
        if key not in HASHED_IF_SET or value != _DEFAULTS[key]
    }
    return hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()[:12]


def evaluation_hash(config: Config) -> str:
    """Returns `config_hash`, followed by eval.dtype if the run was trained with another dtype."""
    own = config.eval.dtype == config.model.dtype
    return config_hash(config) + ("" if own else f"-{config.eval.dtype}")


def differing(trained: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the keys by which a run can't go on with the config `now`, each with both values.

    Text files may have another place, since the run compares their tokens. Accumulation may differ
    without dropout, and `train.steps` may grow under a schedule that doesn't end with the run.
    """
    old, new = defining(trained), defining(now)
    allowed = set()
    if trained.data.corpus == now.data.corpus == "text":
        allowed |= {f"data.{split}" for split in SPLITS if trained.data[split] and now.data[split]}
    if not any(value for key, value in new.items() if key.endswith("dropout")):
        allowed.add("train.accumulation")
    if trained.optimizer.schedule != "cosine" and now.train.steps > trained.train.steps:
        allowed.add("train.steps")
    keys = sorted((old.keys() | new.keys()) - allowed)
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def defining(config: Config) -> dict[str, Any]:
    """Returns the values of all keys with an effect on a run's results, by dotted key.

    Text files have their names alone: rows of one text must agree wherever it lies. Rows tell
    another text of the same names by `Row.trained_on` and `Row.tokens_sha256`.
    """
    leaves = {key: value for key, value in flatten(config).items() if not may_differ(key)}
    if config.data.corpus == "text":
        text = TextFiles(config.data)
        leaves |= {f"data.{split}": text.title(split) for split in SPLITS}
    # its place may change; `RunDirectory.claim` compares its content
    leaves["data.tokenizer_file"] = ""
    if leaves["init_from"] and not is_address(leaves["init_from"]):
        leaves["init_from"] = os.path.abspath(os.path.expanduser(leaves["init_from"]))
    return leaves
