"""What is printed before anything is run: a table's commands with their cost, and all tables with what has been run."""

import functools
import pathlib
import shlex
from collections.abc import Callable, Iterable, Sequence, Set

from alibi.reporting.report import ROWS_FILE
from alibi.reporting.rows import is_measured, latest, read_rows
from alibi.reproduction.cost import (
    Cost,
    Device,
    describe_text,
    evaluation_cost,
    paper_speeds,
    parameters,
    training_cost,
)
from alibi.reproduction.definitions import TABLES
from alibi.reproduction.reproduction import Reproduction
from alibi.sweeps.definition import Evaluation, Run
from alibi.sweeps.execute import evaluation_flags, is_in_progress, train_flags
from alibi.sweeps.plan import RunState, survey


def plan(reproduction: Reproduction, device: Device, *, measured: bool) -> str:
    """Every train and evaluate command, with tokens, parameters, operations and an estimate of device-hours.

    Args:
      measured: estimate training from the paper's words per second, where table 1 has them and no files are named.
    """
    setting, sweep = reproduction.setting, reproduction.sweep
    states = survey(sweep, reproduction.directory, in_progress=is_in_progress(reproduction.directory))
    splits = {evaluation.split for run in sweep.runs for evaluation in run.evaluations}
    text = describe_text(setting, sweep.runs[0].config, splits, reproduction.files)
    # Once a method: none of the tables' methods has parameters that depend on the length.
    methods = {run.config.position: run for run in sweep.runs}
    counts = {position: parameters(run, text.vocab_size) for position, run in methods.items()}
    published = not reproduction.files and (setting.scale, setting.name) == ("paper", "wikitext103")
    speeds = paper_speeds() if measured and published else {}
    trainings = [
        training_cost(run, text.vocab_size, device, speeds.get((run.config.position, run.config.train_length)))
        for run in sweep.runs
    ]
    scored = functools.partial(evaluation_cost, text=text, device=device)
    lines = [_heading(reproduction), ""]
    for state, cost in zip(states, trainings, strict=True):
        lines += _commands(
            reproduction, state, f"{_cost(cost)}; {counts[state.run.config.position]:,} parameters", scored
        )
    costs = trainings + [scored(run, evaluation) for run in sweep.runs for evaluation in run.evaluations]
    left = [cost for state, cost in zip(states, trainings, strict=True) if not state.is_trained]
    left += [scored(state.run, evaluation) for state in states for evaluation in state.missing]
    return "\n".join([*lines, _totals(states, costs, left), _assumption(device, bool(speeds))])


def _commands(
    reproduction: Reproduction, state: RunState, training: str, scored: Callable[[Run, Evaluation], Cost]
) -> list[str]:
    """One run's state and commands, each with its cost."""
    run, directory = state.run, reproduction.directory
    lines = [f"# {run.name}: {state.describe()}", f"#   train: {training}"]
    lines.append(_command("train.py", train_flags(run, directory)))
    for evaluation in run.evaluations:
        lines.append(f"#   evaluate {evaluation.split} at {_lengths(evaluation)}: {_cost(scored(run, evaluation))}")
        lines.append(_command("eval_extrapolation.py", evaluation_flags(run, evaluation, directory)))
    return [*lines, ""]


def overview(reproductions: Sequence[Reproduction]) -> str:
    """One line a table: what it shows, and how much of it has been run; below, where else there are results."""
    lines = [("table", "setting", "runs", "results", "written", "what")]
    for one in reproductions:
        states = survey(one.sweep, one.directory)
        trained = sum(state.is_trained for state in states)
        cells = sum(len(evaluation.lengths) for run in one.sweep.runs for evaluation in run.evaluations)
        written = "yes" if (one.outputs / f"table{one.number:02d}.md").exists() else "no"
        done = sum(state.results for state in states)
        what = TABLES[one.number].title
        lines.append((str(one.number), one.setting.name, f"{trained}/{len(states)}", f"{done}/{cells}", written, what))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines) + "\n"
    return table + _elsewhere({one.directory for one in reproductions})


def _elsewhere(counted: Set[pathlib.Path]) -> str:
    """The directories beside those `counted` that have results, of other overrides and files."""
    files = {file for directory in counted for file in directory.parent.glob(f"*/{ROWS_FILE}")}
    results = {
        file.parent: sum(map(is_measured, latest(read_rows(file))))
        for file in sorted(files)
        if file.parent not in counted
    }
    if not results:
        return ""
    lines = [f"  {directory}: {number} results" for directory, number in results.items()]
    return "\n".join(["", "Of other --overrides or files, and not counted here:", *lines, ""])


def _lengths(evaluation: Evaluation) -> str:
    number, first, last = len(evaluation.lengths), min(evaluation.lengths), max(evaluation.lengths)
    stride = "" if evaluation.stride is None else f", stride {evaluation.stride:,}"
    return (f"{first:,}" if number == 1 else f"{number} lengths, {first:,} to {last:,}") + stride


def _heading(reproduction: Reproduction) -> str:
    setting = reproduction.setting
    title = f"Table {reproduction.number} ({reproduction.definition.title}), {setting.scale} scale"
    scaled = f"; the paper's lengths divided by {setting.divisor}" if setting.divisor > 1 else ""
    heading = f"{title}: {len(reproduction.sweep.runs)} runs in {reproduction.directory}{scaled}"
    note = reproduction.definition.note
    return f"{heading}\nnote: {note}" if note else heading


def _command(script: str, flags: Sequence[str]) -> str:
    return shlex.join(["python", script, *flags])


def _cost(cost: Cost) -> str:
    if cost.tokens is None or cost.flops is None or cost.hours is None:
        return "tokens not known: this text's size is not published"
    return f"{cost.tokens:,} tokens, {cost.flops:.2e} FLOPs, {format_hours(cost.hours)}"


def _totals(states: Sequence[RunState], costs: Sequence[Cost], left: Sequence[Cost]) -> str:
    trained = sum(state.is_trained for state in states)
    unknown = "" if all(cost.hours is not None for cost in costs) else ", without what is not known"
    total = f"in all {_sum(cost.flops for cost in costs):.2e} FLOPs, {format_hours(_sum(cost.hours for cost in costs))}"
    rest = format_hours(_sum(cost.hours for cost in left))
    return f"{total}{unknown}; {trained} of {len(states)} runs are trained, {rest} left"


def _assumption(device: Device, measured: bool) -> str:
    rate = f"{device.flops_per_second:.3g} FLOPs/s x {device.utilisation:g}"
    text = f"device-hours assume {rate} (--device_flops, --utilisation)"
    speeds = "; training where the paper's table 1 has a speed: its words per second on one V100"
    return text + (speeds if measured else "") + ". FLOPs: products of the layers, the softmax's head and attention.\n"


def _sum(values: Iterable[float | None]) -> float:
    return sum(value for value in values if value is not None)


def format_hours(hours: float) -> str:
    """205 device-hours, 0.31 device-hours; minutes below a tenth."""
    if hours < 0.1:
        return f"{60 * hours:.2g} device-minutes"
    return f"{hours:,.0f} device-hours" if hours >= 10 else f"{hours:.2g} device-hours"
