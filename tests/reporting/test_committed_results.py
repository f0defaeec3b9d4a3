"""The committed tables and reports follow from their rows."""

import csv
import re
import runpy
import shutil

import pytest

from alibi.data.corpus import SPLITS
from alibi.data.tokenizers import ByteTokenizer
from alibi.paper import results
from alibi.paper.reproduction import Reproduction
from alibi.reporting import report
from alibi.reporting.report import write_report
from alibi.reporting.rows import read_rows
from alibi.reporting.tables import MEMORY, TRAINING_SPEED
from alibi.runs import evaluation_hash
from alibi.sweeps.definition import load_sweep
from alibi.sweeps.state import run_directory
from tests.hosts import ROOT

RESULTS = ROOT / "results"
SMALL = RESULTS / "tables-small"
# The reports, and the sweeps that they are of; two are of commands on their pages.
REPORTS = {
    "quickstart": "quickstart",
    "methods": "all_methods",
    "negative-results": "negative_results",
    "passkey": "passkey",
    "mlm": "mlm",
    "variants": "variants",
    "tasks": "tasks",
    "over-updates": None,
    "study": "study",
    "beyond-counting": None,
    "heads": None,
}
# The rows of each table by scale and number, the updates of its runs (those of table 2 are the
# config's own), the cores of its caption.
LATER = "results-600-updates-tables-4-13-14.jsonl"
TABLES = {
    ("small", 1): ("results-200-updates-table-1.jsonl", 200, 2),
    ("small", 2): ("results.jsonl", None, None),
    **{("small", number): ("results-600-updates.jsonl", 600, 1) for number in (3, 5, 6, 7, 15)},
    **{("small", number): (LATER, 600, 1) for number in (4, 13, 14)},
    **{("medium", number): ("results.jsonl", None, 1) for number in (2, 5, 7, 15)},
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports_are_made_of_their_rows_byte_for_byte(name, tmp_path, monkeypatch):
    for unread in ("png", "_page"):
        monkeypatch.setattr(report, unread, lambda *_: b"")
    shutil.copy(RESULTS / name / "results.jsonl", tmp_path)
    if sweep := REPORTS[name]:
        file = runpy.run_path(str(ROOT / "configs" / "sweeps" / f"{sweep}.py"))
        title = file["get_sweep"]()["title"]
    else:
        title = (RESULTS / name / "README.md").read_text().partition("\n")[0].removeprefix("# ")
    write_report(tmp_path, title)
    assert (tmp_path / "report.md").read_bytes() == (RESULTS / name / "report.md").read_bytes()


def leave_finished_runs(table, folder, cores):
    """Writes work directories of a table's runs, which are not committed, with the numbers of its
    CSV.
    """
    first = table.definition.labels + 1  # the scale stands before the labels
    with (folder / f"table{table.number:02d}.csv").open() as file:
        printed = list(csv.reader(file))[1:]
    measured = {
        (quantity.model, quantity.kind): float(printed[row][first + 3 * column + 1])
        for (row, column), quantity in table.quantities.items()
        if quantity.kind in (TRAINING_SPEED, MEMORY)
    }
    parameters = {row.run: row.parameters for row in read_rows(table.directory / "results.jsonl")}
    for model, run in table.runs.items():
        directory, steps = run_directory(table.directory, run), run.config.train.steps
        directory.check(run.config)
        directory.claim(run.config, ByteTokenizer())
        directory.release()
        made = {"parameters": parameters[run.name], "device_count": 1} | (
            {"cores": cores} if cores else {}
        )
        directory.write("provenance.json", made)
        memory = measured.get((model, MEMORY))
        more = {"peak_memory_bytes": memory} if memory else {}
        speed = measured.get((model, TRAINING_SPEED))
        directory.write_status("finished", step=steps, steps=steps, tokens_per_second=speed, **more)


@pytest.mark.parametrize(("scale", "number"), TABLES)
def test_tables_are_made_of_their_rows_byte_for_byte(scale, number, tmp_path, monkeypatch):
    (rows, steps, cores), folder = TABLES[scale, number], RESULTS / f"tables-{scale}"
    files = {split: f"{split}.txt" for split in SPLITS} if scale == "medium" else {}
    overrides = f"train.steps={steps}" if steps else ""
    table = Reproduction(number, scale, tmp_path, files=files, overrides=overrides)
    table.directory.mkdir(parents=True)
    shutil.copy(folder / rows, table.directory / "results.jsonl")
    leave_finished_runs(table, folder, cores)
    monkeypatch.setattr(results, "png", lambda spec: b"")
    results.write_table(table, {})
    for suffix in (".md", ".tex", ".csv"):
        made, kept = (
            place.joinpath(f"table{number:02d}{suffix}").read_text()
            for place in (table.outputs, folder)
        )
        # its speeds are kept with six digits, and differences made of more
        if (number, suffix) == (1, ".csv"):
            made, kept = (re.sub(r"[+-]0[.]\d+", "", text) for text in (made, kept))
        assert made == kept, suffix


def test_passkey_rows_of_more_updates_are_those_of_their_sweep():
    runs = load_sweep(ROOT / "configs" / "sweeps" / "passkey_late.py").runs
    expected = {(run.name, evaluation_hash(run.config), run.config.train.steps) for run in runs}
    found = {}
    for row in read_rows(RESULTS / "passkey" / "results-late.jsonl"):
        found.setdefault((row.run, row.config_hash, row.step), []).append(row.length)
    assert found.keys() == expected
    # perplexity at 4 lengths, and keys at 14 distances in them
    assert {len(lengths) for lengths in found.values()} == {18}
    assert {run.results for run in runs} == {18}, "as many cells"


def test_all_committed_reports_and_tables_are_among_them():
    assert {page.parent.name for page in RESULTS.glob("*/report.md")} == REPORTS.keys()
    tables = {(page.parent.name, page.stem) for page in RESULTS.glob("tables-*/table*.md")}
    assert tables == {(f"tables-{scale}", f"table{number:02d}") for scale, number in TABLES}
