"""The evaluated checkpoint: the latest, the best or a step; the replacement of a damaged checkpoint
is named.
"""

import re
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

import alibi
from alibi.config import make_config
from alibi.evaluation.evaluate import evaluate_run, evaluate_runs
from alibi.reporting.recorded import find_rows
from alibi.reporting.rows import read_rows
from alibi.runs import RunDirectory
from alibi.runs.trained import TrainedRun, fitting_mesh
from tests.evaluation.runs import make_run, options_of, subject_of
from tests.refusals import assert_refused


def test_a_latest_checkpoint_that_training_replaces_meanwhile_is_followed(
    alibi_run, tmp_path, capsys
):
    newer = make_run(alibi_run.parent, "alibi", "newer", steps=(7,))
    run = RunDirectory(shutil.copytree(alibi_run, tmp_path / "run"))
    options = options_of(output_dir=tmp_path, lengths=(16,))
    subject = subject_of(run, options)
    shutil.rmtree(run.path / "checkpoints" / "5")
    shutil.copytree(newer / "checkpoints" / "7", run.path / "checkpoints" / "7")
    evaluate_run(subject, options)
    assert [row.step for row in find_rows(tmp_path)] == [7]
    line = "checkpoints has no checkpoint of step 5; that of step 7 is taken in its place"
    assert line in capsys.readouterr().err
    # the older one, of step 3, is not what was asked for
    shutil.rmtree(run.path / "checkpoints" / "7")
    subject = subject_of(run, options_of(output_dir=tmp_path, checkpoint="7"))
    assert_refused("step 7", lambda: subject.run.params)


def test_a_run_that_has_not_ended_is_named(tmp_path, alibi_run, capsys) -> None:
    """Unless its checkpoint was chosen."""
    run = RunDirectory(shutil.copytree(alibi_run, tmp_path / "run"))
    run.write_status("interrupted", step=5, steps=100)
    for checkpoint, said in (("latest", True), ("5", False)):
        options = options_of(output_dir=tmp_path / checkpoint, lengths=(16,), checkpoint=checkpoint)
        evaluate_run(subject_of(run, options), options)
        line = f"run: update 5 of {TrainedRun(run.path).config.train.steps:,}, its training is interrupted"
        assert (line in capsys.readouterr().err) == said


def test_parameters_may_first_be_read_in_a_function_that_jax_traces(alibi_run) -> None:
    traced, run = TrainedRun(alibi_run), TrainedRun(alibi_run)
    x = np.zeros((1, 8), np.int32)
    got = jax.jit(lambda x: traced.model.apply({"params": traced.params}, x))(x)
    params = run.params
    np.testing.assert_array_equal(got, jax.jit(run.model.apply)({"params": params}, x))
    jax.tree.map(np.testing.assert_array_equal, traced.params, params)


@pytest.mark.parametrize(("checkpoint", "damaged", "taken"), [("latest", 5, 3), ("best", 3, 5)])
def test_a_damaged_checkpoint_has_the_next_whole_one_in_its_place(
    alibi_run, tmp_path, capsys, checkpoint, damaged, taken
):
    """A line names the fault; the row has the evaluated step. A step asked for by number has no
    replacement.
    """
    run = shutil.copytree(alibi_run, tmp_path / "run")
    arrays = [
        file
        for file in run.glob(f"checkpoints/{damaged}/params/**/d/*")
        if file.stat().st_size > 500
    ]
    for file in arrays:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    options = {"output_dir": tmp_path, "lengths": (16, 24), "report": False}
    assert evaluate_runs([run], options_of(**options, checkpoint=checkpoint)) == []
    assert [(row.length, row.step) for row in find_rows(tmp_path)] == [
        (16, taken),
        (24, taken),
    ]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert re.match(
        rf"checkpoint .*/{damaged} is damaged .*; that of step {taken} is taken in its place", line
    )
    (failure,) = evaluate_runs([run], options_of(**options, checkpoint=str(damaged)))
    assert f"/{damaged} is damaged" in failure
    assert len(find_rows(tmp_path)) == 2


def test_a_checkpoint_is_latest_best_or_a_step(alibi_run):
    assert [TrainedRun(alibi_run, name).step for name in ("latest", "best", "3")] == [5, 3, 3]
    assert_refused("must be latest, best or a step", TrainedRun, alibi_run, "last")


def test_one_bad_work_directory_does_not_lose_the_others(tmp_path, folder, alibi_run):
    damaged = shutil.copytree(alibi_run, tmp_path / "damaged")
    for file in (damaged / "checkpoints").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    empty = shutil.copytree(alibi_run, tmp_path / "empty")
    (empty / "config.json").write_text("{}")
    untrained = shutil.copytree(
        alibi_run, tmp_path / "untrained", ignore=shutil.ignore_patterns("checkpoints")
    )
    failures = evaluate_runs(
        [folder / "nowhere", damaged, empty, untrained, alibi_run],
        options_of(output_dir=tmp_path / "out", lengths=(16,), report=False),
    )
    assert [row.run for row in read_rows(tmp_path / "out" / "results.jsonl")] == ["alibi-run"]
    for failure, words in zip(
        failures,
        ["no work directory", "is damaged (it was altered", "has no checkpoint", "is damaged"],
        strict=True,
    ):
        assert words in failure
    assert not (folder / "nowhere").exists()


def test_a_mesh_of_another_machine_becomes_the_devices_here(all_devices):
    mesh = make_config("mesh.data=64,mesh.fsdp=4").mesh
    assert dict(fitting_mesh(mesh).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    mesh = make_config("mesh.fsdp=4").mesh
    assert dict(fitting_mesh(mesh).shape) == {"data": 2, "fsdp": 4, "tensor": 1}


def test_from_run_gives_model_and_parameters_which_nnx_runs_too(alibi_run):
    model, params = alibi.from_run(alibi_run)
    tokens = jax.numpy.arange(16)[None]
    expected = jax.jit(TrainedRun(alibi_run).model.apply)({"params": params}, tokens)
    module = nnx.bridge.lazy_init(nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)), tokens)
    nnx.update(module, params)
    np.testing.assert_array_equal(nnx.jit(lambda module, x: module(x))(module, tokens), expected)
