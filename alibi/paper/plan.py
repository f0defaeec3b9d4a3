"""The plan of a table (its commands, with the size of each training), and the list of all tables."""

import shlex
from collections.abc import Sequence

from alibi.data.tokens import prepare
from alibi.model.decoder import build_model, count_parameters
from alibi.model.flops import training_flops
from alibi.paper.reproduction import Reproduction
from alibi.reporting.recorded import ROWS_FILE, find_rows
from alibi.reporting.rows import latest
from alibi.reporting.writers import aligned, format_duration
from alibi.storage.files import listed
from alibi.sweeps.estimates import seconds_left
from alibi.sweeps.processes import is_on_cpu
from alibi.sweeps.state import evaluation_command, survey, train_command


def describe_plan(reproduction: Reproduction) -> str:
    """Returns every train and evaluate command, with the parameters, tokens and FLOPs of each
    training, and the time left on this machine.
    """
    runs, directory = reproduction.sweep.runs, reproduction.directory
    states, size = survey(runs, directory), vocab_size(reproduction)
    # Once per method: the tables' methods have as many parameters at any length.
    configs = {run.config.position: run.config for run in runs}
    parameters = {
        name: count_parameters(build_model(config, size)) for name, config in configs.items()
    }
    setting, definition = reproduction.setting, reproduction.definition
    title = f"Table {reproduction.number} ({definition.title}), {setting.scale} scale: {len(runs)} runs in {directory}"
    if setting.scale != "paper":
        title += (
            f"; the paper's lengths divided by {setting.divisor}, and data.corpus={runs[0].config.data.corpus} in "
            f"place of {setting.name}"
        )
    lines, total = [title, *([f"note: {definition.note}"] if definition.note else []), ""], 0.0
    for state in states:
        run, train = state.run, state.run.config.train
        tokens = train.steps * train.batch_tokens
        flops = tokens * training_flops(run.config, size)
        total += flops
        commands = [train_command(run, directory)]
        commands += [evaluation_command(run, one, directory) for one in run.evaluations]
        lines += [
            f"# {run.name}: {state.describe()}; {parameters[run.config.position]:,} parameters, {tokens:,} tokens, "
            f"{flops:.2e} FLOPs of training",
            *(shlex.join(["python", *words]) for words in commands),
            "",
        ]
    trained = f"{sum(state.is_trained for state in states)} of {len(states)} runs are trained"
    left = seconds_left(states, states, rough=is_on_cpu(), vocab_size=size)
    lines.append(
        f"in all {total:.2e} FLOPs of training; {trained}, time left on this machine: "
        f"{format_duration(left)}\n"
    )
    return "\n".join(lines)


def vocab_size(reproduction: Reproduction) -> int:
    """Returns the text's published number of tokens in the vocabulary, or counts it in the user's
    files.

    Raises:
      ValueError: a needed file is not named, or can't be read.
    """
    setting = reproduction.setting
    if setting.vocab_size is not None and not reproduction.files:
        return setting.vocab_size
    setting.check_files(reproduction.files)
    return prepare(reproduction.sweep.runs[0].config.data, "train").tokenizer().vocab_size


def overview(reproductions: Sequence[Reproduction]) -> str:
    """Returns a line for each table with its progress, and a line for each directory with results of
    other overrides or files.
    """
    lines = [("table", "setting", "runs", "results", "written", "what")]
    for one in reproductions:
        states = survey(one.sweep.runs, one.directory)
        measured = sum(state.results for state in states)
        lines.append(
            (
                str(one.number),
                one.setting.folder,
                f"{sum(state.is_trained for state in states)}/{len(states)}",
                f"{measured}/{sum(run.results for run in one.sweep.runs)}",
                "yes" if (one.outputs / f"table{one.number:02d}.md").exists() else "no",
                one.definition.title,
            )
        )
    listed_names = {one.directory.name for one in reproductions}
    others = "".join(
        f"  {folder}: {sum(row.is_measured for row in latest(find_rows(folder)))} results\n"
        for folder in listed(reproductions[0].scale_directory)
        if folder.name not in listed_names and (folder / ROWS_FILE).exists()
    )
    counted = f"\nOf other --overrides or files, and not counted here:\n{others}" if others else ""
    return aligned(lines, left=range(6)) + counted
