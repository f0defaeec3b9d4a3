"""Every config key once: its default, range, unit and meaning."""

import dataclasses
import functools
import operator
import re
from collections.abc import Mapping
from typing import Any

from alibi.config.fields import (
    COMPUTED,
    INT32,
    Section,
    as_text,
    choice,
    nearest,
    number,
    parsed,
    setting,
    without_lists,
)
from alibi.config.model import DTYPES, NO_DTYPES, ModelConfig

# Mappings of options. The class that is named beside one types its keys.
OPTIONS = (
    "position_options",
    "objective.options",
    "optimizer.options",
    "optimizer.schedule_options",
    "data.options",
)
# Short names of keys, wherever keys are set.
SHORT_NAMES = {"length": "train_length", "objective": "objective.name"}
# Keys that may change over updates: each may be a list of (update, value).
OVER_UPDATES = ("position", "train_length", "model.window", "model.logit_scale")


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig(Section):
    """The prediction that a model is trained and evaluated for."""

    # next_token: each token from the tokens before it; masked: masked tokens from both sides (BERT);
    # answers: the next token, of the answers of tasks alone; after_separator: the same in text;
    # fill_in_the_middle: some rows as prefix, suffix, middle; prefix_lm: after a prefix that sees
    # itself from both sides. Or package.module:Class.
    name: str = "next_token"
    # Options of the objective, by the names of its class's fields (alibi/objectives).
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # masked, as the next two: share of the tokens that are predicted
    mask_rate: float = number(0.15, above=0.0, at_most=1.0)
    # share of these that a random token replaces
    mask_random: float = number(0.1, at_least=0.0, at_most=1.0)
    # share of these that stay as they are; the others become the mask token
    mask_kept: float = number(0.1, at_least=0.0, at_most=1.0)
    # the mask token's id in the tokenizer's vocabulary; -1 means a new one after it
    mask_id: int = number(-1, at_least=-1, at_most=INT32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_random + self.mask_kept > 1:
            raise ValueError(
                f"objective.mask_random={self.mask_random} and objective.mask_kept={self.mask_kept} are shares of the "
                "predicted tokens; their sum must be at most 1"
            )


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
    """The text and its tokens."""

    # books are embedded in this package, passkeys are made of them; text: files; hub: datasets;
    # tfds: its data sets; tasks: examples of data.task. Or package.module:Class.
    corpus: str = "books"
    # Options of the corpus, by the names of its class's fields.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The source of each split. books, passkeys: their own names; text: files and globs, separated
    # by commas; hub, tfds: a split expression such as "validation" or "train[:10%]". Empty means no
    # such split.
    train: str = "train"
    valid: str = "valid"
    test: str = ""
    # text: the end of a document; blank_line for files of many documents, such as CC100's; line for
    # a sentence a line. Each row of a .jsonl, .csv or .parquet file is a document.
    document_end: str = choice("file", ("file", "blank_line", "line"))
    # Packed documents don't see each other; positions restart at each, or count through the
    # sequence. Needs bpe, which ends documents with a token. Empty means a sequence is one text.
    isolate_documents: str = choice("", ("", "restart", "through"))
    # passkeys: most bytes between a key and its question
    passkey_distance: int = number(0, at_least=0, at_most=INT32)
    # Longest gap in tokens after which a passage of 16 comes again, in one training block of eight; 0
    # means no echoes.
    echoes: int = number(0, at_least=0, at_most=INT32)
    # tasks: the task, see docs/tasks.md, and the tokens of a block, which holds whole examples
    task: str = ""
    task_length: int = number(0, at_least=0, at_most=INT32)
    max_train_bytes: int = number(-1, at_least=1, or_all=-1)  # most UTF-8 bytes of text
    max_valid_bytes: int = number(-1, at_least=1, or_all=-1)  # the same, for valid and for test
    name: str = ""  # hub, tfds: the data set, such as "Salesforce/wikitext"
    subset: str = ""  # hub, tfds: the data set's config, such as "wikitext-103-v1"
    revision: str = ""  # hub: a full commit hash, or a tag; tfds: the version
    column: str = "text"  # hub, tfds, files of rows: the column with the text
    streaming: bool = False  # hub: reads over the network instead of downloading first
    # words: the paper's dictionary rule
    tokenizer: str = choice("bytes", ("bytes", "words", "bpe"))
    # words: a dict.txt; bpe: a tokenizer.json or a SentencePiece .model. Defaults to one made from train
    tokenizer_file: str = ""
    # entries of a new BPE: 256 bytes, an end, merges
    bpe_vocab_size: int = number(2048, at_least=257, at_most=INT32)
    # bpe: bytes of the train text from which a new tokenizer is made, spread evenly over text
    # files.
    tokenizer_train_bytes: int = number(-1, at_least=1, or_all=-1)
    # holds token files; defaults to $ALIBI_CACHE, or ~/.cache/alibi
    cache_dir: str = setting("", COMPUTED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.echoes and self.isolate_documents:
            raise ValueError(
                f"data.echoes={self.echoes} crosses the borders that data.isolate_documents={self.isolate_documents} "
                "draws; leave one of them out"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig(Section):
    """The updates."""

    steps: int = number(600, at_least=1, at_most=INT32)  # updates
    # tokens of an update, at any length, on all devices
    batch_tokens: int = number(2048, at_least=1, at_most=INT32)
    accumulation: int = number(1, at_least=1, at_most=INT32)  # micro-batches of an update
    # Most tokens on a device at a time: accumulation grows to keep to this number. 0 means no limit.
    max_device_tokens: int = number(0, at_least=0, role=COMPUTED)
    # These two change the loss that training follows, not the reported losses; 0 means off.
    # times the squared logarithm of the softmax's denominator, added to the loss; PaLM's is 1e-4
    z_loss: float = number(0.0, at_least=0.0)
    # share of the target's probability that goes to all words alike
    label_smoothing: float = number(0.0, at_least=0.0, below=1.0)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Section):
    """The optimizer and its learning rates."""

    # nag: SGD with Nesterov's momentum, without weight decay; muon: updates of matrices made
    # orthogonal, adamw for the rest. Or package.module:Class.
    name: str = "adamw"
    # Options of the optimizer, by the names of its class's fields (alibi/optimizers).
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    learning_rate: float = number(3e-3, at_least=0.0)  # at the end of the warm-up
    warmup_steps: int = number(50, at_least=0, at_most=INT32)  # updates, linear from warmup_init
    warmup_init: float = number(0.0, at_least=0.0)  # learning rate of the first update of a warm-up
    # After the warm-up: cosine ends with the run; wsd is constant and falls at the run's end;
    # inverse_sqrt is learning_rate sqrt(warmup_steps / update), as fairseq's. Or
    # package.module:Class.
    schedule: str = "cosine"
    # Options of the schedule, by the names of its class's fields (alibi/optimizers/schedules.py).
    schedule_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # cosine: its end, as a share of learning_rate
    final_fraction: float = number(0.1, at_least=0.0, at_most=1.0)
    # cosine_restarts: the end of the first cycle
    min_learning_rate: float = number(0.0, at_least=0.0)
    period_steps: int = number(1000, at_least=1)  # cosine_restarts: updates of the first cycle
    # cosine_restarts: each cycle is so many times as long as the last
    period_mult: float = number(1.0, at_least=1.0)
    # cosine_restarts: its learning rates so many times as high
    shrink: float = number(1.0, above=0.0, at_most=1.0)
    momentum: float = number(0.99, at_least=0.0, below=1.0)  # nag
    b1: float = number(0.9, at_least=0.0, below=1.0)  # adamw, as the next three
    b2: float = number(0.99, at_least=0.0, below=1.0)
    eps: float = number(1e-8, above=0.0)
    # decays matrices and tables of tokens, not biases, norms and position parameters
    weight_decay: float = number(0.1, at_least=0.0)
    # largest global norm of an update's gradient; 0 means no clipping
    clip_norm: float = number(1.0, at_least=0.0)


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section):
    """The devices along each axis. -1, for a single axis, means all remaining devices."""

    data: int = number(-1, at_least=1, or_all=-1)  # splits the batch
    # splits the batch, the parameters and the optimizer state
    fsdp: int = number(1, at_least=1, or_all=-1)
    # splits heads, feed-forward features and the vocabulary
    tensor: int = number(1, at_least=1, or_all=-1)
    # When devices gather the parameters that fsdp splits. layer: a layer's when it is computed, in
    # both passes; with model.remat or model.scan_layers the least memory (ZeRO stage 3, arXiv
    # 1910.02054). update: all of them once for an update (stage 2); less traffic, but each device
    # then holds a whole copy.
    gather: str = choice("layer", ("layer", "update"))


@dataclasses.dataclass(frozen=True)
class EvalConfig(Section):
    """Validations during training, and the dtype of every evaluation."""

    # updates between validations at train_length; 0 means only at the end
    every_steps: int = number(200, at_least=0)
    # tokens in a validation during training, in windows spread evenly over valid; -1 means all. The
    # best checkpoint is the best by these.
    max_tokens: int = number(65_536, at_least=1, or_all=-1)
    # tokens per device in an evaluation batch
    batch_tokens: int = number(16_384, at_least=1, at_most=INT32)
    # The products' dtype, whatever model.dtype is: the paper trained in float16 and evaluated in
    # float32. bfloat16 takes less memory, and is less exact.
    dtype: str = choice("float32", DTYPES, **NO_DTYPES)
    # a text that is continued at each validation, for the eye; empty means none
    sample_prompt: str = ""
    sample_tokens: int = number(100, at_least=1)  # tokens of its continuation


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section):
    """Checkpoints, which are saved at the end, after the best validation so far, and at these
    intervals.
    """

    every_steps: int = number(200, at_least=0)  # updates; 0 means never
    every_minutes: float = number(10.0, at_least=0.0)  # 0 means never
    # latest checkpoints kept besides the best; another if the best is among them
    keep: int = number(1, at_least=1)
    # updates: checkpoints of its multiples are never deleted; 0 means none are kept so
    keep_every: int = number(0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_every and (not self.every_steps or self.keep_every % self.every_steps):
            raise ValueError(
                f"checkpoint.keep_every={self.keep_every} must be a multiple of checkpoint.every_steps="
                f"{self.every_steps}, since only these updates are sure to have a checkpoint"
            )


@dataclasses.dataclass(frozen=True)
class LogConfig(Section):
    """The metrics of training."""

    # updates between rows of metrics.jsonl and of these, if True:
    every_steps: int = number(10, at_least=1)
    tensorboard: bool = True  # TensorBoard's files in the work directory
    # Weights & Biases (pip install wandb); with WANDB_MODE=offline to files alone
    wandb: bool = False
    trackio: bool = False  # Trackio (pip install trackio)
    # the project at W&B and Trackio; defaults to the sweep's directory, or the one above the run's
    project: str = ""
    # FIRST:LAST, such as 10:15: the updates in a trace under WORKDIR/trace, for xprof or Perfetto
    profile_steps: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile_steps and not 1 <= self.traced[0] <= self.traced[1]:
            raise ValueError(
                f"log.profile_steps must be FIRST:LAST, such as 10:15, and is {self.profile_steps!r}"
            )

    @property
    def traced(self) -> tuple[int, int]:
        """The first and the last update in the trace, 0 and 0 without one or with a wrong text."""
        match = re.fullmatch(r"(\d+):(\d+)", self.profile_steps)
        return (int(match[1]), int(match[2])) if match else (0, 0)


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """The config of a run. The defaults train a small decoder on the embedded books."""

    # seeds initialization, dropout and the order of training blocks
    seed: int = number(0, at_least=0, at_most=2**32 - 1)
    # tokens of a training sequence (the paper's L)
    train_length: int = number(128, at_least=1, at_most=INT32)
    # A name from alibi.positions.METHODS or of an installed package, or package.module:Class. A list
    # such as rotary,none is repeated over the layers.
    position: str = "alibi"
    # SHA-256 of the files from which scripts/import_hf.py or import_fairseq.py made the run
    imported_from: str = ""
    # work directory of a run whose latest parameters this run starts with; train.py --init_from
    init_from: str = ""
    # update of init_from whose whole state this run goes on from: parameters, optimizer, order of
    # text. Only train.steps and the schedule may differ, which must agree up to there. -1 means its
    # latest parameters alone.
    init_step: int = number(-1, at_least=1, at_most=INT32, or_all=-1)
    # Options of the position method, by the names of its class's fields (alibi/positions). A list
    # for an option that takes one value is repeated over the layers.
    position_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The lists over updates of other keys, as (key, update, value). The key itself has the last one.
    changes: tuple[tuple[str, int, Any], ...] = ()
    objective: ObjectiveConfig = ObjectiveConfig()
    model: ModelConfig = dataclasses.field(default=ModelConfig())
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = dataclasses.field(default=MeshConfig(), metadata={"role": COMPUTED})
    eval: EvalConfig = dataclasses.field(default=EvalConfig(), metadata={"role": COMPUTED})
    checkpoint: CheckpointConfig = dataclasses.field(
        default=CheckpointConfig(), metadata={"role": COMPUTED}
    )
    log: LogConfig = dataclasses.field(default=LogConfig(), metadata={"role": COMPUTED})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log.traced[1] > self.train.steps:
            raise ValueError(
                f"log.profile_steps={self.log.profile_steps} asks for updates beyond train.steps={self.train.steps}; "
                "give earlier ones"
            )
        if self.init_step > 0 and not self.init_from:
            raise ValueError(
                f"init_step={self.init_step} is a step of the run init_from, which is empty; give init_from, or leave "
                "init_step out"
            )
        over = self.over_updates
        for key, pairs in over.items():
            updates, shown = [update for update, _ in pairs], f"{key}={as_text(pairs)}"
            if key not in OVER_UPDATES:
                raise ValueError(f"{key} can't change over updates; {', '.join(OVER_UPDATES)} can")
            if updates != sorted({0, *updates}):
                raise ValueError(
                    f"{shown} must begin with update 0, and each update be later than the one before, as in "
                    f"{key}={as_text(((0, pairs[0][1]), (100, pairs[-1][1])))}"
                )
            if functools.reduce(getattr, key.split("."), self) not in dict(pairs).values():
                raise ValueError(
                    f"changes has {shown}, without the config's own {key}; set {key} to the list"
                )
            if updates[-1] >= self.train.steps:
                raise ValueError(
                    f"{shown} changes after update {updates[-1]:,}, and the run ends with train.steps="
                    f"{self.train.steps}; give earlier updates, or more steps"
                )
        # one value for all updates is no change; by keys, so that equal lists are equal however they were given
        by_key = sorted(
            (one for one in self.changes if len(over[one[0]]) > 1), key=operator.itemgetter(0)
        )
        object.__setattr__(self, "changes", tuple(by_key))
        longest = max(lengths := [value for _, value in self.pairs("train_length")])
        if odd := [length for length in lengths if longest % length]:
            raise ValueError(
                f"train_length={odd[0]} does not divide {longest}, the longest over the updates, whose blocks are "
                "split into rows; use a divisor"
            )

    @property
    def over_updates(self) -> dict[str, tuple[tuple[int, Any], ...]]:
        """The list of (update, value) of each key that changes."""
        return {
            key: tuple((update, value) for each, update, value in self.changes if each == key)
            for key in dict.fromkeys(key for key, *_ in self.changes)
        }

    def pairs(self, key: str) -> tuple[tuple[int, Any], ...]:
        """Returns the list of (update, value) of a key outside of sections, or its only value's."""
        return self.over_updates.get(key, ((0, self[key]),))

    @property
    def positions(self) -> str:
        """The methods of all updates, as a list in `position`."""
        return ",".join(dict.fromkeys(value for _, value in self.pairs("position")))

    @property
    def longest(self) -> int:
        """The longest train_length over the updates: a block of the text."""
        return max(value for _, value in self.pairs("train_length"))

    @property
    def last_length(self) -> int:
        """The last train_length. Position methods and logit scales are made for it in all updates."""
        return self.pairs("train_length")[-1][1]

    def began(self, step: int) -> int:
        """Returns the update after which the values of update `step` (counted from 1) apply."""
        return max((first for _, first, _ in self.changes if first < step), default=0)

    def at(self, step: int) -> "Config":
        """Returns the config with each key's value in update `step`, counted from 1."""
        now = {key: value for key, first, value in self.changes if first <= self.began(step)}
        return replaced(self, now | {"changes": self.changes}) if now else self

    @property
    def stretches(self) -> tuple[tuple[int, "Config"], ...]:
        """The updates after which values change, 0 first, each with the config from there on."""
        firsts = sorted({0, *(first for _, first, _ in self.changes)})
        return tuple((first, self.at(first + 1)) for first in firsts)


def flatten(config: Any) -> dict[str, Any]:
    """Returns the value of each dotted key in a config or mapping, tuples as lists, as in JSON."""
    leaves: dict[str, Any] = {}
    for key, value in (config if isinstance(config, Mapping) else vars(config)).items():
        if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
            leaves |= {f"{key}.{inner}": leaf for inner, leaf in flatten(value).items()}
        else:
            leaves[key] = list(value) if isinstance(value, tuple) else value
    return leaves


_DEFAULT = Config()
KEYS = tuple(flatten(_DEFAULT))  # without the options of position methods


def role_of(key: str) -> str:
    """Returns a dotted key's role, its own or its section's (`alibi.config.fields.COMPUTED`, ...), or
    "".
    """
    kind: Any = Config
    role = ""
    for part in key.split("."):
        field = getattr(kind, "__dataclass_fields__", {}).get(part)
        kind, role = (
            (type(field.default), field.metadata.get("role") or role) if field else (None, role)
        )
    return role


# Names in other codebases, for suggestions.
OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "warmup": "optimizer.warmup_steps",
    "beta1": "optimizer.b1",
    "beta2": "optimizer.b2",
    "grad_clip": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "batch_size": "train.batch_tokens",
    "epochs": "train.steps",
    "num_epochs": "train.steps",
    "max_steps": "train.steps",
    "seq_len": "train_length",
    "max_seq_len": "train_length",
    "sequence_length": "train_length",
    "context_length": "train_length",
    "block_size": "train_length",
    "position_encoding": "position",
    "d_model": "model.width",
    "hidden_size": "model.width",
    "n_embd": "model.width",
    "d_ff": "model.feed_forward",
    "intermediate_size": "model.feed_forward",
    "depth": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "precision": "model.dtype",
    "dataset": "data.corpus",
    "wd": "optimizer.weight_decay",
}


def check_key(key: str) -> str:
    """Returns a key's full name. Raises ValueError, with the nearest key, if it is unknown."""
    key = SHORT_NAMES.get(key, key)
    section, _, name = key.rpartition(".")
    if key in KEYS or section in OPTIONS:
        return key
    # Names are compared without their sections, which would be near by themselves.
    own_last = sorted([*KEYS, *SHORT_NAMES], key=lambda full: full.startswith(f"{section}."))
    by_name = {full.rpartition(".")[2]: full for full in own_last}
    meant = OTHER_NAMES.get(name) or by_name.get(nearest(name, by_name))
    question = f"did you mean {meant!r}? " if meant else ""
    raise ValueError(f"unknown config key {key!r}; {question}alibi/config/tree.py lists every key")


def unknown_keys(content: Mapping[str, Any]) -> list[str]:
    """Returns the dotted keys in a config file's content that this version lacks."""
    return [
        key for key in flatten(content) if key not in KEYS and key.rpartition(".")[0] not in OPTIONS
    ]


def read_value(key: str, value: Any) -> Any:
    """Returns a value, or a text's value, as a key's type.

    Raises:
      ValueError: an unknown key, or a value with another type or out of range.
    """
    section, _, name = check_key(key).rpartition(".")
    if section in OPTIONS:
        return parsed(value) if isinstance(value, str) else value
    return (type(_DEFAULT[section]) if section else Config).read(name, value)


def read_over_updates(key: str, value: Any) -> tuple[tuple[str, int, Any], ...]:
    """Returns a list of (update, value), or its text 0:64;100:128, as `Config.changes` holds it; () for
    a single value. Raises ValueError for another list or a refused value.
    """
    pairs: Any = without_lists(value)
    if isinstance(value, str):
        # 8:0 alone is a list over layers
        pairs = (
            tuple(tuple(pair.split(":", 1)) for pair in value.split(";")) if ";" in value else ()
        )
    if not isinstance(pairs, tuple) or not any(isinstance(pair, tuple) for pair in pairs):
        return ()
    if not all(
        isinstance(pair, tuple) and len(pair) == 2 and str(pair[0]).isdecimal() for pair in pairs
    ):
        raise ValueError(
            f"{key}={value!r} must list pairs of an update and a value, such as ((0, VALUE), (100, VALUE)) in Python "
            "or 0:VALUE;100:VALUE in a flag"
        )
    return tuple((key, int(update), read_value(key, each)) for update, each in pairs)


def replaced(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns `config` with other values for some keys.

    Args:
      changes: a value, a list over updates, or the text of either, for each dotted key.

    Raises:
      ValueError: an unknown key, or a refused value.
    """
    sections: dict[str, dict[str, Any]] = {}
    over: tuple[Any, ...] = Config.read("changes", changes.get("changes", config.changes))
    for key, value in changes.items():
        section, _, name = (key := check_key(key)).rpartition(".")
        if key == "changes":
            continue
        pairs = read_over_updates(key, value) if key in OVER_UPDATES else ()
        if pairs or "changes" not in changes:
            over = *(one for one in over if one[0] != key), *pairs
        value = read_value(key, pairs[-1][2] if pairs else value)
        if section in OPTIONS:
            section, _, mapping = section.rpartition(".")
            old = (config[section] if section else config)[mapping]
            values = sections.setdefault(section, {}).setdefault(mapping, dict(old))
            values[name] = value
        else:
            sections.setdefault(section, {})[name] = value
    whole = sections.pop("", {})
    for section, values in sections.items():
        whole[section] = dataclasses.replace(config[section], **values)
    return dataclasses.replace(config, **whole, changes=over)
