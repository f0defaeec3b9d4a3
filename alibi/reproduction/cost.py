"""What the runs of a table cost before they are made: tokens, parameters, floating-point operations, device-hours."""

import dataclasses
import functools
from collections.abc import Mapping

import ml_collections

from alibi.data.tokens import prepare, prepare_with
from alibi.flops import CPU_FLOPS_PER_SECOND, forward_flops, training_flops
from alibi.model import build_model, count_parameters
from alibi.reporting.measures import parse_printed
from alibi.reporting.paper import load_table
from alibi.reproduction.definitions import METHODS
from alibi.reproduction.settings import Setting
from alibi.sweeps.definition import Evaluation, Run


@dataclasses.dataclass(frozen=True)
class Device:
    """The assumption that device-hours rest on: peak operations per second, and the share of them that is reached."""

    flops_per_second: float
    utilisation: float

    def hours(self, flops: float) -> float:
        return flops / (self.flops_per_second * self.utilisation) / 3600


_CPU_PEAK = 200e9  # of two cores of a server CPU in float32
# The paper's V100 (tensor cores, fp16): its 28.5k words per second at L = 512 are 0.31 of the peak.
DEVICES = {"paper": Device(125e12, 0.3), "small": Device(_CPU_PEAK, CPU_FLOPS_PER_SECOND / _CPU_PEAK)}


@dataclasses.dataclass(frozen=True)
class Text:
    """What of a setting's text costs depend on; tokens by split, without those that aren't published."""

    vocab_size: int
    tokens: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one command; None where the number of tokens isn't known."""

    tokens: int | None
    flops: float | None
    hours: float | None


def describe_text(
    setting: Setting, config: ml_collections.ConfigDict, splits: set[str], files: Mapping[str, str]
) -> Text:
    """As published, unless the user names `files`; else counted, by making the token files that training will use.

    Raises:
      ValueError: files that the setting needs besides, or that can't be read.
    """
    if setting.vocab_size is not None and not files:
        return Text(setting.vocab_size, dict(setting.tokens))
    setting.check_files(files)
    tokenizer = prepare(config.data, "train").tokenizer()
    counted = {split: prepare_with(config.data, split, tokenizer).manifest.tokens for split in sorted(splits)}
    return Text(tokenizer.vocab_size, counted)


def parameters(run: Run, vocab_size: int) -> int:
    """How many numbers the run's model learns; nothing is allocated."""
    return count_parameters(build_model(run.config, vocab_size))


def training_cost(run: Run, vocab_size: int, device: Device, paper_speed: float | None = None) -> Cost:
    """Of the whole training, from words per second and device where the paper gives them."""
    tokens = run.config.train.steps * run.config.train.batch_tokens
    flops = tokens * training_flops(run.config, vocab_size)
    return Cost(tokens, flops, tokens / paper_speed / 3600 if paper_speed else device.hours(flops))


def evaluation_cost(run: Run, evaluation: Evaluation, text: Text, device: Device) -> Cost:
    """Of all its lengths: a window of L inputs for each stride of tokens; all layers are counted for each input."""
    tokens = text.tokens.get(evaluation.split)
    if tokens is None:
        return Cost(None, None, None)
    flops = 0.0
    for length in evaluation.lengths:
        inputs = tokens * length // (evaluation.stride or length)
        flops += inputs * forward_flops(run.config, text.vocab_size, length)
    return Cost(tokens * len(evaluation.lengths), flops, device.hours(flops))


@functools.cache
def paper_speeds() -> dict[tuple[str, int], float]:
    """Words per second on one V100 in training, by position method and train length (table 1)."""
    table = load_table(1)
    names, lengths, speeds = (table.column(name) for name in ("Position Method", "Train Length", "Speed (Train)"))
    found = {}
    for name, length, speed in zip(names, lengths, speeds, strict=True):
        number = parse_printed(speed)
        assert number is not None
        found[METHODS[name], int(length)] = number
    return found
