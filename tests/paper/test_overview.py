"""The list of tables counts what a user has measured, and what the committed rows hold."""

import json
import re
import shutil

import pytest

from alibi.paper.definitions import TABLES
from alibi.paper.overview import overview
from alibi.paper.reproduction import Reproduction
from tests.hosts import ROOT
from tests.reporting.rowmaker import append_rows, make_row

RESULTS = ROOT / "results"
# The complete tables of each scale, with the updates of their runs.
COMPLETE = {
    "small": {1: "200 or 600", 2: "600 or 1,200"}
    | dict.fromkeys((3, 4, 5, 6, 7, 13, 14, 15), "600"),
    "medium": dict.fromkeys((1, 2, 5, 7, 15), "2,000"),
}


@pytest.mark.parametrize("scale", COMPLETE)
def test_committed_rows_are_counted_by_their_configs(scale, tmp_path):
    """Table 1 of the medium scale has its evaluations, but no speeds of training, which aren't rows."""
    tables = [Reproduction(number, scale, tmp_path) for number in TABLES]
    text = overview(tables, RESULTS / f"tables-{scale}")
    found = {}
    line = r"(\d+) +[\w-]+ +0/\d+ +0/(\d+) +no +(?:no|(\d+)/(\d+), (.*?) updates(, text files)?)  +\w.*"
    for shown in text.splitlines()[1:16]:
        number, results, measured, total, updates, on_files = re.fullmatch(line, shown).groups()
        assert (total or results) == results
        if measured == results:
            found[int(number)] = updates
            assert bool(on_files) == (scale == "medium")
    assert found == COMPLETE[scale]
    assert f"results/tables-{scale}/README.md says how" in text
    assert "Of other configs" not in text, "each committed row has a command that makes it"


def test_rows_of_other_configs_are_told_and_not_counted(tmp_path):
    folder = tmp_path / "results" / "tables-small"
    folder.mkdir(parents=True)
    lines = (RESULTS / "tables-small" / "results.jsonl").read_text().splitlines(keepends=True)
    changed = [json.dumps(json.loads(line) | {"config_hash": "0123456789ab"}) for line in lines[:3]]
    (folder / "results.jsonl").write_text("".join([f"{line}\n" for line in changed] + lines[3:]))
    shutil.copy(RESULTS / "tables-small" / "results-200-updates-table-1.jsonl", folder)
    text = overview([Reproduction(2, "small", tmp_path)], folder)
    assert "117/120, 1,200 updates" in text
    assert "Of other configs, and not counted here: 3 results in results.jsonl\n" in text


def test_the_list_names_directories_that_it_does_not_look_into(tmp_path):
    """Else runs with --overrides look as if they had never been, unless the same overrides are
    given again.
    """
    plain, short = (
        Reproduction(2, "small", tmp_path, overrides=keys) for keys in ("", "train.steps=600")
    )
    missing = tmp_path / "tables-small"
    assert len(overview([plain], missing).splitlines()) == 2
    rows = [make_row(length=length, perplexity=8.0) for length in (32, 33, 34)]
    again, failed = (
        make_row(length=32, perplexity=9.0),
        make_row(length=35, perplexity=None, error="no"),
    )
    append_rows(short.directory / "results.jsonl", [*rows, again, failed])
    (tmp_path / "small" / "cc100-empty").mkdir()
    said = "Of other --overrides or files, and not counted here:"
    expected = ["", said, f"  {short.directory}: 3 results"]
    assert overview([plain], missing).splitlines()[2:] == expected
    assert len(overview([short], missing).splitlines()) == 2
