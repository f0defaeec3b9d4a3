"""results.jsonl survives kills and concurrent writers, and later rows replace earlier ones."""

import dataclasses
import json
import logging
import math
import pathlib
import subprocess
import sys

import pytest

from alibi.reporting.rows import Device, Row, append_rows, latest, read_rows
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
        assert [row.eval_length for row in read_rows(file)] == expected
        append_rows(file, [make_row(eval_length=512)])
        assert [row.eval_length for row in read_rows(file)] == [*expected, 512]
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
    found = sorted((row.position, row.eval_length) for row in read_rows(file))
    assert found == [(name, i + 1) for name in ("alibi", "t5") for i in range(100)]


def test_a_number_that_is_not_finite_becomes_null_with_the_reason_and_the_file_stays_strict_json(tmp_path):
    file = tmp_path / "results.jsonl"
    append_rows(file, [make_row(nll_nats=float("inf")), make_row(word_perplexity=float("inf"))])
    failed, measured = read_rows(file)
    assert failed.nll_nats is None
    assert failed.error == "nll_nats is inf"
    assert measured.word_perplexity is None
    assert measured.is_measured, "a perplexity too large to write leaves the NLL what it is"
    assert "Infinity" not in file.read_text()


def test_a_row_without_a_key_is_refused_before_anything_is_written(tmp_path):
    content = make_row().to_json()
    del content["stride"], content["seed"]
    with pytest.raises(ValueError, match="a result row lacks stride, seed; a row holds run, position"):
        append_rows(tmp_path / "results.jsonl", map(Row.from_json, [make_row().to_json(), content]))
    assert not (tmp_path / "results.jsonl").exists()


ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("file", sorted(ROOT.glob("results/**/results*.jsonl")), ids=lambda file: file.parent.name)
def test_rows_made_before_are_written_again_as_they_were(file, tmp_path):
    """With what they lacked beside it: the device's kind and count as values of their own."""
    append_rows(tmp_path / "again.jsonl", read_rows(file))
    kept = file.read_text().splitlines()
    again = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    assert {(row.pop("device_kind"), row.pop("device_count")) for row in again} == {("cpu", 1)}
    assert [json.dumps(row) for row in again] == kept


def test_keys_that_this_version_does_not_know_are_kept(tmp_path):
    content = make_row().to_json() | {"note": "by hand", "temperature": 0.5}
    row = Row.from_json(content)
    assert row.more == {"note": "by hand", "temperature": 0.5}
    append_rows(tmp_path / "results.jsonl", [row])
    assert json.loads((tmp_path / "results.jsonl").read_text()) == content


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu x8", Device("cpu", 8)),
        ("TPU v5 lite x4", Device("TPU v5 lite", 4)),
        ("cpu", Device("cpu", None)),
        (None, None),
    ],
)
def test_old_rows_have_their_device_as_a_text_only(text, device):
    old = {key: value for key, value in make_row().to_json().items() if not key.startswith("device_")}
    row = Row.from_json(old | {"device": text})
    assert row.device == device
    assert row.to_json()["device"] == text
    assert row.speed_of_device == 5000.0 / ((device and device.count) or 1)


def test_the_last_measurement_of_a_cell_counts_and_an_error_never_hides_one():
    good, newer = make_row(perplexity=9.0), make_row(perplexity=7.0, step=900)
    failed = make_row(perplexity=None, error="no memory left")
    again = dataclasses.replace(failed, error="again")
    assert latest([failed, good]) == [good]
    assert latest([good, failed]) == [good]
    assert latest([good, failed, newer]) == [newer]
    assert latest([failed, again]) == [again]
    assert [row.is_measured for row in (good, failed)] == [True, False]
    assert good.measurement != newer.measurement


def test_rows_of_a_run_that_was_trained_anew_replace_those_of_its_name_in_every_cell():
    old = [make_row(eval_length=length) for length in (128, 256)]
    new, other = make_row(eval_length=128, config_hash="new"), make_row("t5")
    assert latest([*old, other, new]) == [other, new]
    assert old[0].measurement != new.measurement


def test_an_empty_list_of_rows_makes_no_file(tmp_path):
    append_rows(tmp_path / "results.jsonl", [])
    assert not (tmp_path / "results.jsonl").exists()


def test_each_line_is_one_json_object(tmp_path):
    append_rows(tmp_path / "r.jsonl", [make_row(), make_row("t5")])
    assert [json.loads(line)["position"] for line in (tmp_path / "r.jsonl").read_text().splitlines()] == ["alibi", "t5"]


def test_the_result_of_a_scoring():
    """Eight bits a token; two tokens a word, four bytes a token."""
    row = make_row(perplexity=None)
    found = row.scored(math.log(2) * 800, tokens=100, words=50, bytes=400, seconds=0.5)
    assert found.perplexity == pytest.approx(2**8)
    assert found.word_perplexity == pytest.approx(2**16)
    assert found.bits_per_byte == pytest.approx(2.0)
    assert found.tokens_per_second == 200.0
    assert row.scored(1e6, tokens=10, words=0, bytes=0, seconds=1.0).word_perplexity is None
    assert row.scored(1e6, tokens=10, words=0, bytes=0, seconds=1.0).bits_per_byte is None
    assert row.scored(1e6, tokens=10, words=1, bytes=1, seconds=1.0).perplexity is None
    assert row.scored(1000.0, tokens=10, words=1, bytes=1, seconds=1.0).word_perplexity is None
