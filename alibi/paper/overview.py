"""The list of all tables: the progress of each in the user's directory, and its committed results."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

from alibi.paper.reproduction import Reproduction
from alibi.reporting.recorded import ROWS_FILE, find_rows
from alibi.reporting.rows import Row, latest, read_rows
from alibi.reporting.writers import aligned
from alibi.runs import evaluation_hash
from alibi.storage.files import listed
from alibi.sweeps.definition import load_config
from alibi.sweeps.state import still_missing, survey


@dataclasses.dataclass(frozen=True)
class Committed:
    """The rows of a file that belong to a table: `results` of all its results."""

    results: int
    rows: tuple[Row, ...]
    on_files: bool  # the runs read text files, not the setting's own text


def overview(reproductions: Sequence[Reproduction], folder: pathlib.Path) -> str:
    """Returns a line for each table with its progress and its committed results, and below the
    results that no line counts.

    Args:
      folder: the committed rows of this scale; it may be missing.
    """
    lines = [("table", "setting", "runs", "results", "written", "committed", "what")]
    files = {file: read_rows(file) for file in sorted(folder.glob("*.jsonl"))}
    counted: set[int] = set()
    for one in reproductions:
        states = survey(one.sweep.runs, one.directory)
        runs = f"{sum(state.is_trained for state in states)}/{len(states)}"
        results = sum(state.run.results for state in states)
        written = "yes" if (one.outputs / f"table{one.number:02d}.md").exists() else "no"
        tables = _on_either_text(one)
        found = [find_committed(tables, rows) for rows in files.values()]
        counted.update(id(row) for part in found for row in part.rows)
        measured = f"{sum(state.results for state in states)}/{results}"
        lines.append(
            (
                str(one.number),
                one.setting.folder,
                runs,
                measured,
                written,
                _describe(found, results),
                one.definition.title,
            )
        )
    text = aligned(lines, left=range(7))
    if files:
        page = pathlib.Path(folder.parent.name, folder.name, "README.md")
        text += f"\n{page} says how the committed results were made.\n"
    for file, rows in files.items():
        if left := sum(row.is_trained and id(row) not in counted for row in rows):
            text += f"Of other configs, and not counted here: {left} results in {file.name}\n"
    if others := _others(reproductions):
        text += f"\nOf other --overrides or files, and not counted here:\n{others}"
    return text


def _on_either_text(one: Reproduction) -> list[Reproduction]:
    """Returns the table on the setting's own text, and on files called train.txt and so on."""
    if one.files:
        return [one]
    named = {split: f"{split}.txt" for split in one.setting.files_splits}
    return [one, Reproduction(one.number, one.setting.scale, one.scale_directory, files=named)]


def find_committed(tables: Sequence[Reproduction], rows: Sequence[Row]) -> Committed:
    """Returns the rows of the runs of one of `tables`, a table on either text: of the one with the
    most results. The rows have the runs' names, and the hashes of their configs with the row's
    updates.
    """
    found = []
    for table in tables:
        configs = {run.name: run.config_flags[0] for run in table.sweep.runs}
        own = [
            row
            for row in rows
            if row.run in configs and _hash(configs[row.run], row.step) == row.config_hash
        ]
        left = [
            still_missing(evaluation, [row for row in own if row.run == run.name])
            for run in table.sweep.runs
            for evaluation in run.evaluations
        ]
        results = sum(run.results for run in table.sweep.runs) - sum(
            len(evaluation.cells) for evaluation in left if evaluation
        )
        found.append(Committed(results, tuple(own), bool(table.files)))
    return max(found, key=lambda part: part.results)


def _describe(files: Sequence[Committed], results: int) -> str:
    """Returns 12/12 of the files with the most, the updates of their runs and whether their text
    was of files; "no" without rows.
    """
    most = max((part.results for part in files), default=0)
    if not most:
        return "no"
    best = [part for part in files if part.results == most]
    updates = " or ".join(
        f"{step:,}" for step in sorted({row.step for part in best for row in part.rows})
    )
    return f"{most}/{results}, {updates} updates" + ", text files" * best[0].on_files


@functools.cache
def _hash(config_flag: str, steps: int) -> str:
    """Returns the hash of a run's config, given by its flag, after `steps` updates."""
    return evaluation_hash(
        load_config(config_flag.removeprefix("--config="), {"train.steps": steps})
    )


def _others(reproductions: Sequence[Reproduction]) -> str:
    """Returns a line for each directory with results of other overrides or files."""
    known = {one.directory.name for one in reproductions}
    return "".join(
        f"  {folder}: {sum(row.is_measured for row in latest(find_rows(folder)))} results\n"
        for folder in listed(reproductions[0].scale_directory)
        if folder.name not in known and (folder / ROWS_FILE).exists()
    )
