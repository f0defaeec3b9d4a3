"""results.jsonl survives kills and concurrent writers, and later rows replace earlier ones."""

import json
import logging
import subprocess
import sys

import pytest

from alibi.reporting.rows import append_rows, is_measured, latest, read_rows, row_key
from tests.reporting.rowmaker import make_row


def test_rows_come_back_as_they_were_written(tmp_path):
    file = tmp_path / "new" / "results.jsonl"
    rows = [make_row(eval_length=128), make_row(eval_length=256, perplexity=None, error="too long")]
    append_rows(file, rows[:1])
    append_rows(file, rows[1:])
    assert read_rows(file) == rows
    assert read_rows(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_row_cut_by_a_kill_is_left_out_and_reported_and_the_next_append_is_whole(tmp_path, caplog, cut):
    file = tmp_path / "results.jsonl"
    append_rows(file, [make_row(eval_length=128), make_row(eval_length=256)])
    content = file.read_bytes()
    file.write_bytes(content[:-cut])
    with caplog.at_level(logging.WARNING):
        # Without its newline alone a row is still whole.
        expected = [128, 256] if cut == 1 else [128]
        assert [row["eval_length"] for row in read_rows(file)] == expected
        append_rows(file, [make_row(eval_length=512)])
        assert [row["eval_length"] for row in read_rows(file)] == [*expected, 512]
    assert ("line 2 is no whole row" in caplog.text) == (cut > 1)


def test_a_line_that_is_json_but_no_row_is_left_out(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text('12\n{"run": "alibi"}\n\xff\n', encoding="latin-1")
    assert read_rows(file) == []


def test_two_processes_that_append_at_once_lose_nothing(tmp_path):
    file = tmp_path / "results.jsonl"
    code = (
        "import sys; from alibi.reporting.rows import append_rows; from tests.reporting.rowmaker import make_row\n"
        "for i in range(100): append_rows(sys.argv[1], [make_row(sys.argv[2], i + 1)])"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(file), name]) for name in ("alibi", "t5")]
    assert [writer.wait() for writer in writers] == [0, 0]
    found = sorted((row["position"], row["eval_length"]) for row in read_rows(file))
    assert found == [(name, i + 1) for name in ("alibi", "t5") for i in range(100)]


def test_a_number_that_is_not_finite_becomes_null_with_the_reason_and_the_file_stays_strict_json(tmp_path):
    file = tmp_path / "results.jsonl"
    append_rows(file, [make_row() | {"nll_nats": float("inf")}, make_row() | {"word_perplexity": float("inf")}])
    failed, measured = read_rows(file)
    assert failed["nll_nats"] is None
    assert failed["error"] == "nll_nats is inf"
    assert measured["word_perplexity"] is None
    assert is_measured(measured), "a perplexity too large to write leaves the NLL what it is"
    assert "Infinity" not in file.read_text()


def test_a_row_without_a_key_is_refused_before_anything_is_written(tmp_path):
    row = make_row()
    del row["stride"], row["seed"]
    with pytest.raises(ValueError, match="a result row lacks stride, seed; a row holds run, position"):
        append_rows(tmp_path / "results.jsonl", [make_row(), row])
    assert not (tmp_path / "results.jsonl").exists()


def test_the_last_measurement_of_a_cell_counts_and_an_error_never_hides_one():
    good, newer = make_row(perplexity=9.0), make_row(perplexity=7.0, step=900)
    failed = make_row(perplexity=None, error="no memory left")
    assert latest([failed, good]) == [good]
    assert latest([good, failed]) == [good]
    assert latest([good, failed, newer]) == [newer]
    assert latest([failed, failed | {"error": "again"}]) == [failed | {"error": "again"}]
    assert [is_measured(row) for row in (good, failed)] == [True, False]
    assert row_key(good) != row_key(newer)


def test_rows_of_a_run_that_was_trained_anew_replace_those_of_its_name_in_every_cell():
    old = [make_row(eval_length=length) for length in (128, 256)]
    new, other = make_row(eval_length=128, config_hash="new"), make_row("t5")
    assert latest([*old, other, new]) == [other, new]
    assert row_key(old[0]) != row_key(new)


def test_an_empty_list_of_rows_makes_no_file(tmp_path):
    append_rows(tmp_path / "results.jsonl", [])
    assert not (tmp_path / "results.jsonl").exists()


def test_each_line_is_one_json_object(tmp_path):
    append_rows(tmp_path / "r.jsonl", [make_row(), make_row("t5")])
    assert [json.loads(line)["position"] for line in (tmp_path / "r.jsonl").read_text().splitlines()] == ["alibi", "t5"]
