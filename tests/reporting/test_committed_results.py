"""The results in this repository are what the writers make of their rows, and show what the README says of them."""

import csv
import json
import pathlib
import re
import shutil

import pytest

from alibi.data.tokenizers import ByteTokenizer
from alibi.paper import results
from alibi.paper.reproduction import Reproduction
from alibi.reporting import plots
from alibi.reporting.contexts import ByContext
from alibi.reporting.report import write_report
from alibi.reporting.rows import Scoring, read_rows
from alibi.reporting.tables import MEMORY, TRAINING_SPEED
from alibi.sweeps.definition import load_sweep
from alibi.sweeps.state import run_directory

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "results"
ROWS = RESULTS / "quickstart" / "results.jsonl"
SMALL = RESULTS / "tables-small"
# The rows of each table, the updates of its runs (those of table 2 are the config's own), the cores of its caption.
TABLES = {
    1: ("results-200-updates-table-1.jsonl", 200, 2),
    2: ("results.jsonl", None, None),
    **dict.fromkeys((3, 5, 6, 7, 15), ("results-600-updates.jsonl", 600, 1)),
    **dict.fromkeys((4, 13, 14), ("results-600-updates-tables-4-13-14.jsonl", 600, 1)),
}


def test_alibi_extrapolates_and_sinusoidal_does_not():
    perplexity = {(row.position, row.eval_length): row.perplexity for row in read_rows(ROWS)}
    assert len(perplexity) == 20  # four methods, at L to 16L
    assert perplexity["alibi", 2048] < perplexity["alibi", 128]
    assert perplexity["sinusoidal", 1024] > 2 * perplexity["sinusoidal", 128]
    assert perplexity["alibi", 128] <= perplexity["sinusoidal", 128]


def test_the_table_of_the_readme_is_theirs():
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    rows = read_rows(ROWS)
    for position in ("sinusoidal", "rotary", "t5", "alibi"):
        of_method = sorted((row for row in rows if row.position == position), key=lambda row: row.eval_length)
        own = of_method[0].perplexity
        cells = [f"{row.perplexity:.2f} (×{row.perplexity / own:.2f})" for row in of_method]
        (line,) = (line.replace("*", "") for line in lines if line.startswith(f"| {position} |"))
        assert line == f"| {position} | 128 | {' | '.join(cells)} |"


@pytest.mark.parametrize("name", ["quickstart", "negative-results", "passkey"])
def test_reports_are_made_of_their_rows_byte_for_byte(name, tmp_path, monkeypatch):
    for figure in ("draw_extrapolation", "draw_passkeys"):
        monkeypatch.setattr(plots, figure, lambda _, file: file.touch())
    shutil.copy(RESULTS / name / "results.jsonl", tmp_path)
    sweep = load_sweep(ROOT / "configs" / "sweeps" / f"{name.replace('-', '_')}.py")
    write_report(tmp_path, sweep.title)
    assert (tmp_path / "report.md").read_bytes() == (RESULTS / name / "report.md").read_bytes()


def leave_finished_runs(table, cores):
    """What a table takes from the work directories of its runs, which are not committed: as its CSV has it."""
    first = table.definition.labels + 1  # the scale stands before the labels
    with (SMALL / f"table{table.number:02d}.csv").open() as file:
        printed = list(csv.reader(file))[1:]
    measured = {
        (quantity.model, quantity.kind): float(printed[row][first + 3 * column + 1])
        for (row, column), quantity in table.quantities.items()
        if quantity.kind in (TRAINING_SPEED, MEMORY)
    }
    parameters = {row.run: row.parameters for row in read_rows(table.directory.path / "results.jsonl")}
    for model, run in table.runs.items():
        directory, steps = run_directory(table.directory, run), run.config.train.steps
        directory.check(run.config)
        directory.claim(run.config, ByteTokenizer())
        directory.release()
        made = {"parameters": parameters[run.name], "device_count": 1} | ({"cores": cores} if cores else {})
        directory.write("provenance.json", made)
        memory = measured.get((model, MEMORY))
        more = {"peak_memory_bytes": memory} if memory else {}
        speed = measured.get((model, TRAINING_SPEED))
        directory.write_status("finished", step=steps, steps=steps, tokens_per_second=speed, **more)


@pytest.mark.parametrize("number", TABLES)
def test_tables_are_made_of_their_rows_byte_for_byte(number, tmp_path, monkeypatch):
    rows, steps, cores = TABLES[number]
    table = Reproduction(number, "small", tmp_path, overrides=f"train.steps={steps}" if steps else "")
    table.directory.path.mkdir(parents=True)
    shutil.copy(SMALL / rows, table.directory.path / "results.jsonl")
    leave_finished_runs(table, cores)
    monkeypatch.setattr(results, "draw_comparison", lambda compared, lines, file: file.touch())
    results.write_table(table, {})
    for suffix in (".md", ".tex", ".csv"):
        made, kept = ((folder / f"table{number:02d}{suffix}").read_text() for folder in (table.outputs.path, SMALL))
        if (number, suffix) == (1, ".csv"):  # its speeds are kept with six digits, and differences made of more
            made, kept = (re.sub(r"[+-]0[.]\d+", "", text) for text in (made, kept))
        assert made == kept, suffix


def test_the_rows_by_context_are_typed_and_written_as_they_were():
    lines = (SMALL / "early-token-curse" / "by_context.jsonl").read_text().splitlines()
    contents = [json.loads(line) for line in lines if '"by_context"' in line]
    rows = []
    for one in contents:
        of = Scoring(*(one[key] for key in ("run", "step", "tokens_sha256", "config_hash", "eval_length", "stride")))
        found = (one[key] for key in ("context_from", "context_to", "tokens", "nll_nats"))
        rows.append(ByContext(of, *found, interval=(0.0, 9.0)))
    # They are older than the intervals.
    assert [json.dumps(row.to_json()) for row in rows] == [
        json.dumps(one | {"interval": (0.0, 9.0)}) for one in contents
    ]
