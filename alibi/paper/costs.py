"""The plan of a table: its commands with their costs."""

import dataclasses
import shlex
from collections.abc import Mapping

from alibi.data.tokens import prepare
from alibi.evaluation.perplexity import Perplexity
from alibi.model.decoder import build_model, count_parameters
from alibi.model.flops import CPU_FLOPS_PER_SECOND, forward_flops, training_flops
from alibi.paper.reproduction import Reproduction
from alibi.sweeps.definition import Evaluation, Run
from alibi.sweeps.estimates import START_SECONDS
from alibi.sweeps.state import evaluation_command, survey, train_command


@dataclasses.dataclass(frozen=True)
class Processor:
    """The speed of a device.

    Attributes:
      flops_per_second: at its peak.
      utilisation: the share of the peak in use.
      start_seconds: time to start a command.
      length_seconds: time to compile an evaluated length.
    """

    name: str
    flops_per_second: float
    utilisation: float
    start_seconds: float = 0.0
    length_seconds: float = 0.0

    def hours(self, flops: float, lengths: int = 0) -> float:
        """Returns the hours that a command takes."""
        seconds = flops / (self.flops_per_second * self.utilisation)
        return (seconds + self.start_seconds + lengths * self.length_seconds) / 3600


CPU_PEAK = 200e9  # two cores of a server CPU, float32
CPU = Processor("two CPU cores", CPU_PEAK, CPU_FLOPS_PER_SECOND / CPU_PEAK, START_SECONDS, 2.0)
PROCESSORS = {
    # its 28.5k words per second at L = 512 are 0.31 of the peak of tensor cores in fp16
    "paper": Processor("a V100", 125e12, 0.3),
    "medium": CPU,
    # at width 64 with adaptive embeddings, see CPU_FLOPS_PER_SECOND
    "small": dataclasses.replace(CPU, utilisation=30e9 / CPU_PEAK),
}


@dataclasses.dataclass(frozen=True)
class Text:
    """A text's size: tokens by split, without splits where they are unknown."""

    vocab_size: int
    tokens: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a command costs. `hours` are for a single device."""

    tokens: int
    flops: float
    hours: float

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, {self.flops:.2e} FLOPs, {format_hours(self.hours)}"


def training_cost(run: Run, vocab_size: int, processor: Processor) -> Cost:
    """Returns what the whole training costs."""
    tokens = run.config.train.steps * run.config.train.batch_tokens
    flops = tokens * training_flops(run.config, vocab_size)
    return Cost(tokens, flops, processor.hours(flops))


def evaluation_cost(
    run: Run, evaluation: Evaluation, text: Text, processor: Processor
) -> Cost | None:
    """Returns what all lengths cost: a window of L inputs for each stride of tokens. None if the number of
    tokens is unknown.

    All layers are counted for each input.
    """
    scored, lengths = _perplexity(evaluation), evaluation.lengths
    tokens = text.tokens.get(scored.split)
    if tokens is None:
        return None
    flops = sum(
        tokens
        * length
        // (scored.stride or length)
        * forward_flops(run.config, text.vocab_size, length)
        for length in lengths
    )
    return Cost(tokens * len(lengths), flops, processor.hours(flops, len(lengths)))


def _perplexity(evaluation: Evaluation) -> Perplexity:
    """Returns the evaluator in an evaluation for the paper."""
    (evaluator,) = evaluation.evaluators
    assert isinstance(evaluator, Perplexity)
    return evaluator


def describe_costs(reproduction: Reproduction) -> str:
    """Returns every train and evaluate command with its tokens, parameters, FLOPs and estimated
    device-hours.
    """
    setting, directory = reproduction.setting, reproduction.directory
    processor, text = PROCESSORS[setting.scale], describe_text(reproduction)
    states = survey(reproduction.sweep.runs, directory)
    # Once per method: the tables' methods have as many parameters at any length.
    configs = {run.config.position: run.config for run in reproduction.sweep.runs}
    parameters = {
        name: count_parameters(build_model(config, text.vocab_size))
        for name, config in configs.items()
    }
    lines = _head(reproduction)
    costs: list[Cost | None] = []
    left: list[Cost | None] = []
    for state in states:
        run = state.run
        training = training_cost(run, text.vocab_size, processor)
        costs.append(training)
        left += [] if state.is_trained else [training]
        left += [evaluation_cost(run, one, text, processor) for one in state.missing]
        lines += [
            f"# {run.name}: {state.describe()}",
            f"#   train: {training}; {parameters[run.config.position]:,} parameters",
            shlex.join(["python", *train_command(run, directory)]),
        ]
        for evaluation in run.evaluations:
            cost = evaluation_cost(run, evaluation, text, processor)
            costs.append(cost)
            lines += [
                f"#   evaluate {_described(evaluation)}: "
                f"{cost or 'tokens not known: this text has no published size'}",
                shlex.join(["python", *evaluation_command(run, evaluation, directory)]),
            ]
        lines.append("")
    known_costs = list(filter(None, costs))
    unknown = "" if len(known_costs) == len(costs) else ", without the texts of unknown size"
    flops, hours = sum(cost.flops for cost in known_costs), sum(cost.hours for cost in known_costs)
    rest = format_hours(sum(cost.hours for cost in filter(None, left)))
    trained = f"{sum(state.is_trained for state in states)} of {len(states)} runs are trained"
    lines.append(
        f"in all {flops:.2e} FLOPs, {format_hours(hours)}{unknown}; {trained}, {rest} left"
    )
    return "\n".join([*lines, _assumptions(processor)])


def _head(reproduction: Reproduction) -> list[str]:
    """Returns the plan's title, and the table's note."""
    setting, definition, runs = (
        reproduction.setting,
        reproduction.definition,
        reproduction.sweep.runs,
    )
    title = (
        f"Table {reproduction.number} ({definition.title}), {setting.scale} scale: {len(runs)} runs in "
        f"{reproduction.directory}"
    )
    if setting.scale != "paper":
        title += (
            f"; the paper's lengths divided by {setting.divisor}, and data.corpus={runs[0].config.data.corpus} in "
            f"place of {setting.name}"
        )
    return [title, *([f"note: {definition.note}"] if definition.note else []), ""]


def _described(evaluation: Evaluation) -> str:
    """Returns an evaluation in words, such as "test at 3,072, stride 512"."""
    scored, lengths = _perplexity(evaluation), evaluation.lengths
    shown = f"{lengths[0]:,}"
    if len(lengths) > 1:
        shown = f"{len(lengths)} lengths, {lengths[0]:,} to {lengths[-1]:,}"
    stride = "" if scored.stride is None else f", stride {scored.stride:,}"
    return f"{scored.split} at {shown}{stride}"


def _assumptions(processor: Processor) -> str:
    """Returns in words how hours follow from FLOPs."""
    rate = f"{processor.flops_per_second:.3g} FLOPs/s x {processor.utilisation:g}"
    text = f"device-hours assume {processor.name}, one command after the other, at {rate}"
    if processor.start_seconds:
        text += (
            f", {processor.start_seconds:.0f} s to start a command and {processor.length_seconds:.0f} s to compile an "
            "evaluated length"
        )
    return f"{text}. FLOPs: products of the layers, the softmax's head and attention.\n"


def format_hours(hours: float) -> str:
    """Returns 205 device-hours, 1.3 device-hours, or minutes below an hour."""
    if hours < 1:
        return f"{60 * hours:.2g} device-minutes"
    return f"{hours:,.0f} device-hours" if hours >= 10 else f"{hours:.2g} device-hours"


def describe_text(reproduction: Reproduction) -> Text:
    """Returns the text's published size, or counts the user's files by making the token files for
    training.

    Raises:
      ValueError: a needed file is not named, or can't be read.
    """
    setting, runs = reproduction.setting, reproduction.sweep.runs
    if setting.vocab_size is not None and not reproduction.files:
        return Text(setting.vocab_size, setting.tokens)
    setting.check_files(reproduction.files)
    data = runs[0].config.data
    tokenizer = prepare(data, "train").tokenizer()
    splits = sorted({_perplexity(one).split for run in runs for one in run.evaluations})
    return Text(
        tokenizer.vocab_size,
        {split: prepare(data, split, tokenizer).manifest.tokens for split in splits},
    )
