"""The list of all tables, with the progress in the user's directory."""

from collections.abc import Sequence

from alibi.paper.reproduction import Reproduction
from alibi.reporting.recorded import ROWS_FILE, find_rows
from alibi.reporting.rows import latest
from alibi.reporting.writers import aligned
from alibi.storage.files import listed
from alibi.sweeps.state import survey


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
