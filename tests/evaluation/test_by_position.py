"""Contexts against the windows themselves, and the curse on texts where its share is known."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest

from alibi.config import load_config
from alibi.evaluation.by_position import (
    ByPosition,
    analyse,
    by_context,
    by_position,
    early_token_curse,
    range_sums,
)
from alibi.evaluation.dumps import (
    Dump,
    read_dump,
    write_dump,
)
from alibi.reporting.measure import measure_of
from alibi.reporting.panels import panel_groups
from alibi.reporting.rows import read_rows
from tests.hosts import ROOT
from tests.refusals import assert_refused
from tests.reporting.rowmaker import make_row


def measured(cost, length, stride, tokens=1000):
    """Returns a dump of a text in which a token costs `cost(context)`."""
    dump = Dump(row_of(length, stride), np.zeros(tokens, np.float32), np.zeros(tokens, np.int32))
    return dataclasses.replace(dump, nll_nats=cost(dump.context).astype(np.float32))


def row_of(length, stride, step=1):
    """Returns the row of a text that windows score."""
    known = {"run": "run", "step": step, "tokens_sha256": "t", "config_hash": "c"}
    options = {} if stride == length else {"stride": stride}
    return make_row(length=length, perplexity=None, options=options, **known)


def up_to(most):
    """Returns the cost of a model which gains from at most `most` tokens of context."""
    return lambda context: 5.0 - np.log(np.minimum(context, most))


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (5, 2)])
def test_the_context_is_that_of_the_literal_windows(length, stride):
    inputs, found = list(range(30)), []  # of token i the last input is i
    for start in range(0, 30, stride):
        window = inputs[max(0, start - (length - stride)) : start + stride]
        found += [token - window[0] + 1 for token in range(start, min(start + stride, 30))]
    assert measured(up_to(4), length, stride, tokens=30).context.tolist() == found


def test_rows_by_context_hold_each_token_once():
    one = measured(up_to(4), 6, 6)
    rows = by_context(one)
    assert [row["context_to"] for row in rows] == [1, 2, 4, 6]
    assert sum(row["tokens"] for row in rows) == 1000
    assert sum(row["nll_nats"] for row in rows) == pytest.approx(one.nll.sum())
    assert rows[0]["nll_nats"] / rows[0]["tokens"] == pytest.approx(5.0)
    assert rows[-1]["nll_nats"] / rows[-1]["tokens"] == pytest.approx(5.0 - np.log(4), rel=1e-6)


def test_rows_by_position_are_the_means_of_single_places():
    """10 tokens in blocks of 4: the places 1 and 2 are there three times, 3 and 4 twice; sliding by
    2: 1 and 2 once.
    """
    dump = Dump(row_of(4, 4), np.arange(10, dtype=np.float32), np.zeros(10, np.int32))
    rows = by_position(dump)
    about = {
        "analysis": "by_position",
        "run": "run",
        "step": 1,
        "tokens_sha256": "t",
        "config_hash": "c",
    }
    assert rows[0] == about | {
        "eval_length": 4,
        "mode": "nonoverlapping",
        "stride": 4,
        "position": 1,
        "tokens": 3,
        "nll_nats": 0.0 + 4.0 + 8.0,
    }
    found = [(row["position"], row["tokens"], row["nll_nats"]) for row in rows]
    assert found == [(1, 3, 12.0), (2, 3, 15.0), (3, 2, 8.0), (4, 2, 10.0)]
    sliding = by_position(dataclasses.replace(dump, row=row_of(4, 2)))
    found = [(row["position"], row["tokens"], row["nll_nats"]) for row in sliding]
    assert found == [(1, 1, 0.0), (2, 1, 1.0), (3, 4, 2.0 + 4 + 6 + 8), (4, 4, 3.0 + 5 + 7 + 9)]


def test_all_of_the_gain_is_the_curse_where_longer_context_is_worth_nothing():
    """A model uses 8 tokens, in blocks of 16 and 64: the paper's finding for ALiBi beyond its
    training length.
    """
    blocks = [measured(up_to(8), length, length) for length in (16, 64)]
    sliding = [measured(up_to(8), length, 1) for length in (16, 64)]
    row = early_token_curse(*blocks, [*blocks, *sliding])
    assert row["gain_nats"] > 0
    assert row["composition_share"] == pytest.approx(1.0, abs=1e-5)
    assert row["sliding_share"] == pytest.approx(1.0, abs=1e-5)
    assert row["sliding_stride"] == 1
    shares = {
        (one["context_from"], one["context_to"]): one["share"] for one in row["gain_by_context"]
    }
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares[9, 16] == pytest.approx(0.0, abs=1e-6)  # they had all the context that is of use


def test_only_part_of_it_where_longer_context_helps():
    """By hand for blocks of 2 and 4 of a cost 4 - context: 2.5 to 1.5; at 2 beyond the first token,
    2.25.
    """

    def cost(context):
        return 4.0 - context

    blocks = [measured(cost, length, length) for length in (2, 4)]
    sliding = [measured(cost, length, 1, tokens=100_000) for length in (2, 4)]
    row = early_token_curse(*blocks, [*blocks, *sliding])
    assert row["gain_nats"] == pytest.approx(1.0)
    assert row["composition_share"] == pytest.approx(0.25, abs=1e-4)
    # the windows' gain is twice the blocks'
    assert row["sliding_share"] == pytest.approx(1.0 - 2.0, abs=1e-3)


@pytest.mark.parametrize("changed", [{"options": {"bos": True}}, {"step": 2}])
def test_dumps_with_other_options_or_steps_are_apart_and_copies_count_once(changed):
    """With BOS a token's context is another one; they had been taken for copies."""
    plain = [measured(up_to(8), length, length) for length in (16, 64)]
    others = [
        dataclasses.replace(one, row=dataclasses.replace(one.row, **changed)) for one in plain
    ]
    apart = analyse([*plain, *others, *plain])
    curses = [line for line in apart if line["analysis"] == "early_token_curse"]
    assert len(apart) == 2 * len(analyse(plain))
    assert len(curses) == 2


def keys(file):
    """Returns each analysis's row keys, and the keys in its shares."""
    rows = map(json.loads, file.read_text().splitlines())
    return {row["analysis"]: [*row, *row.get("gain_by_context", [{}])[0]] for row in rows}


def test_from_dumps_to_rows_and_figure(run_script, tmp_path):
    for length in (16, 64):
        for stride in (length, 1):
            one = measured(up_to(8), length, stride)
            write_dump(tmp_path / f"whatever-{length}-{stride}.npz", one)
    assert read_dump(tmp_path / "whatever-16-1.npz").row == row_of(16, 1)
    done = run_script(
        ROOT / "scripts/analyse_nll.py", f"--dumps={tmp_path}/*.npz", f"--output_dir={tmp_path}"
    )
    assert "| run | 1 | t | 16 to 64 | 0.2835 [0.2820, 0.2849] |" in done.stdout
    assert "| 100% | 100% |" in done.stdout
    committed = keys(ROOT / "results/tables-small/early-token-curse/by_context.jsonl")
    assert keys(tmp_path / "by_context.jsonl") == committed
    assert committed.keys() == {"by_context", "by_position", "early_token_curse"}
    assert (tmp_path / "by_context.png").read_bytes().startswith(b"\x89PNG")


def test_a_dump_with_a_flipped_bit_is_refused(tmp_path):
    dump, file = measured(up_to(8), 16, 8), tmp_path / "dump.npz"
    write_dump(file, dump)
    whole = file.read_bytes()
    at = whole.index(b"NUMPY") + 127  # the first NLL, after the header of its array
    for place in [at, *range(0, len(whole), 29)]:
        damaged = bytearray(whole)
        damaged[place] ^= 64
        file.write_bytes(damaged)
        with contextlib.suppress(ValueError):  # or the bit stands for nothing, as those of dates
            np.testing.assert_array_equal(read_dump(file).nll_nats, dump.nll_nats)
            assert place != at
    write_dump(file, dump)
    assert file.read_bytes() == whole


@pytest.mark.parametrize(("seed", "means"), [(0, (5.0, 5.0)), (4, (5.2, 5.0))])
def test_no_share_of_a_gain_that_is_chance_or_hardly_known(seed, means):
    """A share is the inverse of a gain: 885%, for example, of the 0.001 nats of two lengths of
    equal cost.
    """
    random = np.random.default_rng(seed)
    short, long = (
        measured(lambda context, mean=mean: random.normal(mean, 1, context.size), length, length)
        for mean, length in zip(means, (16, 64), strict=True)
    )
    row = early_token_curse(short, long, [short, long])
    low, high = row["gain_interval"]
    assert low < row["gain_nats"] < high
    assert low < abs(row["gain_nats"]) / 2
    assert (low > 0) == (seed == 4)
    assert row["composition_share"] is None
    assert {one["share"] for one in row["gain_by_context"]} == {None}


def test_one_block_has_no_interval():
    """Drawn again and again it is always the same, which is no certainty; so it explains no share
    of a gain either.
    """
    short, long = (
        measured(lambda context: 9.0 - np.log(context), length, length) for length in (250, 1000)
    )
    assert {row["interval"] for row in by_context(long)} == {None}
    row = early_token_curse(short, long, [short, long])
    assert row["gain_nats"] > 0.1
    assert (row["gain_interval"], row["composition_share"]) == (None, None)


def row_by_position(dump):
    """Returns the row that the evaluator makes of the same NLL."""
    results = {"tokens": dump.nll_nats.size, "by_position": range_sums(dump)}
    return dataclasses.replace(dump.row, evaluator="by_position", results=results)


def test_the_report_has_the_curse_and_the_intervals_of_the_analysis():
    dumps = [measured(up_to(24), length, length, tokens=4096) for length in (16, 32, 64)]
    ((panel,),) = panel_groups(map(row_by_position, dumps))
    assert panel.columns == [1, 2, 4, 8, 16, 32, 64]
    for dump, series in zip(dumps, panel.series, strict=True):
        assert series.labels == (dump.length,)
        for line in by_context(dump):
            cell = series.cells[line["context_to"]]
            assert cell.mean == pytest.approx(line["nll_nats"] / line["tokens"], rel=1e-12)
            assert cell.interval.bounds == pytest.approx(line["interval"], rel=1e-5)
    curse = early_token_curse(dumps[0], dumps[-1], dumps)
    gain, share = curse["gain_nats"], curse["composition_share"]
    assert 0.3 < share < 0.9
    about = panel.measure.explanation(panel)
    assert about.endswith(f": run {gain:+.4f} ({gain * share:+.4f}) from 16 to 64.")
    alone = panel_groups([row_by_position(dumps[0])])[0][0]
    assert alone.measure.explanation(alone) == "", "a single length has no gain"


def test_a_last_window_that_ends_early_counts_the_tokens_it_has():
    dump = measured(up_to(8), 16, 16, tokens=1003)  # 62 windows, and 11 tokens
    row = row_by_position(dump)
    entries = measure_of(row).entries(row)
    found = [(entry.column, entry.results["tokens"]) for entry in entries]
    assert found == [(line["context_to"], line["tokens"]) for line in by_context(dump)]
    assert entries[-1].results["tokens_of_parts"] == (8,) * 62 + (3,)


def test_a_run_is_measured_reported_and_found_again(run_script, evaluated, alibi_run, tmp_path):
    """Its numbers are those of the analysis of the run's dumps."""
    words = (f"--workdirs={alibi_run}", "--evaluators=by_position", "--lengths=16,32,999")
    words += (f"--output_dir={tmp_path}",)
    run_script(ROOT / "eval_extrapolation.py", *words)
    rows = {row.length: row for row in read_rows(tmp_path / "results.jsonl")}
    assert "fewer than the length 999" in rows[999].error
    report = (tmp_path / "report.md").read_text()
    for length in (16, 32):
        (file,) = (evaluated / "nll").glob(f"alibi-run-length={length}-*")
        lines = by_context(read_dump(file))
        entries = measure_of(rows[length]).entries(rows[length])
        expected = [line["nll_nats"] / line["tokens"] for line in lines]
        assert [entry.results["nats"] for entry in entries] == pytest.approx(expected, rel=1e-6)
        assert f"| alibi-run | {length} | {expected[0]:.3f} ± " in report
    assert "155 tokens scored in windows of each length" in report
    assert (tmp_path / "by_position.png").stat().st_size > 1000
    again = run_script(ROOT / "eval_extrapolation.py", *words, "--noreport")
    assert again.stderr.count("done before") == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("configs/mlm.py", "objective=masked with by_position, which scores plain text"),
        (
            "configs/books.py:data.isolate_documents=restart",
            "by_position is for models that see whole",
        ),
    ],
)
def test_runs_whose_context_is_no_position_are_refused(keys, message):
    assert_refused(message, lambda: ByPosition().check(load_config(keys), (64,)))
