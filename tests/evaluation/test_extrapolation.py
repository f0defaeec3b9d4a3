"""Work directories to rows: each text scored once, what exists kept, what fails told without losing the rest."""

import errno
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from alibi.data.tokenizers import make_tokenizer
from alibi.evaluation import extrapolation, output
from alibi.evaluation.dumps import read_dump, what_is_in
from alibi.evaluation.extrapolation import Options, Output, OutputError, RunEvaluation, evaluate_runs
from alibi.evaluation.perplexity import Scorer
from alibi.model.decoder import build_model, count_parameters
from alibi.parallel.sharding import make_mesh
from alibi.reporting.recorded import find_rows
from alibi.reporting.rows import Device, Override, latest, read_rows
from alibi.runs import RunDirectory
from alibi.runs.store import open_store
from alibi.runs.trained import TrainedRun, fitting_mesh
from alibi.training.checkpoint import Checkpoints
from alibi.training.state import initial_state
from configs import base

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 3 + "a last line, cut sho"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    return folder


def make_run(folder, position, name, seed=0, steps=(3, 5), text=None):
    """A work directory as training leaves it: two checkpoints, the first one the better."""
    config = base.get_config(f"position={position},length=16,model.num_layers=1,model.width=16,model.num_heads=2")
    config.update({"seed": seed, "model": {"feed_forward": 16}, "eval": {"batch_tokens": 32}})
    config.data.update({"corpus": "text", "cache_dir": str(folder / "cache")})
    config.data.train = config.data.valid = str(text or folder / "text.txt")
    run = RunDirectory(folder / name)
    tokenizer = make_tokenizer(config.data, None)
    run.check(config)
    run.claim(config, tokenizer)
    model = build_model(config, tokenizer.vocab_size)
    state = initial_state(model, optax.sgd(0.1), make_mesh(config.mesh, jax.devices()[:1]), seed)
    with Checkpoints(run.checkpoints) as checkpoints:
        for step in steps:
            checkpoints.save(state, step, {}, valid_nll=float(step))
    run.write_status("finished", step=steps[-1], steps=steps[-1])
    run.release()
    return run.path


@pytest.fixture(scope="module")
def alibi_run(folder):
    return make_run(folder, "alibi", "alibi-run")


@pytest.fixture(scope="module")
def learned_run(folder):
    return make_run(folder, "learned", "learned-run")


@pytest.fixture(scope="module")
def evaluated(folder, alibi_run, learned_run):
    """An output directory with both runs at 16 and 32; the tests that change it work on a copy."""
    options = Options(output_dir=folder / "out", multiples=(1, 2), dump_nll=True)
    assert evaluate_runs([alibi_run, learned_run], options) == []
    return folder / "out"


@pytest.fixture
def copied(evaluated, tmp_path):
    return pathlib.Path(shutil.copytree(evaluated, tmp_path / "out"))


def rows_by_cell(directory):
    return {(row.run, row.eval_length): row for row in read_rows(directory / "results.jsonl")}


def test_rows_say_what_was_measured(evaluated, alibi_run):
    row = rows_by_cell(evaluated)["alibi-run", 32]
    config = RunDirectory(alibi_run).config()
    assert row.error is None
    assert (row.position, row.train_length, row.stride, row.mode) == ("alibi", 16, 32, "nonoverlapping")
    assert (row.corpus, row.split, row.seed, row.step) == ("text.txt", "valid", 0, 5)
    assert row.parameters == count_parameters(build_model(config, 256))
    assert row.bytes == len(TEXT.encode())
    assert row.words == len(TEXT.split())
    assert row.device == Device("cpu", 8)
    assert row.perplexity == pytest.approx(math.exp(row.nll_nats / row.tokens))
    assert row.word_perplexity == pytest.approx(math.exp(row.nll_nats / row.words))
    assert row.bits_per_byte == pytest.approx(row.nll_nats / math.log(2) / row.bytes)
    assert row.tokens_per_second == pytest.approx(row.tokens / row.seconds)


def test_dumps_hold_every_token_in_stream_order(evaluated, alibi_run):
    row = rows_by_cell(evaluated)["alibi-run", 16]
    with np.load(evaluated / "nll" / "alibi-run-length=16-stride=16.npz") as dump:
        assert dump["nll_nats"].dtype == np.float32
        assert dump["nll_nats"].sum(dtype=np.float64) == row.nll_nats
        assert dump["targets"].size == row.tokens
        assert RunDirectory(alibi_run).tokenizer().decode(dump["targets"]).startswith(TEXT)


def test_a_length_beyond_the_learned_table_is_a_row_and_no_failure(evaluated):
    row = rows_by_cell(evaluated)["learned-run", 32]
    assert "16 positions and got a sequence of 32 tokens" in row.error
    assert row.nll_nats is row.perplexity is row.tokens is None
    assert rows_by_cell(evaluated)["learned-run", 16].nll_nats > 0
    assert not (evaluated / "nll" / "learned-run-length=32-stride=32.npz").exists()


def test_two_evaluations_at_once_make_each_row_once(alibi_run, tmp_path):
    """Both find nothing done when they start, and both compute everything."""
    options = Options(output_dir=tmp_path, lengths=(16, 24))
    both = [RunEvaluation(str(alibi_run), options, Output(tmp_path)) for _ in range(2)]
    for one in both:
        one.run()
        one.output.finish(report=False)
    assert [row.eval_length for row in read_rows(tmp_path / "results.jsonl")] == [16, 24]


def test_a_latest_checkpoint_that_training_replaces_meanwhile_is_followed(alibi_run, tmp_path):
    run = RunDirectory(shutil.copytree(alibi_run, tmp_path / "run"))
    evaluation = RunEvaluation(str(run), Options(output_dir=tmp_path, lengths=(16,)), Output(tmp_path))
    (run.path / "checkpoints" / "5").rename(run.path / "checkpoints" / "7")
    evaluation.run()
    assert [row.step for row in find_rows(tmp_path)] == [7]
    shutil.rmtree(run.path / "checkpoints" / "7")  # the older one, of step 3, is not what was asked for
    with pytest.raises(ValueError, match="has no checkpoint of step 7"):
        _ = RunEvaluation(str(run), Options(output_dir=tmp_path, checkpoint="7"), Output(tmp_path)).trained.params


def test_rows_may_go_to_an_object_store(alibi_run, evaluated, s3_bucket):
    options = Options(output_dir=f"{s3_bucket}/out", lengths=(16,), dump_nll=True)
    for _ in range(2):
        assert evaluate_runs([alibi_run], options) == []
    (row,) = find_rows(f"{s3_bucket}/out")
    assert row.nll_nats == rows_by_cell(evaluated)["alibi-run", 16].nll_nats
    names = open_store(f"{s3_bucket}/out").names()
    assert [name for name in names if not name.startswith("rows/alibi-run/16-")] == [
        "extrapolation.png", "nll/alibi-run-length=16-stride=16.npz", "report.md", "results.jsonl"
    ]  # fmt: skip


def test_the_report_is_written(evaluated):
    assert "alibi-run" in (evaluated / "report.md").read_text()
    assert (evaluated / "extrapolation.png").stat().st_size > 10_000
    assert not list(evaluated.glob(".*"))


def test_rows_that_exist_are_not_computed_again(copied, alibi_run, learned_run, monkeypatch):
    before = (copied / "results.jsonl").read_text()
    monkeypatch.setattr(TrainedRun, "params", property(lambda self: pytest.fail("the parameters were loaded")))
    assert evaluate_runs([alibi_run], Options(output_dir=copied, multiples=(1, 2), dump_nll=True, report=False)) == []
    monkeypatch.undo()
    # The learned run's limit is found again, and not written again.
    assert evaluate_runs([learned_run], Options(output_dir=copied, lengths=(32,), report=False)) == []
    assert (copied / "results.jsonl").read_text() == before


def test_rows_that_call_a_text_by_its_kind_are_found_and_have_its_later_rows_beside_them(copied, alibi_run, folder):
    """As rows did once: "text" and "hub" told nothing of which text."""
    file = copied / "results.jsonl"
    shutil.rmtree(copied / "rows")
    file.write_text(file.read_text().replace('"corpus": "text.txt"', '"corpus": "text"'))
    assert len(read_rows(file)) == 4
    options = Options(output_dir=copied, lengths=(16, 24), report=False)
    assert evaluate_runs([alibi_run], options) == []
    assert [(row.corpus, row.eval_length) for row in read_rows(file)[4:]] == [("text", 24)]
    (folder / "other").mkdir()
    (folder / "other" / "text.txt").write_text(TEXT * 2)  # another text of the same file name
    other = make_run(folder, "none", "other-run", text=folder / "other" / "text.txt")
    assert evaluate_runs([other], options) == []
    assert {row.corpus for row in read_rows(file)[5:]} == {"text.txt"}
    again = make_run(folder, "none", "another-run", text=folder / "text.txt")
    assert evaluate_runs([again], options) == []
    assert {row.corpus for row in read_rows(file)[7:]} == {"text"}


def test_rows_of_another_dtype_are_others(copied, alibi_run, tmp_path):
    """What bfloat16 evaluated is not taken for done, nor mixed with what float32 does now."""
    rounded = RunDirectory(shutil.copytree(alibi_run, tmp_path / "alibi-run"))
    config = rounded.config()
    config.model.dtype = config.eval.dtype = "bfloat16"  # as runs of bfloat16 were evaluated before there was a choice
    rounded.write("config.json", config.to_dict())
    output = tmp_path / "dtypes"
    assert evaluate_runs([rounded.path], Options(output_dir=output, lengths=(16,), report=False)) == []
    config.eval.dtype = "float32"
    rounded.write("config.json", config.to_dict())
    assert evaluate_runs([rounded.path], Options(output_dir=output, lengths=(16,), report=False)) == []
    before, after = read_rows(output / "results.jsonl")
    assert (before.dtype, after.dtype) == ("bfloat16", "float32")
    assert after.config_hash == before.config_hash + "-float32"
    exact = next(row for row in read_rows(copied / "results.jsonl") if (row.run, row.eval_length) == ("alibi-run", 16))
    assert after.nll_nats == pytest.approx(exact.nll_nats, rel=1e-6) != before.nll_nats
    assert latest([before, after]) == [after]


def test_another_checkpoint_or_text_is_another_row(copied, alibi_run, folder):
    options = {"output_dir": copied, "lengths": (16,), "report": False}
    assert evaluate_runs([alibi_run], Options(**options, checkpoint="3")) == []
    (folder / "mine.txt").write_text("another text, of one line\n")
    assert evaluate_runs([alibi_run], Options(**options, text_file=str(folder / "mine.txt"))) == []
    (folder / "copies").mkdir()
    (folder / "copies" / "mine.txt").write_text("a text of its own, of the same name\n")
    assert evaluate_runs([alibi_run], Options(**options, text_file=str(folder / "copies" / "mine.txt"))) == []
    steps_and_texts = [(row.step, row.corpus, row.split) for row in read_rows(copied / "results.jsonl")[4:]]
    named = steps_and_texts[-1][1]
    assert steps_and_texts == [(3, "text.txt", "valid"), (5, "mine.txt", "file"), (5, named, "file")]
    assert named.startswith("mine.txt#")


def test_a_checkpoint_is_latest_best_or_a_step(alibi_run):
    assert [TrainedRun(alibi_run, name).step for name in ("latest", "best", "3")] == [5, 3, 3]


def test_a_missing_dump_is_made_without_a_second_row(copied, alibi_run):
    dump = copied / "nll" / "alibi-run-length=16-stride=16.npz"
    expected = read_dump(dump)
    dump.write_bytes(dump.read_bytes()[:100])
    before = (copied / "results.jsonl").read_text()
    evaluate_runs([alibi_run], Options(output_dir=copied, lengths=(16,), dump_nll=True, report=False))
    assert (copied / "results.jsonl").read_text() == before
    np.testing.assert_array_equal(read_dump(dump).nll_nats, expected.nll_nats)
    assert what_is_in(dump) == expected.of
    assert (expected.of.run, expected.of.length, expected.of.stride, expected.of.step) == ("alibi-run", 16, 16, 5)


def test_a_dump_of_another_checkpoint_or_text_has_a_name_of_its_own(copied, alibi_run):
    dump = copied / "nll" / "alibi-run-length=16-stride=16.npz"
    before = dump.read_bytes()
    for _ in range(2):
        options = Options(output_dir=copied, lengths=(16,), dump_nll=True, report=False, checkpoint="3")
        assert evaluate_runs([alibi_run], options) == []
    assert dump.read_bytes() == before
    (other,) = copied.glob("nll/alibi-run-length=16-stride=16-step=3-*.npz")
    assert read_dump(other).of.step == 3


def test_a_run_that_was_trained_anew_under_its_name_is_measured_again(copied, alibi_run, tmp_path):
    anew = make_run(tmp_path, "none", "alibi-run", text=alibi_run.parent / "text.txt")
    assert evaluate_runs([anew], Options(output_dir=copied, lengths=(16,), report=False)) == []
    found = [row for row in latest(read_rows(copied / "results.jsonl")) if row.run == "alibi-run"]
    assert [(row.position, row.eval_length) for row in found] == [("none", 16)]


def test_a_length_beyond_the_text_is_a_row_and_no_number(tmp_path, alibi_run, learned_run):
    why = (
        f"the text has {len(TEXT)} tokens, fewer than the length 512; use lengths up to {len(TEXT)}, "
        "or a longer text (--text_file)"
    )
    for _ in range(2):  # nothing was measured, so the command must not look as if it had worked
        (failure,) = evaluate_runs([alibi_run], Options(output_dir=tmp_path, lengths=(512,), report=False))
        assert failure == f"{alibi_run}: no length can be measured: {why}"
    (row,) = read_rows(tmp_path / "results.jsonl")
    assert (row.error, row.perplexity, row.limit) == (why, None, True)
    # Beyond a learned table more text would not help.
    assert evaluate_runs([learned_run], Options(output_dir=tmp_path, lengths=(512,), report=False)) == []


def test_sliding_windows_are_a_mode_of_their_own(tmp_path, alibi_run, evaluated):
    evaluate_runs([alibi_run], Options(output_dir=tmp_path, lengths=(16,), stride=5, report=False))
    (row,) = read_rows(tmp_path / "results.jsonl")
    assert (row.mode, row.stride) == ("sliding", 5)
    assert row.tokens == rows_by_cell(evaluated)["alibi-run", 16].tokens


def test_one_bad_work_directory_does_not_lose_the_others(tmp_path, folder, alibi_run):
    damaged = shutil.copytree(alibi_run, tmp_path / "damaged")
    for file in (damaged / "checkpoints" / "5").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    empty = shutil.copytree(alibi_run, tmp_path / "empty")
    (empty / "config.json").write_text("{}")
    untrained = shutil.copytree(alibi_run, tmp_path / "untrained", ignore=shutil.ignore_patterns("checkpoints"))
    failures = evaluate_runs(
        [folder / "nowhere", damaged, empty, untrained, alibi_run],
        Options(output_dir=tmp_path / "out", lengths=(16,), report=False),
    )
    assert [row.run for row in read_rows(tmp_path / "out" / "results.jsonl")] == ["alibi-run"]
    for failure, words in zip(
        failures,
        ["no work directory", "is damaged", "is damaged (it lacks data, model", "has no checkpoint"],
        strict=True,
    ):
        assert words in failure
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "4"}, "no checkpoint of step 4; there are: 3, 5"),
        ({"split": "test"}, "data.test is empty; train with data.test=..., or score a file by --text_file"),
        ({"text_file": "none.txt"}, "none.txt"),
        ({"multiples": (1,), "lengths": (), "stride": 17}, "stride=17 must be between 1 and the length 16"),
    ],
)
def test_what_a_run_cannot_give(tmp_path, alibi_run, options, message):
    (failure,) = evaluate_runs(
        [alibi_run], Options(**{"output_dir": tmp_path, "lengths": (16,), "report": False} | options)
    )
    assert message in failure
    assert read_rows(tmp_path / "results.jsonl") == []


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"caf\xe9 au lait", "UTF-8")])
def test_a_text_file_that_is_no_text(tmp_path, alibi_run, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    options = Options(output_dir=tmp_path, lengths=(16,), text_file=str(tmp_path / "bad.txt"), report=False)
    (failure,) = evaluate_runs([alibi_run], options)
    assert message in failure
    assert "bad.txt" in failure


def test_too_little_memory_is_a_row_and_is_tried_again(tmp_path, alibi_run, monkeypatch):
    def no_memory(*arguments, **keywords):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes")

    options = Options(output_dir=tmp_path, lengths=(16,), report=False)
    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "score", no_memory)
        assert evaluate_runs([alibi_run], options) == []
    assert evaluate_runs([alibi_run], options) == []
    failed, measured = read_rows(tmp_path / "results.jsonl")
    assert failed.error.startswith("out of memory at 16 tokens")
    assert measured.nll_nats > 0


def test_an_output_directory_that_cannot_be_written(tmp_path, alibi_run, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="can't be written"):
        evaluate_runs([alibi_run], Options(output_dir=tmp_path / "file" / "out"))

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output, "record_row", full)
    with pytest.raises(OutputError, match="No space left on device"):
        evaluate_runs([alibi_run], Options(output_dir=tmp_path, lengths=(16,)))


def test_options_are_checked_before_any_work(tmp_path):
    assert Options(tmp_path, multiples=(4, 1, 4)).lengths_of(128) == [128, 512]
    assert Options(tmp_path, lengths=(100,)).lengths_of(128) == [100]
    with pytest.raises(ValueError, match="stride=65 must be between 1 and the length 64"):
        Options(tmp_path, lengths=(512, 64), stride=65)
    with pytest.raises(ValueError, match="must be latest, best or a step"):
        Options(tmp_path, checkpoint="newest")
    with pytest.raises(ValueError, match="batch_tokens=0 must be at least 1"):
        Options(tmp_path, batch_tokens=0)
    with pytest.raises(ValueError, match="have the same name"):
        evaluate_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"], Options(tmp_path))


def test_a_mesh_of_another_machine_becomes_the_devices_here():
    mesh = base.get_config("mesh.data=64,mesh.fsdp=4").mesh
    assert dict(fitting_mesh(mesh).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    mesh = base.get_config("mesh.fsdp=4").mesh
    assert dict(fitting_mesh(mesh).shape) == {"data": 2, "fsdp": 4, "tensor": 1}


def command(*arguments):
    program = pathlib.Path(extrapolation.__file__).parents[2] / "eval_extrapolation.py"
    return subprocess.run([sys.executable, program, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_the_command_line(tmp_path, alibi_run, folder):
    text = tmp_path / "t.txt"
    text.write_text("one, two, three, four\n")
    done = command(
        f"--workdirs={folder / 'nowhere'},{alibi_run}", "--multiples=1", "--stride=1", f"--text_file={text}",
        "--dump_nll", f"--output_dir={tmp_path}", "--position_options=slopes=0.5:0.25", "--window=4",
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error: 1 of 2 work directories failed" in done.stderr
    assert "alibi-run as alibi(slopes=0.5:0.25) with window 4" in done.stdout
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert (row["device"], row["eval_length"]) == ("cpu x1", 16), "once the run's own length"
    assert row["override"] == {"position": "alibi", "options": {"slopes": [0.5, 0.25]}, "window": 4}
    assert (tmp_path / "nll" / "alibi-run-length=16-stride=1.npz").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths=16", "--multiples=2"], "--lengths and --multiples are two ways to say the same; give one of them"),
        (["--lengths=16,x"], "--lengths=16,x must be positive whole numbers, separated by commas, such as 1,2,4"),
        (["--position_options=factor"], "--position_options=factor is not KEY=VALUE; write for example factor=4"),
    ],
)
def test_flags_that_cannot_be(alibi_run, flags, message):
    done = command(f"--workdirs={alibi_run}", *flags)
    assert done.returncode == 1
    assert done.stderr.strip() == f"error: {message}"


@pytest.fixture(scope="module")
def plain_run(folder):
    return make_run(folder, "none", "none-run")


def test_a_model_is_tested_under_another_method_and_its_rows_say_so(plain_run, tmp_path, monkeypatch):
    """Without parameters none is ALiBi whose slopes are 0, and a window as long as the sequence is none."""
    options = {
        "as alibi": Override("alibi"),
        "as alibi(slopes=0:0)": Override("alibi", (("slopes", (0, 0)),)),
        "with window 3": Override(window=3),
        "as alibi with window 16": Override("alibi", window=16),
    }

    def evaluate(override):
        options = Options(output_dir=tmp_path, lengths=(16,), dump_nll=True, override=override)
        assert evaluate_runs([plain_run], options) == []

    same = (None, Override(), Override("none", window=0), Override(options=(("logit_scale", ""),)))
    for override in (None, *options.values()):
        evaluate(override)
    monkeypatch.setattr(Scorer, "score", None)  # from here on nothing is computed
    for override in (*same, *options.values(), Override("alibi", (("slopes", (0.0, 0.0)), ("draw", 0)))):
        evaluate(override)
    rows = {str(row.override or ""): row for row in latest(find_rows(tmp_path))}
    assert len(find_rows(tmp_path)) == 5
    assert {name: row.override for name, row in rows.items()} == {"": None, **options}
    assert {(row.run, row.position, row.config_hash) for row in rows.values()} == {
        ("none-run", "none", rows[""].config_hash)
    }
    assert rows["as alibi(slopes=0:0)"].nll_nats == pytest.approx(rows[""].nll_nats, rel=1e-6)
    assert rows["as alibi with window 16"].nll_nats == pytest.approx(rows["as alibi"].nll_nats, rel=1e-6)
    for name in ("as alibi", "with window 3"):
        assert abs(rows[name].nll_nats - rows[""].nll_nats) > 1e-3
    dumps = [read_dump(path) for path in (tmp_path / "nll").iterdir()]
    assert {dump.of for dump in dumps} == {row.scoring for row in rows.values()}
    told = (tmp_path / "report.md").read_text()
    assert "none-run as alibi with window 16" in told, "in the table"
    for dump in dumps:
        assert dump.nll.sum() == pytest.approx(rows[dump.of.override].nll_nats, rel=1e-6)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (Override("learned"), r"it needs the position parameters table \[16, 16\], and the checkpoint has no position"),
        (Override("alibi", (("logit_scale", "ssmax"),)), r"needs the position parameters layer ssmax \[2\], and the"),
        (Override("yarn", (("factor", 0.5),)), "finite factor of at least 1"),
        (Override("alibi", (("slope", 1.0),)), "no option 'slope'; did you mean 'slopes'"),
        (Override("randomised", window=4), "model.window=4 can't be put on position=randomised"),
        (Override(window=-1), "model.window=-1 must be from 1 to"),
        (Override("alibbi"), "unknown position method 'alibbi'; did you mean 'alibi'"),
    ],
)
def test_what_a_model_cannot_be_tested_under_is_said_before_any_work(
    tmp_path, plain_run, override, message, monkeypatch
):
    monkeypatch.setattr(RunEvaluation, "_prepare_text", None)
    (failure,) = evaluate_runs([plain_run], Options(output_dir=tmp_path, override=override, report=False))
    assert re.search(message, failure), failure
    assert len(failure.splitlines()) == 1


def test_parameters_are_shared_by_methods_that_have_the_same(folder, learned_run):
    """Of another length a learned table is another one; of itself, with its rows named, it is the same."""
    with pytest.raises(ValueError, match=r"needs the position parameters table \[64, 16\], and .* has .* \[16, 16\]"):
        TrainedRun(learned_run, override=Override(options=(("num_positions", 64),)))
    run = TrainedRun(learned_run, override=Override("learned", (("num_positions", 16),), window=4))
    assert (run.model.config.window, run.config.model.window) == (4, 0)
    assert run.params["position"]["table"].shape == (16, 16)
