"""The list of tables counts the user's results."""

from alibi.paper.plan import overview
from alibi.paper.reproduction import Reproduction
from tests.reporting.rowmaker import append_rows, make_row


def test_the_list_names_directories_that_it_does_not_look_into(tmp_path):
    """Else runs with --overrides look as if they had never been, unless the same overrides are
    given again.
    """
    plain, short = (
        Reproduction(2, "small", tmp_path, overrides=keys) for keys in ("", "train.steps=600")
    )
    head, line = overview([plain]).splitlines()
    assert head.split() == ["table", "setting", "runs", "results", "written", "what"]
    assert line.split()[:5] == ["2", "wikitext103-stand-in", "0/4", "0/120", "no"]
    rows = [make_row(length=length, perplexity=8.0) for length in (32, 33, 34)]
    again, failed = (
        make_row(length=32, perplexity=9.0),
        make_row(length=35, perplexity=None, error="no"),
    )
    append_rows(short.directory / "results.jsonl", [*rows, again, failed])
    (tmp_path / "small" / "cc100-empty").mkdir()
    said = "Of other --overrides or files, and not counted here:"
    expected = ["", said, f"  {short.directory}: 3 results"]
    assert overview([plain]).splitlines()[2:] == expected
    assert len(overview([short]).splitlines()) == 2
