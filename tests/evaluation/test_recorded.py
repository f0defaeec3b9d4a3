"""Existing rows are found again: no row is computed or written twice, and none is taken for
another.
"""

import dataclasses
import errno
import shutil

import numpy as np
import pytest

from alibi.config import replaced
from alibi.evaluation import output
from alibi.evaluation.dumps import read_dump
from alibi.evaluation.evaluate import OutputError, evaluate_run, evaluate_runs
from alibi.reporting.recorded import merge_rows, record_row
from alibi.reporting.rows import latest, read_rows
from alibi.runs import RunDirectory
from alibi.runs.trained import TrainedRun
from tests.evaluation.runs import make_run, options_of, rows_of, subject_of
from tests.refusals import assert_refused
from tests.reporting.rowmaker import make_row


def test_rows_that_exist_are_not_computed_again(copied, alibi_run, learned_run, monkeypatch):
    before = (copied / "results.jsonl").read_text()
    monkeypatch.setattr(
        TrainedRun, "params", property(lambda self: pytest.fail("the parameters were loaded"))
    )
    options = options_of(output_dir=copied, multiples=(1, 2), dump_nll=True, report=False)
    assert evaluate_runs([alibi_run], options) == []
    monkeypatch.undo()
    # The learned run's limit is found again, and not written again.
    assert evaluate_runs([learned_run], options_of(output_dir=copied, lengths=(32,))) == []
    assert (copied / "results.jsonl").read_text() == before


def test_rows_of_another_dtype_are_others(copied, alibi_run, tmp_path):
    """Rows of bfloat16 are not taken for done, nor mixed with rows of float32."""
    rounded = RunDirectory(shutil.copytree(alibi_run, tmp_path / "alibi-run"))
    config = rounded.config()
    config = replaced(config, {"model.dtype": "bfloat16", "eval.dtype": "bfloat16"})
    rounded.write("config.json", dataclasses.asdict(config))
    options = options_of(output_dir=tmp_path / "dtypes", lengths=(16,))
    (before,) = rows_of([rounded.path], options)
    config = replaced(config, {"eval.dtype": "float32"})
    rounded.write("config.json", dataclasses.asdict(config))
    _, after = rows_of([rounded.path], options)
    assert (before.dtype, after.dtype) == ("bfloat16", "float32")
    assert after.config_hash == before.config_hash + "-float32"
    exact = next(
        row
        for row in read_rows(copied / "results.jsonl")
        if (row.run, row.length) == ("alibi-run", 16)
    )
    assert (
        after.results["nll_nats"]
        == pytest.approx(exact.results["nll_nats"], rel=1e-6)
        != before.results["nll_nats"]
    )
    assert latest([before, after]) == [after]


def test_another_checkpoint_or_text_is_another_row_and_dump(copied, alibi_run, tmp_path):
    (dump,) = copied.glob("nll/alibi-run-length=16-stride=16-step=5-*.npz")
    before = dump.read_bytes()
    options = {"output_dir": copied, "lengths": (16,), "dump_nll": True}
    assert evaluate_runs([alibi_run], options_of(**options, checkpoint="3")) == []
    for text in [tmp_path / "mine.txt", tmp_path / "copies" / "mine.txt"]:
        text.parent.mkdir(exist_ok=True)
        text.write_text(f"another text, of one line: {text}\n")
        assert evaluate_runs([alibi_run], options_of(**options, text_file=str(text))) == []
    steps_and_texts = [
        (row.step, row.corpus, row.split) for row in read_rows(copied / "results.jsonl")[4:]
    ]
    named = steps_and_texts[-1][1]
    assert steps_and_texts == [
        (3, "text.txt", "valid"),
        (5, "mine.txt", "file"),
        (5, named, "file"),
    ]
    assert named.startswith("mine.txt#")
    assert dump.read_bytes() == before
    dumps = copied.glob("nll/alibi-run-length=16-stride=16-*.npz")
    assert sorted(read_dump(each).row.step for each in dumps) == [3, 5, 5, 5]


def test_a_missing_dump_is_made_without_a_second_row(copied, alibi_run):
    (dump,) = copied.glob("nll/alibi-run-length=16-stride=16-*.npz")
    expected = read_dump(dump)
    dump.unlink()
    before = (copied / "results.jsonl").read_text()
    evaluate_runs(
        [alibi_run], options_of(output_dir=copied, lengths=(16,), dump_nll=True, report=False)
    )
    assert (copied / "results.jsonl").read_text() == before
    np.testing.assert_array_equal(read_dump(dump).nll_nats, expected.nll_nats)
    assert read_dump(dump).row.measurement == expected.row.measurement


def test_a_run_that_was_trained_anew_under_its_name_is_measured_again(copied, alibi_run, tmp_path):
    """But not beside another run of its name, which the report could not tell from it."""
    anew = make_run(tmp_path, "none", "alibi-run", text=alibi_run.parent / "text.txt")
    options = options_of(output_dir=copied, lengths=(16,), report=False)
    before = (copied / "results.jsonl").read_bytes()
    (refused,) = evaluate_runs([anew], options)
    assert refused.startswith(
        f"{alibi_run} and {anew} have the same name, and rows are known by it"
    )
    assert (copied / "results.jsonl").read_bytes() == before
    (copied / "rows" / "alibi-run" / "workdir").write_text(str(tmp_path / "was" / "alibi-run"))
    assert evaluate_runs([anew], options) == []
    found = [row for row in latest(read_rows(copied / "results.jsonl")) if row.run == "alibi-run"]
    assert [(row.position, row.length) for row in found] == [("none", 16)]


def test_an_output_directory_that_cannot_be_written(tmp_path, alibi_run, monkeypatch):
    (tmp_path / "file").touch()
    assert_refused(
        "can't be written",
        lambda: evaluate_runs([alibi_run], options_of(output_dir=tmp_path / "file" / "out")),
        raised=OutputError,
    )

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output, "record_row", full)
    assert_refused(
        "No space left on device",
        lambda: evaluate_runs([alibi_run], options_of(output_dir=tmp_path, lengths=(16,))),
        raised=OutputError,
    )


@pytest.mark.parametrize("run", ["..", ".hidden", "a|b", "a/b"])
def test_rows_of_any_run_are_found_again(tmp_path, run):
    row = make_row(run=run)
    assert record_row(tmp_path, row)
    assert not record_row(tmp_path, row)
    assert merge_rows(tmp_path) == [row] == read_rows(tmp_path / "results.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"rows", "results.jsonl"}


def test_names_of_texts_hold_nothing_that_breaks_a_table_or_a_figure(tmp_path):
    name = "é\n\x01\udcff\\\u2028🙂 <b>.txt"
    shown = output.Output(tmp_path).name_text(name, "file", "0")
    assert shown == "é" + 5 * "\ufffd" + "🙂 <b>.txt"


def test_existing_rows_decide_the_name_of_a_text(tmp_path):
    """Its later rows are compared with them; another text with that name gets a longer one."""
    record_row(tmp_path, make_row(corpus="text", text_hash="0123456789"))
    names = output.Output(tmp_path).name_text
    assert names("text.txt", "valid", "0123456789") == "text"
    assert names("text", "valid", "9876543210") == "text#987654"


def test_two_evaluations_at_once_make_each_row_once(alibi_run, tmp_path):
    """Both find nothing done when they start, and both compute everything."""
    options = options_of(output_dir=tmp_path, lengths=(16, 24))
    for one in [subject_of(alibi_run, options) for _ in range(2)]:
        evaluate_run(one, options)
        one.output.finish(report=False, workdirs=())
    assert [row.length for row in read_rows(tmp_path / "results.jsonl")] == [16, 24]
