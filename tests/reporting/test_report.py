"""The report's files."""

import re
import struct

import pytest

from alibi.reporting import report
from alibi.reporting.report import RunSource, write_report
from tests.reporting.rowmaker import append_rows, make_row


def test_report_with_tables_figures_and_failures(tmp_path):
    rows = [
        make_row(),
        make_row("t5", 256, None, error="too long"),
        make_row(split="test"),
        make_row("t5", split="test"),
    ]
    append_rows(tmp_path / "results.jsonl", rows)
    text = write_report(tmp_path, "A title", {"t5-L128": "no memory\nleft"})
    shown = (tmp_path / "report.md").read_text()
    assert shown.startswith("# A title\n\n**Perplexity by evaluation length: books, split valid")
    assert "- t5-L128: no memory left" in shown
    assert "**Bits per byte" in shown
    for name in ("extrapolation.png", "extrapolation-books-test.png"):
        assert f"({name})" in shown
        assert str(tmp_path / name) in text
        header = (tmp_path / name).read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", header[16:])
        assert width > 1400, "for a projector"
        assert height > 800
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("evaluator", "changed", "reason"),
    [
        ("absent:Accuracy", {}, "evaluator=absent:Accuracy: No module named 'absent'"),
        ("passkey", {"options": {"keys": 3}}, "evaluator 'passkey' has no option 'keys'"),
        ("context_use", {"cell": {"length": 128}, "results": {}}, "KeyError('lengths')"),
    ],
)
def test_rows_that_their_evaluator_cannot_show_are_left_out(
    tmp_path, caplog, evaluator, changed, reason
):
    """Such as an evaluator that another machine has: what others measured is reported."""
    others = [make_row("t5", length, evaluator=evaluator, **changed) for length in (128, 256)]
    append_rows(tmp_path / "results.jsonl", [make_row(), *others])
    assert re.findall(r"^(\w+)  .*8\.00", write_report(tmp_path), re.MULTILINE) == ["alibi"]
    (line,) = {record.getMessage() for record in caplog.records}
    assert line.startswith(f"the report leaves out rows of {evaluator}: {reason}")


def test_names_that_are_no_html_and_no_drawing(tmp_path):
    """At a control character vl_convert would abort the process, and a backslash makes one in a title."""
    rows = [
        make_row(run=f"x<img src=q>{one}", corpus=f"t{one}.txt", seed=seed)
        for seed, one in enumerate(["\x01", "\\b", "\\u", "\n", "\r", "\ufffe", "\ud83d", "\u2028"])
    ]
    append_rows(tmp_path / "results.jsonl", rows)
    write_report(tmp_path)
    assert len(list(tmp_path.glob("extrapolation*.png"))) == len(rows)
    shown = (tmp_path / "report.md").read_text()
    assert "| x&lt;img src=q>\x01 | 128 |" in shown
    assert "<img" not in shown
    assert "<img" not in (tmp_path / "report.html").read_text().partition("</script>")[0]


def test_without_rows_a_report_has_reasons_alone(tmp_path):
    assert "no results" in write_report(tmp_path)
    assert not list(tmp_path.iterdir())
    write_report(tmp_path, failures={"t5-L128": "no memory left"})
    assert "- t5-L128: no memory left" in (tmp_path / "report.md").read_text()


def test_tables_have_the_order_of_the_runs(tmp_path):
    """Jobs side by side finish in any order, and a sweep's report must not depend on it."""
    append_rows(tmp_path / "results.jsonl", [make_row("t5"), make_row("alibi"), make_row("none")])
    runs = [RunSource(f"{name}-L128-seed0", {}, "") for name in ("none", "t5")]
    write_report(tmp_path, runs=runs)
    lines = (tmp_path / "report.md").read_text().splitlines()
    methods = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert methods[2:5] == ["alibi", "none", "t5"]


def test_each_objective_has_a_figure_of_its_own(tmp_path, monkeypatch):
    """Positions in isolated documents are in a panel's name, so in its figure's name too."""
    masks = {"name": "masked", "mask_rate": 0.4, "mask_random": 0.1, "mask_kept": 0.1}
    kinds = {
        "plain": {},
        "restart": {"documents": "restart", "mean_context": 9.0},
        "through": {"documents": "through", "mean_context": 9.0},
        "masked": {"objective": {"name": "masked"}},
        "masked-40": {"objective": masks},
        "both": {"objective": {"name": "masked"}, "documents": "restart", "mean_context": 9.0},
    }
    monkeypatch.setattr(report, "png", lambda spec: b"")
    rows = [make_row(run=name, **changed) for name, changed in kinds.items()]
    append_rows(tmp_path / "results.jsonl", rows)
    write_report(tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "extrapolation.png",
        "extrapolation-books-valid-documents-restart.png",
        "extrapolation-books-valid-documents-through.png",
        "extrapolation-books-valid-masked.png",
        "extrapolation-books-valid-masked-2.png",
        "extrapolation-books-valid-masked-documents-restart.png",
    }
    text = (tmp_path / "report.md").read_text()
    assert text.count("![pseudo-perplexity of masked tokens by evaluation length]") == 3
    assert text.count("![perplexity by evaluation length]") == 3
    # The page's headings tell them apart as well.
    headings = re.findall(r"<section><h2>(.*?)</h2>", (tmp_path / "report.html").read_text())
    assert len(set(headings)) == len(headings) == 6
    assert headings[4].startswith(
        "Pseudo-perplexity of masked tokens: books, valid, mask_rate 0.4, mask_random 0.1,"
    )
