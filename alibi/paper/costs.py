"""What is printed before anything is run: a table's commands with their cost, and all tables with what has been run."""

import dataclasses
import functools
import pathlib
import shlex
from collections.abc import Mapping, Sequence

from alibi.data.tokens import prepare
from alibi.model.flops import forward_flops, training_flops
from alibi.paper.definitions import parse_printed
from alibi.paper.reproduction import Reproduction
from alibi.planning.hours import CPU, Processor
from alibi.reporting.recorded import ROWS_FILE, find_rows
from alibi.reporting.rows import latest
from alibi.reporting.tables import TRAINING_SPEED
from alibi.reporting.writers import aligned
from alibi.storage.files import listed
from alibi.sweeps.definition import Evaluation, Run
from alibi.sweeps.estimates import device_table, parameters
from alibi.sweeps.processes import Command
from alibi.sweeps.state import RunState, evaluation_command, survey, train_command


@dataclasses.dataclass(frozen=True)
class Text:
    """The size of a text: tokens by split; a split whose size is not known is absent."""

    vocab_size: int
    tokens: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one command; `hours` are hours of one device."""

    tokens: int
    flops: float
    hours: float


def training_cost(run: Run, vocab_size: int, processor: Processor, tokens_per_second: float | None = None) -> Cost:
    """Returns the cost of the whole training; its hours follow from `tokens_per_second` if that is known."""
    tokens = run.config.train.steps * run.config.train.batch_tokens
    flops = tokens * training_flops(run.config, vocab_size)
    return Cost(tokens, flops, tokens / tokens_per_second / 3600 if tokens_per_second else processor.hours(flops))


def evaluation_cost(run: Run, evaluation: Evaluation, text: Text, processor: Processor) -> Cost | None:
    """Returns the cost of all lengths: a window of L inputs for each stride of tokens; None if the tokens are unknown.

    All layers are counted for each input.
    """
    tokens = text.tokens.get(evaluation.split)
    if tokens is None:
        return None
    flops = sum(
        tokens * length // (evaluation.stride or length) * forward_flops(run.config, text.vocab_size, length)
        for length in evaluation.lengths
    )
    return Cost(tokens * len(evaluation.lengths), flops, processor.hours(flops))


# The paper's V100 (tensor cores, fp16): its 28.5k words per second at L = 512 are 0.31 of the peak.
PROCESSORS = {"paper": Processor(125e12, 0.3), "medium": CPU, "small": CPU}


def describe_costs(reproduction: Reproduction, processor: Processor, *, measured: bool) -> str:
    """Every train and evaluate command, with tokens, parameters, operations and an estimate of device-hours.

    Args:
      measured: estimate training from the paper's words per second, where table 1 has them and no files are named.
    """
    directory, setting = reproduction.directory, reproduction.setting
    text = describe_text(reproduction)
    published = not reproduction.files and (setting.scale, setting.name) == ("paper", "wikitext103")
    speeds = paper_speeds() if measured and published else {}
    # Once a method: none of the tables' methods has parameters that depend on the length.
    methods = {run.config.position: run for run in reproduction.sweep.runs}
    counts = {position: parameters(run, text.vocab_size) for position, run in methods.items()}
    states = survey(reproduction.sweep, directory)
    lines = [_heading(reproduction), ""]
    costs: list[Cost | None] = []
    left: list[Cost | None] = []
    for state in states:
        run, position = state.run, state.run.config.position
        cost = training_cost(run, text.vocab_size, processor, speeds.get((position, run.config.train_length)))
        costs.append(cost)
        left += [] if state.is_trained else [cost]
        left += [evaluation_cost(run, evaluation, text, processor) for evaluation in state.missing]
        lines += [f"# {run.name}: {state.describe()}", f"#   train: {_cost(cost)}; {counts[position]:,} parameters"]
        lines.append(_written(train_command(run, directory)))
        for one in run.evaluations:
            costs.append(evaluation_cost(run, one, text, processor))
            lines.append(f"#   evaluate {one.split} at {_lengths(one)}: {_cost(costs[-1])}")
            lines.append(_written(evaluation_command(run, one, directory)))
        lines.append("")
    return "\n".join([*lines, _totals(states, costs, left), _assumption(processor, bool(speeds))])


def describe_device(reproduction: Reproduction, devices: int, device_kind: str) -> str:
    """What the training of each run takes on `devices` of a kind; ValueError as `device_table`."""
    vocab_size = describe_text(reproduction).vocab_size
    return device_table(reproduction.sweep.runs, devices, device_kind, vocab_size)


def overview(reproductions: Sequence[Reproduction]) -> str:
    """One line a table: what it shows, and how much of it has been run; below, where else there are results."""
    lines = [("table", "setting", "runs", "results", "written", "what")]
    for one in reproductions:
        states = survey(one.sweep, one.directory)
        runs = f"{sum(state.is_trained for state in states)}/{len(states)}"
        results = f"{sum(state.results for state in states)}/{sum(state.run.results for state in states)}"
        written = "yes" if (one.outputs / f"table{one.number:02d}.md").exists() else "no"
        lines.append((str(one.number), one.setting.name, runs, results, written, one.definition.title))
    return aligned(lines, left=range(6)) + _elsewhere(reproductions)


def _elsewhere(counted: Sequence[Reproduction]) -> str:
    """The directories beside those `counted` that have results, of other overrides and files."""
    known = {one.directory.name for one in counted}
    beside = [folder for folder in listed(counted[0].scale_directory) if folder.name not in known]
    lines = [
        f"  {directory}: {sum(row.is_measured for row in latest(find_rows(directory)))} results\n"
        for directory in beside
        if (directory / ROWS_FILE).exists()
    ]
    return "".join(["\nOf other --overrides or files, and not counted here:\n", *lines]) if lines else ""


def _lengths(evaluation: Evaluation) -> str:
    number, first, last = len(evaluation.lengths), min(evaluation.lengths), max(evaluation.lengths)
    stride = "" if evaluation.stride is None else f", stride {evaluation.stride:,}"
    return (f"{first:,}" if number == 1 else f"{number} lengths, {first:,} to {last:,}") + stride


def _heading(reproduction: Reproduction) -> str:
    setting = reproduction.setting
    title = f"Table {reproduction.number} ({reproduction.definition.title}), {setting.scale} scale"
    scaled = f"; the paper's lengths divided by {setting.divisor}" if setting.divisor > 1 else ""
    note = f"\nnote: {reproduction.definition.note}" if reproduction.definition.note else ""
    return f"{title}: {len(reproduction.sweep.runs)} runs in {reproduction.directory}{scaled}{note}"


def _written(command: Command) -> str:
    return shlex.join(["python", command.script, *command.flags])


def _cost(cost: Cost | None) -> str:
    if cost is None:
        return "tokens not known: this text's size is not published"
    return f"{cost.tokens:,} tokens, {cost.flops:.2e} FLOPs, {format_hours(cost.hours)}"


def _totals(states: Sequence[RunState], costs: Sequence[Cost | None], left: Sequence[Cost | None]) -> str:
    trained = sum(state.is_trained for state in states)
    known = [cost for cost in costs if cost]
    total = f"in all {sum(cost.flops for cost in known):.2e} FLOPs, {format_hours(sum(cost.hours for cost in known))}"
    unknown = "" if len(known) == len(costs) else ", without what is not known"
    rest = format_hours(sum(cost.hours for cost in left if cost))
    return f"{total}{unknown}; {trained} of {len(states)} runs are trained, {rest} left"


def _assumption(processor: Processor, measured: bool) -> str:
    rate = f"{processor.flops_per_second:.3g} FLOPs/s x {processor.utilisation:g}"
    speeds = "; training where the paper's table 1 has a speed: its words per second on one V100" if measured else ""
    products = "FLOPs: products of the layers, the softmax's head and attention.\n"
    return f"device-hours assume {rate} (--device_flops, --utilisation){speeds}. {products}"


def format_hours(hours: float) -> str:
    """205 device-hours, 0.31 device-hours; minutes below a tenth."""
    if hours < 0.1:
        return f"{60 * hours:.2g} device-minutes"
    return f"{hours:,.0f} device-hours" if hours >= 10 else f"{hours:.2g} device-hours"


def describe_text(reproduction: Reproduction) -> Text:
    """The text as published; where the user names files, counted by making the token files that training will use.

    Raises:
      ValueError: files that the setting needs besides, or that can't be read.
    """
    setting, runs = reproduction.setting, reproduction.sweep.runs
    if setting.vocab_size is not None and not reproduction.files:
        return Text(setting.vocab_size, setting.tokens)
    setting.check_files(reproduction.files)
    data = runs[0].config.data
    tokenizer = prepare(data, "train").tokenizer()
    splits = sorted({evaluation.split for run in runs for evaluation in run.evaluations})
    return Text(tokenizer.vocab_size, {split: prepare(data, split, tokenizer).manifest.tokens for split in splits})


@functools.cache
def paper_speeds() -> dict[tuple[str, int], float]:
    """Words per second on one V100 in training, by position method and train length (table 1)."""
    table, found = Reproduction(1, "paper", pathlib.Path()), {}
    for (row, column), quantity in table.quantities.items():
        speed = parse_printed(table.paper.rows[row][table.definition.labels + column])
        if quantity.kind is TRAINING_SPEED and speed is not None:
            found[quantity.model.position, quantity.model.train_length] = speed
    return found
