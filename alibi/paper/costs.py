"""The plan of a table: its commands with their costs."""

import dataclasses
import pathlib
import shlex
from collections.abc import Mapping, Sequence

from alibi.data.tokens import prepare
from alibi.evaluation.perplexity import Perplexity
from alibi.model.decoder import build_model, count_parameters
from alibi.model.flops import CPU_FLOPS_PER_SECOND, forward_flops, training_flops
from alibi.paper.definitions import parse_printed
from alibi.paper.reproduction import Reproduction
from alibi.reporting.tables import TRAINING_SPEED
from alibi.sweeps.definition import Evaluation, Run
from alibi.sweeps.estimates import START_SECONDS
from alibi.sweeps.state import evaluation_command, survey, train_command


@dataclasses.dataclass(frozen=True)
class Processor:
    """The speed of a device: its peak, `utilisation`, the share of the peak in use, and the seconds
    that a command needs to start and an evaluated length to compile.
    """

    name: str
    flops_per_second: float
    utilisation: float
    start_seconds: float = 0.0
    length_seconds: float = 0.0

    def hours(self, flops: float, lengths: int = 0) -> float:
        """Returns the hours of a command of `flops` operations."""
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
    """The size of a text: tokens by split, without splits of unknown size."""

    vocab_size: int
    tokens: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a command; `hours` are hours of a single device."""

    tokens: int
    flops: float
    hours: float


def training_cost(
    run: Run, vocab_size: int, processor: Processor, tokens_per_second: float | None = None
) -> Cost:
    """Returns the cost of the whole training; its hours follow from `tokens_per_second` if given."""
    tokens = run.config.train.steps * run.config.train.batch_tokens
    flops = tokens * training_flops(run.config, vocab_size)
    return Cost(
        tokens,
        flops,
        tokens / tokens_per_second / 3600 if tokens_per_second else processor.hours(flops),
    )


def evaluation_cost(
    run: Run, evaluation: Evaluation, text: Text, processor: Processor
) -> Cost | None:
    """Returns the cost of all lengths: a window of L inputs for each stride of tokens; None if the
    tokens are unknown.

    All layers are counted for each input.
    """
    scored = _scored(evaluation)
    tokens = text.tokens.get(scored.split)
    if tokens is None:
        return None
    flops = 0.0
    for length in evaluation.lengths:
        inputs = tokens * length // (scored.stride or length)
        flops += inputs * forward_flops(run.config, text.vocab_size, length)
    lengths = len(evaluation.lengths)
    return Cost(tokens * lengths, flops, processor.hours(flops, lengths))


def _scored(evaluation: Evaluation) -> Perplexity:
    """Returns the evaluator of an evaluation of the paper."""
    (found,) = evaluation.evaluators
    assert isinstance(found, Perplexity)
    return found


def describe_costs(reproduction: Reproduction, processor: Processor, *, measured: bool) -> str:
    """Returns every train and evaluate command with its tokens, parameters, FLOPs and estimated
    device-hours.

    Args:
      measured: estimate training from the paper's words per second, if table 1 has them and no
        files are named.
    """
    directory, setting, definition = (
        reproduction.directory,
        reproduction.setting,
        reproduction.definition,
    )
    text = describe_text(reproduction)
    published = not reproduction.files and (setting.scale, setting.name) == ("paper", "wikitext103")
    speeds = paper_speeds() if measured and published else {}
    # Once per method: the tables' methods have as many parameters at any length.
    configs = {run.config.position: run.config for run in reproduction.sweep.runs}
    counts = {
        name: count_parameters(build_model(config, text.vocab_size))
        for name, config in configs.items()
    }
    states = survey(reproduction.sweep.runs, directory)
    title = f"Table {reproduction.number} ({definition.title}), {setting.scale} scale"
    title += f": {len(states)} runs in {directory}"
    if setting.scale != "paper":
        corpus = reproduction.sweep.runs[0].config.data.corpus
        title += (
            f"; the paper's lengths divided by {setting.divisor}, and data.corpus={corpus} in place"
        )
        title += f" of {setting.name}"
    lines = [title, *([f"note: {definition.note}"] if definition.note else []), ""]
    costs: list[Cost | None] = []
    left: list[Cost | None] = []

    def add(fact: str, cost: Cost | None, flags: Sequence[str]) -> None:
        needs = "tokens not known: this text's size is not published"
        if cost is not None:
            needs = f"{cost.tokens:,} tokens, {cost.flops:.2e} FLOPs, {format_hours(cost.hours)}"
        costs.append(cost)
        lines.extend([f"#   {fact.format(needs)}", shlex.join(["python", *flags])])

    for state in states:
        run, position = state.run, state.run.config.position
        cost = training_cost(
            run, text.vocab_size, processor, speeds.get((position, run.config.train_length))
        )
        left += [] if state.is_trained else [cost]
        left += [evaluation_cost(run, evaluation, text, processor) for evaluation in state.missing]
        lines.append(f"# {run.name}: {state.describe()}")
        command = train_command(run, directory)
        add(f"train: {{}}; {counts[position]:,} parameters", cost, command)
        for evaluation in run.evaluations:
            number, first, last = (
                len(evaluation.lengths),
                min(evaluation.lengths),
                max(evaluation.lengths),
            )
            lengths = f"{first:,}" if number == 1 else f"{number} lengths, {first:,} to {last:,}"
            scored = _scored(evaluation)
            stride = "" if scored.stride is None else f", stride {scored.stride:,}"
            command = evaluation_command(run, evaluation, directory)
            fact = f"evaluate {scored.split} at {lengths}{stride}: {{}}"
            add(
                fact,
                evaluation_cost(run, evaluation, text, processor),
                command,
            )
        lines.append("")
    known = [cost for cost in costs if cost]
    unknown = "" if len(known) == len(costs) else ", without the texts of unknown size"
    flops, hours = (
        sum(cost.flops for cost in known),
        format_hours(sum(cost.hours for cost in known)),
    )
    trained, rest = (
        sum(state.is_trained for state in states),
        format_hours(sum(cost.hours for cost in left if cost)),
    )
    total = f"in all {flops:.2e} FLOPs, {hours}{unknown}"
    lines.append(f"{total}; {trained} of {len(states)} runs are trained, {rest} left")
    rate = f"{processor.name}, one command after the other, at {processor.flops_per_second:.3g} FLOPs/s x "
    rate += f"{processor.utilisation:g} (--device_flops, --utilisation)"
    if processor.start_seconds:
        rate += f", {processor.start_seconds:.0f} s to start a command and {processor.length_seconds:.0f} s to compile "
        rate += "an evaluated length"
    source = (
        "; if table 1 of the paper has a speed, training by its words per second on a V100"
        if speeds
        else ""
    )
    products = "FLOPs: products of the layers, the softmax's head and attention.\n"
    return "\n".join([*lines, f"device-hours assume {rate}{source}. {products}"])


def format_hours(hours: float) -> str:
    """Returns 205 device-hours or 1.3 device-hours; minutes below an hour."""
    if hours < 1:
        return f"{60 * hours:.2g} device-minutes"
    return f"{hours:,.0f} device-hours" if hours >= 10 else f"{hours:.2g} device-hours"


def describe_text(reproduction: Reproduction) -> Text:
    """Returns the published size of the text, or counts the user's files by making the token files
    of training.

    Raises:
      ValueError: a needed file is not named, or can't be read.
    """
    setting, runs = reproduction.setting, reproduction.sweep.runs
    if setting.vocab_size is not None and not reproduction.files:
        return Text(setting.vocab_size, setting.tokens)
    setting.check_files(reproduction.files)
    data = runs[0].config.data
    tokenizer = prepare(data, "train").tokenizer()
    splits = sorted({_scored(evaluation).split for run in runs for evaluation in run.evaluations})
    return Text(
        tokenizer.vocab_size,
        {split: prepare(data, split, tokenizer).manifest.tokens for split in splits},
    )


def paper_speeds() -> dict[tuple[str, int], float]:
    """Returns words per second in training on a V100 (table 1), by position method and train
    length.
    """
    table, found = Reproduction(1, "paper", pathlib.Path()), {}
    for (row, column), quantity in table.quantities.items():
        speed = parse_printed(table.paper.rows[row][table.definition.labels + column])
        if quantity.kind is TRAINING_SPEED and speed is not None:
            found[quantity.model.position, quantity.model.train_length] = speed
    return found
