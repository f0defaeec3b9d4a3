"""Rows survive kills, damage and concurrent writers; later rows replace earlier rows."""

import concurrent.futures
import dataclasses
import json
import logging
import math

import numpy as np
import pytest

from alibi.config.override import Override
from alibi.evaluation.base import NoResultError, mean_results
from alibi.evaluation.perplexity import text_results
from alibi.reporting.recorded import find_rows, merge_rows, record_row
from alibi.reporting.rows import Row, latest, read_rows
from tests.hosts import ROOT
from tests.refusals import assert_refused
from tests.reporting.rowmaker import append_rows, make_row


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = [make_row(length=128), make_row(length=256, perplexity=None, error="too long")]
    assert [record_row(tmp_path, row) for row in rows] == [True, True]
    assert find_rows(tmp_path) == rows
    assert not (tmp_path / "results.jsonl").exists()
    assert merge_rows(tmp_path) == rows == read_rows(tmp_path / "results.jsonl")
    assert find_rows(tmp_path / "absent") == merge_rows(tmp_path / "absent") == []
    assert not (tmp_path / "absent").exists()


def test_a_measurement_is_recorded_once_and_an_error_beside_it(tmp_path):
    row, failed = make_row(seconds=1.0), make_row(perplexity=None, error="no memory left")
    tried = [failed, failed, row, make_row(seconds=2.0), make_row(step=900)]
    assert [record_row(tmp_path, one) for one in tried] == [True, False, True, False, True]
    assert find_rows(tmp_path) == [failed, row, make_row(step=900)]


def test_a_results_file_of_before_stays_what_it_was_and_comes_first(tmp_path):
    old = [make_row(length=length) for length in (128, 256)]
    append_rows(tmp_path / "results.jsonl", old)
    assert find_rows(tmp_path) == merge_rows(tmp_path) == old
    assert not (tmp_path / "rows").exists()
    record_row(tmp_path, make_row("t5"))
    for _ in range(2):
        assert (
            merge_rows(tmp_path) == [*old, make_row("t5")] == read_rows(tmp_path / "results.jsonl")
        )
    (tmp_path / "results.jsonl").unlink()  # it is made of the others
    assert find_rows(tmp_path) == [*old, make_row("t5")]


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", "one bit"])
def test_a_damaged_row_is_named_and_made_again(tmp_path, caplog, damage):
    rows = [make_row(), make_row("t5")]
    for row in rows:
        record_row(tmp_path, row)
    (file,) = tmp_path.glob("rows/alibi-L128-seed0/perplexity-128-*.json")
    flipped = file.read_bytes().replace(b'"seed": 0', b'"seed": 1')
    assert flipped != file.read_bytes()
    file.write_bytes(flipped if damage == "one bit" else damage)
    with caplog.at_level(logging.WARNING):
        assert find_rows(tmp_path) == merge_rows(tmp_path) == rows[1:]
    assert caplog.text.count(f"{file} is damaged and was left out: evaluate again") == 1
    assert record_row(tmp_path, rows[0])
    assert find_rows(tmp_path) == rows[::-1]  # by the time that each was written


def test_sixteen_writers_at_once_lose_nothing_and_double_nothing(tmp_path):
    """Each writes the same three rows and a fourth, its own, and merges them."""
    common = [make_row(length=2**power) for power in range(3)]

    def write(number):
        for row in [*common, make_row("t5", number + 1)]:
            record_row(tmp_path, row)
        merge_rows(tmp_path)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(16)))
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    found = sorted((row["position"], row["cell"]["length"]) for row in map(json.loads, lines))
    assert found == [("alibi", 2**power) for power in range(3)] + [("t5", i + 1) for i in range(16)]


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_line_cut_by_a_kill_is_left_out_and_reported(tmp_path, caplog, cut):
    file = tmp_path / "results.jsonl"
    append_rows(file, [make_row(length=128), make_row(length=256)])
    file.write_bytes(file.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING):
        # Without its newline alone a row is still whole.
        assert [row.length for row in read_rows(file)] == ([128, 256] if cut == 1 else [128])
    assert ("line 2 is no whole row" in caplog.text) == (cut > 1)


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("results/**/results*.jsonl")), ids=lambda file: file.parent.name
)
def test_committed_rows_are_written_again_as_they_are(file):
    assert [json.dumps(row.to_json()) for row in read_rows(file)] == file.read_text().splitlines()


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


def test_runs_on_text_files_of_equal_names_and_other_content_do_not_mix():
    """Their configs have the same hash, and their work directories may have the same name."""
    one, other = (make_row(trained_on=text, seedless_hash="equal") for text in ("a", "b"))
    assert one.measurement != other.measurement
    assert one.but_seed != other.but_seed, "they are no two seeds of a sample"
    assert latest([one, other]) == [other]


def test_rows_of_a_run_under_another_method_are_cells_and_series_of_their_own():
    trained = make_row("rotary")
    tested = [
        dataclasses.replace(trained, override=override)
        for override in (Override("yarn", (("factor", 4), ("base", 1e4))), Override(window=64))
    ]
    assert latest([trained, *tested]) == [trained, *tested]
    assert [row.series for row in tested] == [
        "rotary-L128 as yarn(base=10000, factor=4)",
        "rotary-L128 with window 64",
    ]
    changed = dataclasses.replace(tested[1], config_hash=f"{trained.config_hash}+5c0de")
    at_256 = dataclasses.replace(changed, cell={"length": 256})
    assert latest([trained, *tested, at_256]) == [trained, tested[0], at_256], "other code"
    again = dataclasses.replace(
        tested[0], override=Override("yarn", (("base", 10_000), ("factor", 4.0)))
    )
    assert again.measurement == tested[0].measurement, "the same numbers in another order"
    assert "override" not in trained.to_json()


def test_an_override_is_read_as_it_was_written_however_deep_its_lists_are():
    """JSON has lists only: a list left within a tuple would be another override, and measured anew
    each time.
    """
    options = (("pairs", ("draw", 3, "slopes", (0.5, 0.25))),)
    override = Override("mine", options, logit_scale="log_n", max_position=0)
    row = dataclasses.replace(make_row("alibi"), override=override)
    found = Row.from_json(json.loads(json.dumps(row.to_json())))
    assert found == row
    assert (
        str(found.override)
        == "as mine(pairs=draw:3:slopes:0.5:0.25) with logit scale log_n, max position off"
    )
    assert found.measurement == row.measurement


def test_the_result_of_a_scoring():
    """Eight bits a token; two tokens a word, four bytes a token."""
    found = text_results(np.full(100, math.log(2) * 8), 0.5, words=50, bytes=400)
    assert found["perplexity"] == pytest.approx(2**8)
    assert found["word_perplexity"] == pytest.approx(2**16)
    assert found["bits_per_byte"] == pytest.approx(2.0)
    assert found["tokens_per_second"] == 200.0
    assert sum(found["parts"]) == pytest.approx(found["nll_nats"], rel=1e-5), "six digits each"
    of_bytes = text_results(np.full(400, math.log(2) * 2), 0.5, tokens=100, words=50, bytes=400)
    assert of_bytes == pytest.approx({key: found[key] for key in found if key != "parts"})
    without = text_results(np.full(10, 1e5), 1.0, words=0, bytes=0)
    assert without.keys() == {"nll_nats", "parts", "tokens", "words", "bytes", "tokens_per_second"}
    assert "word_perplexity" not in text_results(np.full(10, 100.0), 1.0, words=1, bytes=1)


def test_an_nll_that_is_not_finite_is_no_result():
    assert_refused(
        "the NLL is inf", text_results, np.array([1.0, np.inf]), 1.0, raised=NoResultError
    )
    assert_refused(
        "not finite", mean_results, "mean", np.array([1.0, np.nan]), raised=NoResultError
    )


@pytest.mark.parametrize("place", ["results.jsonl", "rows/run/128-0.json"])
def test_a_row_of_an_older_version_is_refused_in_a_line(place, tmp_path):
    """Left out like a damaged one, its measurement would be repeated beside it."""
    older = {"run": "alibi", "eval_length": 128, "mode": "nonoverlapping", "perplexity": 8.0}
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = older if place.endswith("l") else {"written": "2026-11-27", "row": older}
    file.write_text(json.dumps(whole))
    assert_refused(f"^{file}: .*older version", find_rows, tmp_path)
