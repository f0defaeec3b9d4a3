"""What each number of a config may be, by its key: checked before any work, wherever the number comes from."""

import dataclasses
import math
import operator
from typing import Any

LARGEST = 2**31 - 1  # that int32 holds: counts and positions on the devices are int32
LARGEST_FLOAT = 3e38  # that float32 holds, and the smallest that it doesn't round to 0 or compute slowly with
SMALLEST_FLOAT = 1.2e-38


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, without `most` itself where `below`; and `also` one that means all or none.

    Attributes:
      words: what follows "must be" where a number is none of these; empty: which bound it passes.
    """

    least: float
    most: float
    words: str = ""
    whole: bool = False
    below: bool = False
    also: int | None = None

    def complaint(self, value: Any) -> str:
        """What `value` must be; empty where it is that."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return "a whole number" if self.whole else "a number"
        if value == self.also or (self.least <= value <= self.most and not (self.below and value == self.most)):
            return ""
        return self.words or (f"at least {self.least}" if value < self.least else f"at most {self.most:,}")


def _count(least: int, most: float = math.inf) -> Range:
    return Range(least, most, whole=True)


SHARE = Range(0, 1, "from 0 to below 1", below=True)
DROPOUT = Range(0, 1, "a rate from 0 to below 1", below=True)
FINITE = Range(0, LARGEST_FLOAT, "at least 0 and finite in float32")
LIMIT = Range(1, math.inf, "positive, or -1 for all", whole=True, also=-1)
RANGES = {
    "seed": Range(0, 2**32 - 1, "from 0 to 2^32 - 1", whole=True),  # as NumPy has them, and so fairseq
    "train_length": _count(1, LARGEST),
    "model.width": _count(1, 2**20),
    "model.num_layers": _count(1, 10_000),
    "model.num_heads": _count(1, 2**16),
    "model.feed_forward": _count(1, 2**24),
    "model.norm_epsilon": Range(SMALLEST_FLOAT, LARGEST_FLOAT, "above 0 and finite in float32, such as 1e-5"),
    "model.dropout": DROPOUT,
    "model.attention_dropout": DROPOUT,
    "model.activation_dropout": DROPOUT,
    "model.softmax_dropout": DROPOUT,
    "model.adaptive_factor": _count(1, 2**20),
    "model.window": Range(0, LARGEST, "from 1 to 2^31 - 1, or 0 for attention to all tokens before", whole=True),
    "model.skip_epsilon": Range(0, 1, "a share of the attention from 0 to below 1, such as 1e-6", below=True),
    "model.logits_chunk": _count(1),
    "data.max_train_bytes": LIMIT,
    "data.max_valid_bytes": LIMIT,
    "data.tokenizer_train_bytes": LIMIT,
    "data.passkey_distance": _count(0, LARGEST),
    "data.bpe_vocab_size": _count(257, LARGEST),  # 256 bytes and the end of a text
    "train.steps": _count(1, LARGEST),
    "train.batch_tokens": _count(1, LARGEST),
    "train.accumulation": _count(1, LARGEST),
    "train.max_device_tokens": _count(0),
    "optimizer.learning_rate": FINITE,
    "optimizer.warmup_steps": _count(0, LARGEST),
    "optimizer.warmup_init": FINITE,
    "optimizer.final_fraction": Range(0, 1, "a share of learning_rate from 0 to 1"),
    "optimizer.min_learning_rate": FINITE,
    "optimizer.period_steps": _count(1),
    "optimizer.period_mult": Range(1, LARGEST_FLOAT, "at least 1 and finite"),
    "optimizer.shrink": Range(SMALLEST_FLOAT, 1, "above 0 and at most 1"),
    "optimizer.momentum": SHARE,
    "optimizer.b1": SHARE,
    "optimizer.b2": SHARE,
    "optimizer.eps": Range(SMALLEST_FLOAT, LARGEST_FLOAT, "above 0 and finite in float32, such as 1e-8"),
    "optimizer.weight_decay": FINITE,
    "optimizer.clip_norm": FINITE,
    "eval.every_steps": _count(0),
    "eval.max_tokens": LIMIT,
    "eval.batch_tokens": _count(1, LARGEST),
    "checkpoint.every_steps": _count(0),
    "checkpoint.every_minutes": Range(0, LARGEST_FLOAT, "at least 0 and finite; 0 for never"),
    "checkpoint.keep": _count(1),
    "log.every_steps": _count(1),
}  # fmt: skip


def check_numbers(config: Any, section: str = "") -> None:
    """Raises ValueError for the first number of `config`, or of what is its `section` ("model."), outside its range."""
    for key, allowed in RANGES.items():
        if key.startswith(section):  # in this order: what a config derives from a number is read after the number
            try:
                value = operator.attrgetter(key.removeprefix(section))(config)
            except AttributeError:  # a config that is older than the key
                continue
            if needed := allowed.complaint(value):
                raise ValueError(f"{key}={value!r} must be {needed}")
