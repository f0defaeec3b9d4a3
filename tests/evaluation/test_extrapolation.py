"""Work directories to rows: each text is scored once, and a failure does not lose the rest."""

import datetime
import json

import jax
import numpy as np
import pytest

from alibi.data.tokenizers import train_bpe
from alibi.data.tokens import prepare
from alibi.evaluation.dumps import find_dumps
from alibi.evaluation.evaluate import evaluate_each, evaluate_runs
from alibi.evaluation.perplexity import text_results
from alibi.evaluation.scorer import Scorer
from alibi.model.decoder import build_model, count_parameters
from alibi.reporting.rows import Device, read_rows
from alibi.runs import RunDirectory, processor
from alibi.runs.trained import TrainedRun
from alibi.training.setup import make_validator
from tests.evaluation.runs import (
    TEXT,
    TRAINED_ON,
    make_run,
    options_of,
    rows_by_cell,
    rows_of,
    subject_of,
)
from tests.hosts import ROOT
from tests.refusals import assert_refused


def test_rows_say_what_was_measured(evaluated, alibi_run):
    row = rows_by_cell(evaluated)["alibi-run", 32]
    config = RunDirectory(alibi_run).config()
    assert row.error is None
    assert (row.position, row.train_length, row.evaluator) == ("alibi", 16, "perplexity")
    assert (row.cell, row.options) == ({"length": 32}, {})
    assert (row.corpus, row.split, row.seed, row.step) == ("text.txt", "valid", 0, 5)
    assert row.trained_on == TRAINED_ON, "the config tells the names of text files alone"
    assert row.parameters == count_parameters(build_model(config, 256))
    assert row.device == Device("cpu", 8)
    nll = np.full(row.results["tokens"], row.results["nll_nats"] / row.results["tokens"])
    expected = text_results(nll, row.seconds, words=len(TEXT.split()), bytes=len(TEXT.encode()))
    same = row.results.keys() - {"parts"}
    assert {key: row.results[key] for key in same} == pytest.approx(
        {key: expected[key] for key in same}
    )
    assert len(row.results["parts"]) == 64
    assert (row.processor, row.jax) == (processor(), jax.__version__)
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(row.date)
    assert datetime.timedelta() < age < datetime.timedelta(days=1), "seconds of UTC"


def test_dumps_hold_every_token_in_stream_order(evaluated, alibi_run):
    row = rows_by_cell(evaluated)["alibi-run", 16]
    (file,) = evaluated.glob("nll/alibi-run-length=16-stride=16-step=5-*.npz")
    assert "[" in str(file), "a name is no pattern"
    (dump,) = find_dumps([str(file)])
    assert (dump.length, dump.nll_nats.dtype) == (16, np.float32)
    assert dump.nll.sum() == row.results["nll_nats"]
    assert dump.targets.size == row.results["tokens"]
    assert RunDirectory(alibi_run).tokenizer().decode(dump.targets).startswith(TEXT)


def test_a_length_beyond_the_learned_table_is_a_row_and_no_failure(evaluated):
    row = rows_by_cell(evaluated)["learned-run", 32]
    assert "16 positions and got a sequence of 32 tokens" in row.error
    assert row.results == {}
    assert rows_by_cell(evaluated)["learned-run", 16].results["nll_nats"] > 0
    assert not list(evaluated.glob("nll/learned-run-length=32-*"))


def test_a_length_beyond_the_text_is_a_row_and_no_number(tmp_path, alibi_run, learned_run):
    why = (
        f"the text has {len(TEXT)} tokens, fewer than the length 512; use lengths up to {len(TEXT)}, "
        "or a longer text (--text_file)"
    )
    for _ in range(2):  # nothing was measured, so the command must not look as if it had worked
        (failure,) = evaluate_runs(
            [alibi_run], options_of(output_dir=tmp_path, lengths=(512,), report=False)
        )
        assert failure == f"{alibi_run}: no length can be measured: {why}"
    (row,) = read_rows(tmp_path / "results.jsonl")
    assert (row.error, row.results, row.limit) == (why, {}, True)
    # Beyond a learned table more text would not help.
    assert (
        evaluate_runs([learned_run], options_of(output_dir=tmp_path, lengths=(512,), report=False))
        == []
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "4"}, "no checkpoint of step 4; there are: 3, 5"),
        (
            {"split": "test"},
            "the config names no test text: data.test is empty",
        ),
        ({"text_file": "none.txt"}, "none.txt"),
        (
            {"multiples": (1,), "lengths": (), "stride": 17},
            "stride=17 must be between 1 and the length 16",
        ),
    ],
)
def test_what_a_run_cannot_give(tmp_path, alibi_run, options, message):
    (failure,) = evaluate_runs(
        [alibi_run],
        options_of(**{"output_dir": tmp_path, "lengths": (16,), "report": False} | options),
    )
    assert message in failure
    assert read_rows(tmp_path / "results.jsonl") == []


def test_a_text_file_is_read_as_the_runs_own_text(tmp_path, monkeypatch):
    """The files of a run's valid split give its tokens, by blank lines with a space too, or by the rows
    of a dataset; flags read them otherwise.
    """
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    train_bpe([TEXT], 280).save(str(tmp_path / "bpe.json"))
    (tmp_path / "hub").mkdir()
    valid = tmp_path / "hub" / "validation.jsonl"
    rows = ["the fox\n", "", "NA", "the dog.\n\nthe quick brown fox jumps"]
    lines = "".join(json.dumps({"id": i, "body": row}) + "\n" for i, row in enumerate(rows))
    valid.write_text(lines)
    valid.with_name("train.jsonl").write_text(lines)
    text = tmp_path / "text.txt"
    text.write_text(" = the fox = \n \n the lazy dog . \n the fox . \n \n the quick brown fox . \n")
    own = {
        "blank": (text, "data.document_end=blank_line"),
        "rows": (
            valid,
            f"data.corpus=hub,data.name={valid.parent},data.train=train,data.valid=validation,data.column=body",
        ),
    }

    def tokens(run, **options):
        options = options_of(output_dir=tmp_path / "out", lengths=(16,), report=False, **options)
        (perplexity,) = options.evaluators
        return perplexity.text(subject_of(run, options), {})

    bpe = f"data.tokenizer=bpe,data.tokenizer_file={tmp_path / 'bpe.json'}"
    for name, (file, keys) in own.items():
        run = make_run(tmp_path, "alibi", name, steps=(3,), text=text, keys=f"{keys},{bpe}")
        split, alone = tokens(run), tokens(run, text_file=str(file))
        assert alone.tokens[:].tolist() == split.tokens[:].tolist()
        assert (alone.manifest.documents, alone.manifest.bytes) == (
            split.manifest.documents,
            split.manifest.bytes,
        )
    assert split.manifest.documents == 4, "a row, or a null, each"
    by_column = tokens(tmp_path / "blank", text_file=str(valid), column="body")
    assert by_column.tokens[:].tolist() == split.tokens[:].tolist()


def test_a_text_without_a_masked_token(tmp_path):
    """Among few tokens none may be masked: one sentence, in training too, and no division by 0."""
    (tmp_path / "text.txt").write_text("a fox")
    keys = "objective=masked,objective.mask_rate=0.01"
    run = make_run(
        tmp_path, "alibi", "masked-run", steps=(3,), text=tmp_path / "text.txt", keys=keys
    )
    options = options_of(output_dir=tmp_path / "out", multiples=(1,), report=False)
    (failure,) = evaluate_runs([run], options)
    told = "none of the 5 tokens of the text is predicted, so there is nothing to score; use a longer text"
    assert failure == f"{run}: {told}"
    trained = TrainedRun(run)
    text = prepare(trained.config.data, "valid", progress=False)
    assert_refused(told, make_validator, trained.config, trained.model, text)


def test_too_little_memory_is_a_row_and_is_tried_again(tmp_path, alibi_run, monkeypatch):
    def no_memory(*arguments, **keywords):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes")

    options = options_of(output_dir=tmp_path, lengths=(16,), report=False)
    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "score_windows", no_memory)
        assert evaluate_runs([alibi_run], options) == []
    failed, measured = rows_of([alibi_run], options)
    assert failed.error.startswith("out of memory at 16; try fewer")
    assert measured.results["nll_nats"] > 0


def test_options_are_checked_before_any_work(tmp_path):
    assert options_of(tmp_path, multiples=(4, 1, 4)).lengths_of(128) == [128, 512]
    assert options_of(tmp_path, lengths=(100,)).lengths_of(128) == [100]
    assert_refused("batch_tokens=0", options_of, tmp_path, batch_tokens=0)
    assert_refused(
        "have the same name",
        lambda: evaluate_runs(
            [tmp_path / "a" / "run", tmp_path / "b" / "run"], options_of(tmp_path)
        ),
    )


@pytest.mark.slow
def test_the_command_line(tmp_path, alibi_run, folder, run_script):
    text = tmp_path / "t.txt"
    text.write_text("one, two, three, four\n")
    arguments = (
        f"--workdirs={folder / 'nowhere'},{alibi_run}", "--multiples=1", "--stride=1", f"--text_file={text}",
        "--dump_nll", f"--output_dir={tmp_path}", "--position_options=slopes=0.5:0.25", "--window=4",
    )  # fmt: skip
    done = run_script(ROOT / "eval_extrapolation.py", *arguments, code=1)
    assert "Traceback" not in done.stderr
    assert "error: 1 of 2 work directories failed" in done.stderr
    assert "alibi-run as alibi(slopes=0.5:0.25) with window 4" in done.stdout
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["cell"] == {"length": 16}, "once the run's own length"
    assert row["override"] == {"position": "alibi", "options": {"slopes": [0.5, 0.25]}, "window": 4}
    assert len(list(tmp_path.glob("nll/alibi-run-length=16-stride=1-*.npz"))) == 1


def test_all_work_directories_are_looked_at_before_the_first_is_evaluated(
    tmp_path, alibi_run, folder, capsys
):
    """A name that is wrong is told at once, and the others are evaluated all the same."""
    options, told = options_of(tmp_path, report=False), []
    evaluate_each(
        [alibi_run, folder / "nowhere"], options, lambda *_: told.append(capsys.readouterr().err)
    )
    (before,) = told
    assert before.startswith(f"error: {folder / 'nowhere'} is no work directory of a run")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--evaluators=passkey", "--checkpoint=last"],
            "checkpoint=last must be latest, best or a step, such as 600",
        ),
        (
            ["--lengths=16", "--multiples=2"],
            "--lengths and --multiples are two ways",
        ),
        (
            ["--lengths=16,x"],
            "--lengths=16,x must be positive whole numbers",
        ),
        (
            ["--position_options=factor"],
            "--position_options=factor is not KEY=VALUE",
        ),
        (["--window=8,x"], "model.window='8,x' must be of type int"),
        (
            ["--context_windows=1"],
            "context_windows=1 is an option of context_use, not of perplexity; name its evaluator too",
        ),
        (
            ["--split=test", "--text_file=mine.txt"],
            "--split=test names a split",
        ),
        (["--column=body"], "--column=body is for --text_file"),
        (
            ["--evaluator_options=column=5"],
            "--column=5 is for --text_file",
        ),
        (["--evaluators="], "'evaluators' names nothing; give some of"),
        (
            ["--separately", "--dump_nll"],
            "--separately scores each document on its own",
        ),
        (
            ["--separately", "--stride=4"],
            "--separately scores each document on its own",
        ),
    ],
)
def test_flags_that_cannot_be(run_script, alibi_run, flags, message):
    done = run_script(ROOT / "eval_extrapolation.py", f"--workdirs={alibi_run}", *flags, code=1)
    assert done.stderr.startswith(f"error: {message}")
