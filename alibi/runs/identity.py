"""The identity of a run: configs are of one run if they differ only in how it is computed and
watched.
"""

import os
from typing import Any

from alibi.config import Config, flatten
from alibi.config.fields import COMPUTED
from alibi.config.override import Override
from alibi.config.tree import role_of
from alibi.data.corpus import REGISTRY, SPLITS
from alibi.data.textfiles import TextFiles
from alibi.runs.code import method_files
from alibi.storage.files import digest, is_address

# The keys of the first hashes. Any other has a part in a hash only if it is set, so a new key
# changes no hash.
FIRST_KEYS = ("seed", "train_length", "position", "model.num_layers", "model.width", "model.num_heads",
              "model.feed_forward", "model.activation", "model.final_norm", "model.norm_epsilon",
              "model.initialization", "model.dropout", "model.attention_dropout", "model.activation_dropout",
              "model.embedding", "model.cutoffs", "model.adaptive_factor", "model.softmax_dropout",
              "model.padding_rows", "model.dtype", "data.corpus", "data.train", "data.valid", "data.test",
              "data.max_train_bytes", "data.max_valid_bytes", "data.name", "data.subset", "data.revision",
              "data.column", "data.streaming", "data.tokenizer", "data.tokenizer_file", "data.bpe_vocab_size",
              "train.steps", "train.batch_tokens", "train.accumulation", "optimizer.name",
              "optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.warmup_init",
              "optimizer.schedule", "optimizer.final_fraction", "optimizer.min_learning_rate",
              "optimizer.period_steps", "optimizer.period_mult", "optimizer.shrink", "optimizer.momentum",
              "optimizer.b1", "optimizer.b2", "optimizer.eps", "optimizer.weight_decay",
              "optimizer.clip_norm")  # fmt: skip
_DEFAULTS = flatten(Config())


def config_hash(config: Config) -> str:
    """Returns twelve hex digits, equal for configs of one run."""
    leaves = {
        key: value
        for key, value in defining(config).items()
        if key in FIRST_KEYS or key not in _DEFAULTS or value != _DEFAULTS[key]
    }
    return digest(leaves)[:12]


def evaluation_hash(config: Config, override: Override | None = None) -> str:
    """Returns `config_hash`, then eval.dtype if it differs from training's, and + with a hash of the
    files of the tested position method, and of the objective, that are not the library's.
    """
    same_dtype = config.eval.dtype == config.model.dtype
    dtype = "" if same_dtype else f"-{config.eval.dtype}"
    position = (override and override.position) or config.position
    files = method_files(config, position, training=False)
    return config_hash(config) + dtype + (f"+{digest(files)[:8]}" if files else "")


def differing(trained: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the keys that forbid a run to go on with the config `now`, each with both values.

    Text files may move, since the run compares their tokens. Accumulation may change without
    dropout and drawn positions, and `train.steps` may grow if the rates up to there stay the same.
    """
    old, new = defining(trained), defining(now)
    allowed = set()
    if trained.data.corpus == now.data.corpus and REGISTRY.load(now.data.corpus).splits_are_files:
        allowed |= {f"data.{split}" for split in SPLITS if trained.data[split] and now.data[split]}
    draws = ("dropout", "max_position")  # anew in each micro-batch
    if not any(value for key, value in new.items() if key.endswith(draws)):
        allowed.add("train.accumulation")
    if now.train.steps > trained.train.steps:
        from alibi.optimizers import first_other_rate  # imports JAX

        steps = trained.train.steps
        if (
            first_other_rate(
                (trained.optimizer, steps), (trained.optimizer, now.train.steps), steps
            )
            is None
        ):
            allowed.add("train.steps")
    keys = sorted((old.keys() | new.keys()) - allowed)
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def defining(config: Config) -> dict[str, Any]:
    """Returns the value of each dotted key that affects a run's results.

    Only the names of text files count, so that rows agree wherever the text lies. Rows tell texts with
    equal names apart through `Row.trained_on` and `Row.tokens_sha256`.
    """
    config = config.at(config.train.steps)  # of one run, whichever its checkpoint
    leaves = {key: value for key, value in flatten(config).items() if role_of(key) != COMPUTED}
    if REGISTRY.load(config.data.corpus).splits_are_files:
        text = TextFiles(config.data)
        leaves |= {f"data.{split}": text.title(split) for split in SPLITS}
    # its place may change; `RunDirectory.claim` compares its content
    leaves["data.tokenizer_file"] = ""
    if leaves["init_from"] and not is_address(leaves["init_from"]):
        leaves["init_from"] = os.path.abspath(os.path.expanduser(leaves["init_from"]))
    return leaves
