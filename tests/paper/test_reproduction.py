"""The 15 tables as plans: every cell is measured, or marked as not run; commands, costs, results."""

import csv
import math
import pathlib

import pytest

from alibi.data.tokenizers import ByteTokenizer
from alibi.extras import MissingPackageError
from alibi.model.flops import keys_seen, training_flops
from alibi.paper import plan
from alibi.paper.definitions import TABLES
from alibi.paper.plan import overview, vocab_size
from alibi.paper.reproduction import Reproduction
from alibi.paper.results import (
    NOT_RUN_HERE,
    NOT_RUN_YET,
    compare_with_paper,
    comparison_figure,
    write_table,
)
from alibi.paper.settings import SCALES, find_setting
from alibi.reporting.charts import png
from alibi.reporting.tables import TRAINING_SPEED, Missing, Number
from alibi.runs import RunDirectory, config_hash
from alibi.sweeps.definition import load_config
from alibi.sweeps.state import evaluation_command
from tests.refusals import assert_refused
from tests.reporting.rowmaker import append_rows, make_row

# Position methods x train lengths; table 5 trains ALiBi and sinusoidal at 8 lengths, rotary and T5
# at 3.
RUNS = {
    1: 12,
    2: 4,
    3: 4,
    4: 4,
    5: 22,
    6: 5,
    7: 5,
    8: 6,
    9: 3,
    10: 3,
    11: 4,
    12: 6,
    13: 3,
    14: 3,
    15: 3,
}
# Rows of others' systems: table 7 has eight, table 10 four.
OTHERS = {7: 8, 10: 4}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Every table at both scales, in a directory where nothing has been run."""
    workdir = tmp_path_factory.mktemp("reproduce")
    return {
        (number, scale): Reproduction(number, scale, workdir)
        for number in TABLES
        for scale in SCALES
    }


@pytest.mark.parametrize("number", TABLES)
def test_every_printed_cell_is_measured_or_of_anothers_system(tables, number):
    table = tables[number, "paper"]
    assert len(table.sweep.runs) == RUNS[number]
    labels = table.definition.labels
    left_out = {
        row
        for row, cells in enumerate(table.paper.rows)
        for column, printed in enumerate(cells[labels:])
        if printed and (row, column) not in table.quantities
    }
    assert len(left_out) == OTHERS.get(number, 0)
    assert all(
        "et al." in label or "& Auli" in label
        for label in (table.paper.rows[row][0] for row in left_out)
    )


def test_tables_share_the_runs_of_their_setting(tables):
    runs = {}
    for number in (1, 2, 3, 4, 5, 6, 7, 13, 14, 15):
        for run in tables[number, "paper"].sweep.runs:
            runs.setdefault(run.name, set()).add(config_hash(run.config))
    # All are table 5's; equal names are equal configs, so that none is trained twice.
    assert set(runs) == {run.name for run in tables[5, "paper"].sweep.runs}
    assert all(len(hashes) == 1 for hashes in runs.values())


def test_other_overrides_and_files_have_runs_of_their_own(tmp_path):
    """Else two runs of different configs would have the same name."""
    settings = [
        {}, {"overrides": "train.steps=600"}, {"overrides": "train.steps=600,seed=1"},
        {"overrides": "model.dropout=0.5," * 20}, {"files": {"train": "a.txt"}}, {"files": {"train": "b.txt"}},
    ]  # fmt: skip
    directories = [Reproduction(2, "small", tmp_path, **setting).directory for setting in settings]
    assert len(set(directories)) == len(settings)
    assert directories[0] == Reproduction(5, "small", tmp_path).directory
    assert directories[0].name == "wikitext103-stand-in", "its text is another"
    assert Reproduction(2, "paper", tmp_path).directory.name == "wikitext103"
    assert directories[2].name == "wikitext103-stand-in-seed=1_train.steps=600", (
        "a comma would part it in --workdirs"
    )
    # in another order, and how it is computed
    same = {"overrides": "mesh.data=1,seed=1,train.steps=600"}
    assert Reproduction(2, "small", tmp_path, **same).directory == directories[2]
    assert all(len(directory.name) < 120 for directory in directories)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("number", [5, 8, 9, 10, 11, 12])  # the others' runs are table 5's
def test_commands_give_each_models_config(tables, number, scale):
    table = tables[number, scale]
    steps = load_config(table.setting.config, {}).train.steps
    for model, run in table.runs.items():
        (flag,) = run.config_flags
        told = load_config(flag.removeprefix("--config="), {})
        length = model.train_length // {"paper": 1, "medium": 4, "small": 16}[scale]
        assert (told.position, told.train_length) == (model.position, length)
        assert told.train.steps == round(model.updates * steps)
        assert told.train.batch_tokens % length == 0


def test_lengths_strides_and_splits(tables):
    def evaluations(number, scale, run):
        run = next(one for one in tables[number, scale].sweep.runs if one.name == run)
        return [
            (one.lengths, one.evaluators[0].stride, one.evaluators[0].split)
            for one in run.evaluations
        ]

    assert evaluations(5, "paper", "alibi-L1536-seed0") == [((1536, 2048, 3072), None, "valid")]
    assert evaluations(5, "paper", "sinusoidal-L64-seed0") == [((64,), None, "valid")]
    assert evaluations(6, "paper", "alibi-L512-seed0") == [
        ((3072,), None, "valid"),
        ((3072,), None, "test"),
    ]
    assert evaluations(7, "small", "alibi-L32-seed0") == [
        ((192,), 32, "valid"),
        ((192,), 32, "test"),
    ]
    assert evaluations(13, "small", "sinusoidal-L64-seed0") == [((64, 96, 128, 192), 1, "valid")]
    (rotary,) = evaluations(2, "paper", "rotary-L512-seed0")
    assert (len(rotary[0]), rotary[0][0], rotary[0][-1]) == (35, 512, 15512)
    # T5 has no words per second where it ran out of memory, but a cell that says so: it is tried
    # here.
    assert evaluations(2, "paper", "t5-L512-seed0")[0][0][-1] == 15512


def test_an_address_that_cannot_hold_runs_is_refused_before_any_plan():
    assert_refused(
        "s3://bucket",
        Reproduction,
        2,
        "small",
        "s3://bucket",
        raised=(ValueError, MissingPackageError),
    )


def test_equal_training_time_is_fewer_updates_of_a_run_of_its_own(tables):
    steps = {run.name: run.config.train.steps for run in tables[11, "paper"].sweep.runs}
    assert steps == {
        "sinusoidal-L1024-steps=46700-seed0": 46_700,
        "alibi-L512-seed0": 50_000,
        "sinusoidal-L2048-steps=44200-seed0": 44_200,
        "alibi-L1024-seed0": 50_000,
    }


def test_the_flops_of_the_papers_model_agree_with_its_speed(tables):
    """286,000 updates of 8 x 9,216 tokens, at table 1's 28.3k words per second on a V100, are its peak
    of 125e12 FLOPs times 0.3, within a tenth.
    """
    table = tables[6, "paper"]
    run = next(one for one in table.sweep.runs if one.name == "alibi-L512-seed0")
    tokens = run.config.train.steps * run.config.train.batch_tokens
    assert tokens == 21_086_208_000
    flops = tokens * training_flops(run.config, vocab_size(table))
    assert flops / (0.3 * 125e12) == pytest.approx(tokens / 28_300, rel=0.1)


@pytest.mark.parametrize("window", [0, 1, 2, 4, 9])
def test_the_keys_that_a_window_leaves_are_counted(window):
    expected = sum(i - j < (window or 4) for i in range(4) for j in range(i + 1))
    assert keys_seen(window, 4) == expected


def test_a_users_text_is_counted_instead_of_the_published_one(tmp_path):
    files = {split: str(tmp_path / f"{split}.txt") for split in ("train", "valid", "test")}
    for split, place in files.items():
        pathlib.Path(place).write_text(f"a b a {split}\n" * 3)
    table = Reproduction(
        6, "paper", tmp_path, files=files, overrides=f"data.cache_dir={tmp_path / 'cache'}"
    )
    assert vocab_size(table) == 8, "four special entries, a, b and train, padded"
    assert_refused(
        "needs --valid_file, --test_file",
        lambda: vocab_size(Reproduction(6, "paper", tmp_path, files={"train": files["train"]})),
    )


def test_the_plan_of_a_small_table_says_what_is_scaled_and_left(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "is_on_cpu", lambda: False)  # whose speed is not known
    monkeypatch.setattr(plan, "vocab_size", lambda reproduction: 30_000)
    printed = plan.describe_plan(Reproduction(2, "small", tmp_path))
    assert "0 of 4 runs are trained, time left on this machine: unknown" in printed
    assert "divided by 16, and data.corpus=books in place of wikitext103" in printed


def test_the_plan_names_every_command_and_needs_no_text(tables, tmp_path):
    thin = "model.num_layers=1,model.width=64,model.feed_forward=64"
    table = Reproduction(7, "paper", tmp_path, overrides=thin)
    printed = plan.describe_plan(table)
    for run in table.sweep.runs:
        for flag in run.config_flags:
            assert flag in printed
        for evaluation in run.evaluations:
            assert evaluation_command(run, evaluation, table.directory)[2] in printed
    assert printed.count("python train.py ") == 5
    assert printed.count("python eval_extrapolation.py ") == 10
    assert "21,086,208,000 tokens" in printed
    assert "0 of 5 runs are trained" in printed
    books = plan.describe_plan(Reproduction(9, "paper", tmp_path, overrides=thin))
    assert "data.train=TRAIN" in books
    assert "231,235,584" in books  # not the 247M that the paper prints


def finish(table, run_name, rows, **status):
    """Writes the work directory of a finished run and its `rows` (length, perplexity, other changed
    keys).
    """
    run = next(run for run in table.sweep.runs if run.name == run_name)
    directory = RunDirectory(table.directory / "runs" / run.name)
    directory.check(run.config)
    directory.claim(run.config, ByteTokenizer())
    directory.release()
    steps = run.config.train.steps
    directory.write("provenance.json", {"parameters": 246_933_504, "device_count": 8, "cores": 64})
    (directory.checkpoints / str(steps)).mkdir(parents=True, exist_ok=True)
    directory.write_status(
        "finished", step=steps, steps=steps, **({"tokens_per_second": 160_000.0} | status)
    )
    known = {"run": run.name, "step": steps, "config_hash": config_hash(run.config)}
    append_rows(
        table.directory / "results.jsonl",
        [
            make_row(length=length, perplexity=value, **(known | changed))
            for length, value, changed in rows
        ],
    )


def ours(cells):
    return [cell[1].mean for cell in cells]


def test_results_are_found_by_length_stride_and_split(tmp_path):
    table = Reproduction(7, "paper", tmp_path)
    sliding = {"options": {"stride": 512}}
    # Of another stride; of a run not at its end, which doesn't replace the rows before it.
    stride, early = (3072, 99.0, {}), (3072, 98.0, sliding | {"step": 9})
    rows = [stride, (3072, 18.25, sliding), (3072, 19.0, sliding | {"split": "test"}), early]
    finish(table, "alibi-L512-seed0", rows)
    finish(table, "t5-L3072-seed0", [(3072, None, sliding | {"error": "out of memory"})])
    found = compare_with_paper(table)
    by_label = {labels[0]: cells for labels, cells in zip(found.labels, found.cells, strict=True)}
    assert ours(by_label["ALiBi, L = 512, L_valid = 3072"]) == [246_933_504, 18.25, 19.0]
    assert found.cells[11][1][2].mean == pytest.approx(18.25 - 18.30)
    assert by_label["T5 Bias, L = 3072"][1][1] == Missing("out of memory", is_reason=True)
    assert by_label["Rotary, L = 3072"][1][1] == NOT_RUN_YET
    assert {cell[1] for cell in by_label["kNN-LM (Khandelwal et al., 2020)"]} == {NOT_RUN_HERE}


def test_speed_and_memory_come_from_the_training(tmp_path):
    table = Reproduction(1, "paper", tmp_path)
    speed = {"tokens_per_second": 90_000.0, "device": {"kind": "TPU v5 lite", "count": 4}}
    finish(table, "sinusoidal-L512-seed0", [(512, 20.0, speed)], peak_memory_bytes=16e9)
    found = compare_with_paper(table)
    # Words per second of one of the eight devices, and of the four that evaluated: the paper's are
    # of one.
    assert ours(found.cells[0]) == [20_000.0, 22_500.0, 16e9]
    assert "trained with 64 CPU cores" in found.caption
    assert "is marked" not in found.caption  # there are no perplexities
    assert table.quantities[0, 0].kind is TRAINING_SPEED
    # The first of the rows of equal length.
    assert found.cells[3][0][0].ratio == found.cells[3][0][0].mean / found.cells[0][0][0].mean


def test_a_small_table_says_what_its_lengths_are(tmp_path):
    table = Reproduction(7, "small", tmp_path)
    rows = [(192, 80.0, {"options": {"stride": 32}, "split": split}) for split in ("valid", "test")]
    finish(table, "alibi-L32-seed0", rows)
    found = compare_with_paper(table)
    assert found.labels[-2] == ("ALiBi, L = 512 (32), L_valid = 3072 (192)",)
    for text in (
        "windows of stride 512 (32)",
        "split valid and test",
        "; sliding windows of stride 32;",
    ):
        assert text in found.caption
    # 960 is the most that whole sequences of 192 leave of 1,024.
    assert "updates of 960 tokens at L = 192 and 1,024 tokens at L = 32" in found.caption
    assert "The paper's best perplexity of each column is marked, and ours if" in found.caption
    assert (
        "the paper's 35 lengths round to 30 here"
        in compare_with_paper(Reproduction(2, "small", tmp_path)).caption
    )
    last = compare_with_paper(Reproduction(12, "small", tmp_path)).header[-1]
    assert last == "L_valid = 2048 (128)"
    label = find_setting("wikitext103", "small").label("stride 1, L = 1,024, 1.3B")
    assert label == "stride 1, L = 1,024 (64), 1.3B"


def test_ratios_of_table_12_are_to_the_run_trained_at_the_length(tmp_path):
    found = compare_with_paper(Reproduction(12, "paper", tmp_path))
    rows = {labels[0]: cells for labels, cells in zip(found.labels, found.cells, strict=True)}
    trained = [*[512] * 4, 1024, 2048]
    for column, (cell, length) in enumerate(zip(found.cells[1], trained, strict=True)):
        reference = rows[f"Sinusoidal, L_train = {length}"][column]
        assert cell[0].ratio == cell[0].mean / reference[0].mean


def test_a_run_of_another_config_does_not_count(tmp_path):
    finish(
        Reproduction(6, "small", tmp_path, overrides="train.steps=300"),
        "alibi-L32-seed0",
        [(192, 90.0, {})],
    )
    found = compare_with_paper(Reproduction(6, "small", tmp_path))
    assert not any(isinstance(cell[1], Number) for cells in found.cells for cell in cells if cell)


def test_a_small_table_is_written_with_its_scale_everywhere(tmp_path):
    table = Reproduction(2, "small", tmp_path)
    # Each second of four parts costs a hundredth more: Student's t of three degrees, and 1% / sqrt(12).
    rows = [
        (length, value, {"parts": [250 * math.log(value) * share for share in (0.995, 1.005) * 2]})
        for length, value in ((32, 200.0), (44, 190.0))
    ]
    half = 190 * math.expm1(3.18245 * 0.01 / 12**0.5 * math.log(190))
    finish(table, "alibi-L32-seed0", rows)
    text = write_table(table, {"t5-L32-seed0": "no\n memory"})
    markdown = (table.outputs / "table02.md").read_text()
    assert markdown.startswith("**SMALL SCALE, NOT THE PAPER'S. Table 2 of the paper")
    # 712 of the paper's tokens are 44.5 here, and round to the even 44.
    line = next(line for line in markdown.splitlines() if line.startswith("| 712 (44) |"))
    assert (
        f"19.14 (\N{MULTIPLICATION SIGN}0.97) / **190.00 ± {half:.2f} (\N{MULTIPLICATION SIGN}0.95)** / -0.02"
        in line
    )
    assert "95% interval over the text alone; another book" in markdown
    assert "- t5-L32-seed0: no memory" in markdown
    assert "SMALL SCALE" in (table.outputs / "table02.tex").read_text()
    with (table.outputs / "table02.csv").open() as file:
        assert {row[0] for row in list(csv.reader(file))[1:]} == {"small"}
    assert (table.outputs / "table02.png").exists()
    assert str(table.outputs / "table02.md") in text
    assert overview([table]).splitlines()[1].split()[:5] == [
        "2",
        "wikitext103-stand-in",
        "1/4",
        "2/120",
        "yes",
    ]


@pytest.mark.parametrize(
    ("number", "run", "rows", "paper", "ours"),
    [
        (2, "alibi-L32-seed0", {32: 200.0, 44: 190.0}, [(512, 19.73), (712, 19.14)], [(32, 200.0), (44, 190.0)]),
        (13, "sinusoidal-L32-seed0", {32: 90.0}, [(512, 18.35)], [(32, 90.0)]),
    ],
)  # fmt: skip
def test_a_figure_has_both_sides_each_with_its_lengths(tmp_path, number, run, rows, paper, ours):
    table = Reproduction(number, "small", tmp_path)
    windows = {"options": {"stride": 1}} if number == 13 else {}
    finish(table, run, [(length, value, windows) for length, value in rows.items()])
    spec = comparison_figure(table, compare_with_paper(table))
    assert [part["title"] for part in spec["hconcat"]] == ["paper", "this project, small scale"]
    values = [[(*one.values(),)[1:3] for one in part["data"]["values"]] for part in spec["hconcat"]]
    assert values[1] == ours
    assert set(paper) <= set(values[0])
    (title,) = {part["layer"][1]["encoding"]["x"]["title"][0] for part in spec["hconcat"]}
    assert title.endswith(f"(table {number}, valid{', stride 1' * (number == 13)})")
    assert png(spec).startswith(b"\x89PNG")


def test_bars_are_ratios_to_the_reference(tmp_path):
    table = Reproduction(1, "small", tmp_path)
    finish(table, "sinusoidal-L32-seed0", [], tokens_per_second=80_000.0)
    finish(table, "alibi-L32-seed0", [], tokens_per_second=60_000.0)
    spec = comparison_figure(table, compare_with_paper(table))
    bars = [
        (one["group"].split()[0], one["percent"])
        for one in spec["hconcat"][1]["data"]["values"]
        if one["column"] == "Speed (Train)"
    ]
    assert bars == [("Sinusoidal", 100.0), ("ALiBi", 75.0)]


def test_texts_that_must_be_named(tmp_path):
    assert_refused(
        "needs --train_file, --valid_file, --test_file",
        lambda: find_setting("bookcorpus", "paper").check_files({}),
    )
    assert_refused(
        "needs --valid_file, --test_file",
        lambda: find_setting("wikitext103", "small").check_files({"train": "a.txt"}),
    )
    assert_refused(
        "--train_file=a,b", lambda: Reproduction(2, "small", tmp_path, files={"train": "a,b"}).sweep
    )
    # tables 11 and 12 score no test text
    find_setting("cc100", "small").check_files({"train": "a", "valid": "b"})
    files = {"train": "a", "valid": "b", "test": "c"}
    data = Reproduction(2, "small", tmp_path, files=files).sweep.runs[0].config.data
    assert {key: data[key] for key in ("corpus", *files)} == {"corpus": "text"} | files


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
    assert overview([plain]).splitlines()[2:] == ["", said, f"  {short.directory}: 3 results"]
    assert len(overview([short]).splitlines()) == 2
