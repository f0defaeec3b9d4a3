"""A run goes on only as it began, and its small files are made again from its checkpoints."""

import dataclasses
import logging
import pathlib
import re
import shutil
import sys

import jax
import pytest

from alibi.config import Config, replaced
from alibi.evaluation.evaluate import EvaluationOptions, evaluate_runs
from alibi.model.decoder import build_model
from alibi.reporting.recorded import find_rows
from alibi.reporting.rows import latest
from alibi.runs import RunDirectory
from alibi.runs.identity import config_hash, differing
from alibi.runs.trained import TrainedRun
from alibi.training import loop
from alibi.training.parent import Parent
from tests.hosts import run_python
from tests.refusals import assert_refused
from tests.training.runs import assert_same, final_state

METHOD = """
import dataclasses

from alibi.positions.alibi import Alibi

try:
    from my_numbers import BIAS_MAX
except ImportError:
    BIAS_MAX = 1.0


@dataclasses.dataclass(frozen=True)
class Mine(Alibi):
    alibi_bias_max: float = BIAS_MAX
"""


def test_what_may_differ_as_a_run_goes_on(tiny_config) -> None:
    config = tiny_config()
    elsewhere = replaced(config, {"data.train": "/scratch/2/train.txt", "data.valid": "/b.txt"})
    assert differing(config, elsewhere) == {}, "the tokens' hashes are compared"
    assert list(differing(config, replaced(config, {"data.valid": ""}))) == ["data.valid"]
    other = replaced(elsewhere, {"data.document_end": "blank_line"})
    assert list(differing(config, other)) == ["data.document_end"]
    more = {"train.accumulation": 2}
    assert differing(config, replaced(config, more)) == {}, "the gradient is the same sum"
    dropping = replaced(config, {"model.attention_dropout": 0.1})
    assert list(differing(dropping, replaced(dropping, more))) == ["train.accumulation"], (
        "each micro-batch draws its own dropout"
    )
    drawing = replaced(config, {"model.max_position": 64})
    assert list(differing(drawing, replaced(drawing, more))) == ["train.accumulation"]
    longer, restarts = {"train.steps": 9}, {"optimizer.schedule": "cosine_restarts"}
    assert differing(config, replaced(config, longer)) == {"train.steps": (6, 9)}
    endless = replaced(config, restarts)
    assert differing(endless, replaced(endless, longer)) == {}
    assert differing(replaced(endless, longer), endless) == {"train.steps": (9, 6)}
    for name, found in (("Falling", {"train.steps": (6, 9)}), ("Halved", {})):
        own = replaced(config, {"optimizer.schedule": f"tests.optimizers.test_optimizers:{name}"})
        assert differing(own, replaced(own, longer)) == found, "the rates of both lengths tell"


def test_the_hash_of_a_run_on_text_files_has_their_names_without_their_folders(tiny_config) -> None:
    """Rows of one text must agree on every machine; rows tell another text by its tokens."""
    config = tiny_config()
    places = ("a/train.txt,b/*.gz", "/scratch/2/train.txt,/c/*.gz", "a/other.txt,b/*.gz")
    here, there, other = (config_hash(replaced(config, {"data.train": one})) for one in places)
    assert here == there != other
    hub = replaced(config, {"data.corpus": "hub", "data.train": "a/train.txt"})
    assert config_hash(hub) != config_hash(replaced(hub, {"data.train": "train.txt"}))


def test_a_finished_run_is_trained_longer_with_its_optimizer(tiny_config, tmp_path) -> None:
    """Its text has moved. The state equals that from a run that was as long at once."""
    config = tiny_config(optimizer__schedule="cosine_restarts", eval__every_steps=0)
    longer = replaced(config, {"train.steps": 9})
    loop.train(longer, str(tmp_path / "at once"))
    loop.train(config, str(tmp_path / "run"))
    moved = shutil.copy(config.data.train, tmp_path / "moved.txt")
    status = loop.train(replaced(longer, {"data.train": str(moved)}), str(tmp_path / "run"))
    assert (status["state"], status["step"]) == ("finished", 9)
    assert_same(*(final_state(longer, tmp_path / name) for name in ("at once", "run")))
    run = RunDirectory(tmp_path / "cosine")
    cosine = replaced(config, {"optimizer.schedule": "cosine"})
    run.write("config.json", dataclasses.asdict(cosine))
    assert_refused(
        r"train.steps: 6 there, 12 now\n.*\n.*--init_from=",
        run.check,
        replaced(cosine, {"train.steps": 12}),
        listed=True,
    )


def test_another_file_of_the_method_and_other_random_numbers_are_told(
    tiny_config, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file, numbers = tmp_path / "my_method.py", tmp_path / "my_numbers.py"
    file.write_text(METHOD)
    numbers.write_text("BIAS_MAX = 8.0")
    config, workdir = tiny_config(position="my_method:Mine"), str(tmp_path / "run")
    config = replaced(config, {"train.steps": 2, "optimizer.warmup_steps": 1})
    loop.train(config, workdir)
    recorded = RunDirectory(workdir).provenance()
    assert list(recorded["method_files"]) == ["own file my_method", "own file my_numbers"]
    assert recorded["jax"]["jax_default_prng_impl"] == "threefry2x32"
    with jax.default_prng_impl("rbg"), pytest.raises(
        ValueError, match=r"trained with jax_default_prng_impl=threefry2x32, .* set JAX_DEFAULT_PRNG"
    ):  # fmt: skip
        loop.train(config, workdir)
    for changed, content in ((file, METHOD + "\n"), (numbers, "BIAS_MAX = 0.25")):
        before = changed.read_text()
        changed.write_text(content)
        assert_refused(f"own file {changed.stem}", loop.train, config, workdir)
        if changed is file:
            file.write_text(before)
    options = EvaluationOptions(tmp_path / "out", lengths=(16,), report=False)
    numbers.write_text("BIAS_MAX = 8.0")
    assert evaluate_runs([workdir], options) == []
    numbers.write_text("BIAS_MAX = 0.25")
    for name in ("my_method", "my_numbers"):  # as in a process that begins now
        monkeypatch.delitem(sys.modules, name)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert evaluate_runs([workdir], options) == []
    assert f"{workdir}: own file my_numbers has changed since training" in caplog.text
    of_trained, of_changed = find_rows(tmp_path / "out")
    assert abs(of_trained.results["perplexity"] - of_changed.results["perplexity"]) > 0.1
    assert latest(find_rows(tmp_path / "out")) == [of_changed], "rows of two codes don't mix"
    child = replaced(config, {"init_from": workdir})
    caplog.clear()
    Parent(child, build_model(child, 256))
    assert f"{workdir}: own file my_numbers has changed since training" in caplog.text


def test_another_code_is_told(tiny_config, finished: pathlib.Path, caplog) -> None:
    """A user may go on with a later version; a study should know that its runs mix two."""
    run = RunDirectory(finished)
    loop.train(tiny_config(), str(finished))
    assert not caplog.records
    run.write("provenance.json", run.provenance() | {"code": "0123456789ab", "commit": "abc"})
    loop.train(tiny_config(), str(finished))
    assert f"{finished} was trained by the code of commit abc, and this is that of" in caplog.text


def refused(config: Config, workdir: pathlib.Path, message: str) -> None:
    """Asserts that training, evaluation and a start from the run end with `message`, and change
    nothing.
    """
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    child = replaced(config, {"init_from": str(workdir)})
    for read in (
        lambda: loop.train(config, str(workdir)),
        lambda: TrainedRun(workdir).tokenizer,
        lambda: Parent(child, build_model(child, 256)),
    ):
        assert_refused(message, read)
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


def test_a_checkpoint_that_has_the_name_of_another_is_damaged(
    tiny_config, finished: pathlib.Path, capsys
) -> None:
    """Resumed, it would end with other numbers than the run without a stop."""
    place = finished / "checkpoints"
    (place / "6").rename(place / "8")
    damage = r"8 is damaged .* it is of update 6: it was renamed or copied"
    assert_refused(damage, lambda: TrainedRun(finished, "8").params)
    loop.train(tiny_config(), str(finished))
    assert re.search(damage, capsys.readouterr().err)
    assert RunDirectory(finished).saved_steps()[-1] == 6, "made again from the checkpoint before"
    assert next(iter(place.glob("8.damaged-*"))).is_dir()


def test_files_of_another_run_are_refused(
    tiny_config, whole: pathlib.Path, finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    other = tiny_config(seed=1, data__tokenizer="words")
    loop.train(other, str(tmp_path / "other"))
    shutil.copytree(tmp_path / "other" / "checkpoints" / "6", finished / "checkpoints" / "9")
    both = r"are of different runs: data\.tokenizer is '{}' in the file and '{}' in the checkpoint; restore"
    for config, name, message in (
        (tiny_config(), "config.json", both.format("words", "bytes")),
        (other, "config.json", both.format("words", "bytes")),
        (
            tiny_config(),
            "provenance.json",
            "provenance.json and checkpoint .*/4 .* the SHA-256 of the train text is",
        ),
        (tiny_config(), "tokenizer", "run/tokenizer is of another run: its fingerprint is"),
        (tiny_config(), "checkpoints/6", both.format("bytes", "words")),
    ):
        shutil.rmtree(finished)
        shutil.copytree(whole, finished)
        copy = shutil.copytree if (whole / name).is_dir() else shutil.copyfile
        if copy is shutil.copytree:
            shutil.rmtree(finished / name)
        copy(tmp_path / "other" / name, finished / name)
        refused(config, finished, message)


SMALL = ("config.json", "status.json", "provenance.json")


@pytest.mark.parametrize("name", SMALL)
def test_each_bit_of_a_small_file_counts(tiny_config, tmp_path, name: str) -> None:
    """One bit may make another number, path or key, which JSON can't tell."""
    run = RunDirectory(tmp_path)
    run.write("config.json", dataclasses.asdict(tiny_config()))
    run.write_status("running", step=10, steps=60, train_nll=4.25)
    run.write("provenance.json", {"corpus": {"train": {"sha256": "3f9a"}}, "vocab_size": 256})
    readers = run.config, run.status, run.provenance
    read, file = dict(zip(SMALL, readers, strict=True))[name], tmp_path / name
    expected, whole_file, told = read(), file.read_bytes(), []
    bits = range(0, 8 * len(whole_file), 1 + len(whole_file) // 15)
    for bit in bits:
        content = bytearray(whole_file)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        try:
            found = read()
        except ValueError as error:
            told.append(str(error))
        else:
            assert found == expected
    assert len(told) > 0.9 * len(bits)
    assert all(f"{file} is damaged (" in message for message in told)


@pytest.mark.slow
def test_small_files_are_made_again_from_a_checkpoint(
    tiny_config, finished: pathlib.Path, caplog
) -> None:
    run, config = RunDirectory(finished), tiny_config()
    before = {name: (finished / name).read_bytes() for name in SMALL}
    for damage in ("half", "removed"):
        for name, content in before.items():
            (finished / name).write_bytes(content[: len(content) // 2])
            if damage == "removed":
                (finished / name).unlink()
        caplog.clear()
        assert run.config() == config
        assert run.status()["state"] == "finished"
        assert run.provenance()["corpus"]["train"]["tokens"] > 0
        for name in SMALL:
            assert caplog.text.count(f"{finished}/{name} ") == 1, "it is told"
        assert_refused(
            "seed: 0 there, 1 now",
            loop.train,
            replaced(config, {"seed": 1}),
            str(finished),
            listed=True,
        )
    # on one of several processes alone: Orbax's manager of checkpoints waits for all of them
    code = f"from alibi.runs import RunDirectory; RunDirectory({str(finished)!r}).status()"
    code += "; import sys; print({'jax', 'orbax'} & {*sys.modules})"
    assert run_python("-c", code).stdout == "set()\n"
    # a run that goes on writes it anew
    shutil.rmtree(finished / "checkpoints" / "6")
    loop.train(config, str(finished))
    assert (finished / "config.json").read_bytes() == before["config.json"]
    caplog.clear()
    assert run.status()["state"] == "finished"
    assert run.provenance()["corpus"]["train"]["tokens"] > 0
    assert caplog.text == ""
